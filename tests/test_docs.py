"""What the documents say works, works: their Python blocks run, their links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import forked
from tests.test_architecture import ROOMS

REPO = Path(__file__).parents[1]
PAGES = [page.relative_to(REPO) for page in [*REPO.glob("*.md"), *REPO.glob("docs/**/*.md")]]

_BLOCK = re.compile(r"^```(\w+)( notest)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SHELL = "import subprocess; subprocess.run(['bash', '-euo', 'pipefail', '-c', {}], check=True)"
"""A shell block runs in the middle of the Python ones, as it stands in the middle of the page."""


class Block(NamedTuple):
    language: str
    runs: bool
    text: str


def blocks_of(page: str) -> list[Block]:
    return [Block(m[1], not m[2], m[3]) for m in _BLOCK.finditer((REPO / page).read_text())]


def run_blocks(code: list[str], where: Path, memory: Path) -> None:
    """Runs them as one script, whose shell finds the commands of this Python's environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "REKINDLE_MEMORY": str(memory), "PATH": path}
    done = forked.run(forked.Code("\n".join(code)), cwd=where, env=environment, timeout=170)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/guide.md",
        pytest.param("docs/export.md", marks=pytest.mark.campaign(seconds=40)),
        pytest.param("docs/dcp.md", marks=pytest.mark.campaign(seconds=10)),
        "docs/files.md",
        "docs/torch_nebula.md",
        pytest.param("docs/mindio_ttp.md", marks=pytest.mark.campaign(seconds=8)),
        pytest.param("docs/data.md", marks=pytest.mark.campaign(seconds=20)),
        "docs/advice.md",
        pytest.param("docs/adapting.md", marks=pytest.mark.campaign(seconds=15)),
    ],
)
def test_python_blocks_run_in_order(page: str, tmp_path: Path, memory: Path) -> None:
    blocks = [block.text for block in blocks_of(page) if block.language == "python" and block.runs]
    assert blocks
    run_blocks(blocks, tmp_path, memory)


@pytest.mark.campaign(seconds=12)
def test_recipes_run(tmp_path: Path, memory: Path) -> None:
    """Those for a shell, too, between the others."""
    code = []
    for block in blocks_of("docs/recipes.md"):
        if block.runs and block.language in ("python", "sh"):
            code.append(block.text if block.language == "python" else _SHELL.format(repr(block.text)))
    run_blocks(code, tmp_path, memory)


def test_each_recipe_has_a_block_of_a_kind_that_is_checked() -> None:
    text = (REPO / "docs/recipes.md").read_text()
    assert {block.language for block in blocks_of("docs/recipes.md")} == {"python", "sh"}
    for section in text.split("\n## ")[1:]:
        assert _BLOCK.search(section), section[:40]


def test_commands_of_recipes_are_shell() -> None:
    for block in blocks_of("docs/recipes.md"):
        if block.language == "sh":
            done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
            assert done.returncode == 0 and not done.stderr, done.stderr


def test_what_recipes_tell_the_launcher_is_understood() -> None:
    """The command lines after 'rekindle run', by torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    text = "".join(block.text for block in blocks_of("docs/recipes.md") if block.language == "sh")
    (line,) = re.findall(r"rekindle run (.*)", text.replace("\\\n", " "))
    assert get_args_parser().parse_args(shlex.split(line)).training_script == "train.py"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    text = (REPO / page).read_text()
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if "://" not in target:
            there = (REPO / page).parent / target if target else REPO / page
            assert there.exists(), target
            assert not anchor or anchor in anchors_of(there.read_text()), f"{target}#{anchor}"


def anchors_of(text: str) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def drawn_tree() -> dict[str, str]:
    """Maps each path in the tree of docs/architecture.md, relative to src/rekindle, to what the page says of it."""
    page = (REPO / "docs" / "architecture.md").read_text()
    drawn, folders = {}, []
    for line in page.split("```\nsrc/rekindle/\n")[1].split("```")[0].splitlines():
        match = re.fullmatch(r"( +)(\S+) +(\S.*)", line)
        assert match, f"docs/architecture.md: a line of the tree should be 'name   what it does': {line!r}"
        indent, name, words = match.groups()
        folders[len(indent) // 2 - 1 :] = [name]
        path = "".join(folders)
        assert path not in drawn, f"docs/architecture.md has {path} twice"
        drawn[path] = words
    return drawn


def test_the_tree_of_the_architecture_page_is_the_tree() -> None:
    """Every module and folder in its place, and nothing else. A folder's line stands for its __init__.py."""
    package = REPO / "src" / "rekindle"
    there = {"__init__.py", "py.typed"}
    for path in package.rglob("*.py"):
        inside = path.relative_to(package)
        there |= {f"{folder.as_posix()}/" for folder in inside.parents if folder.name}
        if path.name != "__init__.py":
            there.add(inside.as_posix())
    drawn = drawn_tree().keys()
    missing, gone = sorted(there - drawn), sorted(drawn - there)
    assert not missing, f"add one line each to the tree in docs/architecture.md, in its folder: {missing}"
    assert not gone, f"take these lines out of the tree in docs/architecture.md, no such files exist: {gone}"


