"""Modules loaded ahead of a script: which parts of a package are left out, and which reads of the environment count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.launch.spare import Orders

PRELOAD = """
import importlib.util, json, sys
from pathlib import Path
from rekindle.launch.preload import Preload, UnfitModuleError
folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
without = {}
def begin():
    preload = Preload(Path("/nowhere"), {"RANK"}, without.keys())
    preload._roots.add(Path(folder))
    preload._note_file = lambda *_: None
    return preload
preload = begin()
files = {name: importlib.util.find_spec(name.partition(".")[0]).origin for name in names}
files = {name: str(Path(file).with_name("other.py")) if "." in name else file for name, file in files.items()}
for name, file in files.items():
    try:
        preload.load({name: file}, lambda: None)
    except UnfitModuleError as unfit:
        without[unfit.args[0]] = unfit.args[1]
        preload = begin()
print(json.dumps([without, sorted(set(names) & set(sys.modules)), sorted(preload._read)]))
"""


def preload(folder: Path, *names: str) -> tuple[dict[str, str], list[str], list[str]]:
    """Returns the parts that were left out, with the reasons; the modules loaded; and the variables that were read."""
    done = subprocess.run(
        [sys.executable, "-c", PRELOAD, str(folder), *names],
        env={**os.environ, "SOME_SETTING": "1", "TQDM_MININTERVAL": "0.1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    without, loaded, read = json.loads(done.stdout)
    return without, loaded, read


def test_a_part_of_a_package_that_can_not_be_loaded_ahead_leaves_out_no_other(tmp_path: Path) -> None:
    """As torch.utils.tensorboard may: what is left of torch takes most of the time of a start."""
    for folder in ("large", "large/utils"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "large" / "fit.py").touch()
    (tmp_path / "large" / "utils" / "late.py").touch()
    (tmp_path / "large" / "utils" / "unfit.py").write_text("import os\nRANK = os.environ.get('RANK')\n")
    without, loaded, _ = preload(tmp_path, "large", "large.utils.unfit", "large.utils.late", "large.fit")
    assert without == {"large.utils": "its import reads RANK"}
    assert "large.fit" in loaded and "large.utils.late" not in loaded


def test_a_package_of_which_many_parts_are_left_out_is_left_out() -> None:
    """Each part costs the import of all others once more."""
    orders = Orders(0, 0, "", "", None, [], {"other.part": "why"})
    for number in range(8):
        orders.leave_out(f"large.part{number}", "why")
    assert len(orders.without) == 9
    orders.leave_out("large.last", "last")
    assert orders.without == {"other.part": "why", "large": "last"}


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("networkx", "NETWORKX_FALLBACK_TO_NX"),
        ("tqdm", "TQDM_MININTERVAL"),
        pytest.param("torch._inductor.compile_fx", "NETWORKX_FALLBACK_TO_NX", marks=pytest.mark.campaign(9)),
    ],
)
def test_what_torchs_compiler_imports_is_loaded_ahead(tmp_path: Path, name: str, variable: str) -> None:
    """networkx and tqdm search the environment for variables of their own."""
    without, loaded, read = preload(Path(pytest.importorskip(name.partition(".")[0]).__file__).parents[1], name)
    assert not without and loaded == [name]
    assert "SOME_SETTING" not in read and variable in read


def test_to_copy_the_environment_reads_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "copying.py").write_text("import os\nALL = dict(os.environ)\n")
    without, _, _ = preload(tmp_path, "copying")
    assert without == {"copying": "its import reads the whole environment"}


def test_a_process_that_an_import_starts_is_ended(tmp_path: Path) -> None:
    (tmp_path / "starting.py").write_text(
        "import subprocess\n"
        "CHILD = subprocess.Popen(['sleep', '1000'], stdin=subprocess.PIPE)\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(CHILD.pid))\n"
    )
    without, _, _ = preload(tmp_path, "starting")
    assert without == {"starting": "its import starts a process"}
    assert not Path("/proc", (tmp_path / "child").read_text()).exists()
