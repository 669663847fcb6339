"""What the documents say works, works: their Python blocks run, their links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md", "docs/export.md", "docs/dcp.md"])
def test_python_blocks_run_in_order(page: str, tmp_path: Path, memory: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (REPO / page).read_text(), re.DOTALL)
    assert blocks
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env={**os.environ, "REKINDLE_MEMORY": str(memory)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "page", [p.relative_to(REPO) for p in [*REPO.glob("*.md"), *REPO.glob("docs/**/*.md")]], ids=str
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (REPO / page).read_text()):
        if "://" not in target:
            assert (REPO / page).parent.joinpath(target).exists(), target


def test_the_architecture_page_names_every_module() -> None:
    page = (REPO / "docs" / "architecture.md").read_text()
    for path in (REPO / "src" / "rekindle").rglob("*.py"):
        if path.name not in ("__init__.py", "__main__.py"):
            assert path.name in page, path


def test_the_format_page_names_every_dtype_and_type_tag() -> None:
    from rekindle.state import codec, tree

    page = (REPO / "docs" / "format.md").read_text()
    for tag in [*codec._DECODERS, "$pickle", *tree._DICTS.values(), "$tuple", "$tensor", "$value"]:
        assert tag in page, tag
