"""What a script's source tells of its imports: nothing of it runs, and nothing is imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rekindle.launch.foresee import foresee, write_foreseen


def script(folder: Path, source: str) -> tuple[Path, list[str]]:
    """Returns the path of a script, and where Python looks for its modules."""
    path = folder / "train.py"
    path.write_text(source)
    return path, [str(folder), *sys.path]


def test_what_is_installed_is_foreseen_also_where_the_scripts_own_modules_import_it(tmp_path: Path) -> None:
    package = tmp_path / "model"
    package.mkdir()
    (package / "__init__.py").write_text("import numpy.linalg\n")
    (package / "layers.py").write_text("from . import sizes\nraise SystemExit('it runs')")
    (package / "sizes.py").write_text("import click\nfrom model import layers")
    folder = tmp_path / "no" / "package"
    folder.mkdir(parents=True)
    (folder / "last.py").write_text("import yaml; text = '\\d'")
    source = "import json\nfrom model.layers import Layer\ndef main():\n    import rekindle, pytest, no.package.last\n"
    source += "if False:\n    import rich\nimport csv\n"
    modules, changed = foresee(*script(tmp_path, source))
    own = "json numpy numpy.linalg click csv yaml"
    assert [*modules] == [*own.split(), "torch", "torch._dynamo", "rekindle.checkpointer"], "as they would be loaded"
    assert Path(modules["numpy.linalg"]).is_file() and "numpy" not in modules["json"]
    assert changed == []


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '1'", ["OMP_NUM_THREADS"]),
        ("del os.environ['OMP_NUM_THREADS']", ["OMP_NUM_THREADS"]),
        ("environ.setdefault('OMP_NUM_THREADS', '1')", ["OMP_NUM_THREADS"]),
        ("os.environ |= {'OMP_NUM_THREADS': '1'}", ["OMP_NUM_THREADS"]),
        ("os.environ.update(OMP_NUM_THREADS='1')", ["OMP_NUM_THREADS"]),
        ("os.putenv('OMP_NUM_THREADS', '1')", ["OMP_NUM_THREADS"]),
        ("for name in ['OMP_NUM_THREADS']: os.environ[name] = '1'", ["OMP_NUM_THREADS"]),
        ("rank = os.environ['RANK'], os.environ.get('LOCAL_RANK')", []),
    ],
)
def test_variables_that_the_script_may_set_are_told(tmp_path: Path, line: str, changed: list[str]) -> None:
    (tmp_path / "settings.py").write_text(line)
    found = foresee(*script(tmp_path, "import rekindle\ndef main():\n    import settings"))
    assert found[1] == changed


def test_modules_of_a_folder_above_are_found_where_the_script_adds_one(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "models.py").write_text("import rekindle, click")
    lines = "import sys\nsys.path.insert(0, '..')\nfrom models import Model"
    assert "click" in foresee(*script(tmp_path / "scripts", lines))[0]


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import rekindle\nsys.path.append('/elsewhere')\nimport settings_elsewhere",
        "import rekindle\nthis is no python",
        "import rekindle" + " " * (1 << 20),
    ],
    ids=["without rekindle", "another path", "broken", "long"],
)
def test_a_script_that_can_not_be_read_to_its_end_is_not_foreseen(tmp_path: Path, source: str) -> None:
    record = tmp_path / "record"
    assert not write_foreseen(*script(tmp_path, source), record)
    assert not record.exists()


def test_what_is_foreseen_is_written_as_a_start_would(tmp_path: Path) -> None:
    path, search = script(tmp_path, "import rekindle")
    assert write_foreseen(path, search, tmp_path / "record")
    modules, changed = foresee(path, search)
    assert json.loads((tmp_path / "record").read_bytes()) == {
        "modules": modules, "changed": changed, "foreseen": True
    }  # fmt: skip