def layers() -> list[str]:
    """Lists the rooms of each layer, the highest first."""
    by_layer: dict[int, list[str]] = {}
    for room, (layer, _) in sorted(ROOMS.items()):
        if room != "__main__":  # only starts the command line
            by_layer.setdefault(layer, []).append(room)
    return [", ".join(by_layer[layer]) for layer in sorted(by_layer, reverse=True)]


def test_the_layers_are_described_as_they_are_tested() -> None:
    page = " ".join((REPO / "docs" / "architecture.md").read_text().split())
    assert f"`{' > '.join(layers())}`" in page
    table = (REPO / "CONTRIBUTING.md").read_text().split("## The rooms")[1].split("```\n")[1]
    assert [re.split(r" {2,}", line)[0] for line in table.splitlines()] == layers()


def test_a_line_of_the_tree_begins_with_a_noun_or_a_verb() -> None:
    headless = {"what", "which", "whether", "how", "where", "who"}
    assert not [path for path, words in drawn_tree().items() if words.split()[0].lower() in headless]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_modules_that_a_page_quotes_exist(page: Path) -> None:
    """`save/copy.py` is one of the package, `tests/...` and the like are paths from the top."""
    if page.name == "CHANGELOG.md":  # tells of old names
        return
    for quoted in re.findall(r"`([\w/]+/\w+\.py)`", (REPO / page).read_text()):
        assert any((top / quoted).exists() for top in (REPO, REPO / "src" / "rekindle")), f"{page}: {quoted}"
    for quoted in re.findall(r"`(test_\w+\.py)`", (REPO / page).read_text()):
        assert any(REPO.glob(f"tests/**/{quoted}")), f"{page}: {quoted}"


def test_the_glossary_is_short() -> None:
    rows = (REPO / "docs" / "architecture.md").read_text().split("## Glossary")[1].split("\n## ")[0].count("\n| ") - 1
    assert 0 < rows <= 25, f"{rows} words of our own; take the field's word where there is one"


def test_the_guide_names_every_metric() -> None:
    from rekindle.save.metrics import Metrics

    page = (REPO / "docs" / "guide.md").read_text()
    assert not [field.name for field in fields(Metrics) if f"`{field.name}`" not in page]


def test_the_format_page_names_every_dtype_and_type_tag() -> None:
    from rekindle.state import codec, tree

    page = (REPO / "docs" / "format.md").read_text()
    for tag in [*codec._DECODERS, "$pickle", *tree._DICTS.values(), "$tuple", "$tensor", "$value"]:
        assert tag in page, tag


def test_hooks_and_workflow_run_what_make_check_runs() -> None:
    yaml = pytest.importorskip("yaml")
    makefile = (REPO / "Makefile").read_text()
    recipe = re.search(r"^check: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe
    made = {tuple(line.split("$(BIN)/")[1].split()[:2]) for line in recipe[1].splitlines()}
    (local,) = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {tuple(hook["entry"].removeprefix(".venv/bin/").split()[:2]) for hook in local["hooks"]}
    assert hooks == made
    frameworks = re.findall(r"^PACKAGES_(\w+)", makefile, re.MULTILINE)
    jobs = yaml.safe_load((REPO / ".github/workflows/ci.yml").read_text())["jobs"].values()
    runs = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert [run for run in runs if "torch-matrix" not in run] == ["make check test", f"make {' '.join(frameworks)}"]
