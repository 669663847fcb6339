"""docs/frameworks.md names the versions that the tests run with, and commands that there are."""

from __future__ import annotations

import re

import pytest

from tests.integrations.environments import REPO, pinned

PAGE = (REPO / "docs" / "frameworks.md").read_text()


def test_each_version_is_the_pinned_one_and_none_is_missing() -> None:
    named: dict[str, set[str]] = {}
    for package, version in re.findall(r"`([\w-]+)` (\d[\w.]*\w)", PAGE):
        named.setdefault(package, set()).add(version)
    assert named == pinned()


def test_each_adapter_has_a_row() -> None:
    folders = {path.name for path in (REPO / "src/rekindle/integrations").iterdir() if (path / "__init__.py").exists()}
    pages = set(re.findall(r"^\| .*?\((\w+)\.md", PAGE, re.MULTILINE))
    of_another_name = {"accelerate": "huggingface", "transformers": "huggingface"}
    assert {of_another_name.get(folder, folder) for folder in folders} <= pages


def test_commands_and_links() -> None:
    makefile = (REPO / "Makefile").read_text()
    words = set(re.findall(r"^OWN := (.*)$", makefile, re.MULTILINE)[0].split())
    words |= set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE)) | {"lightning"}
    assert set(re.findall(r"`make ([\w-]+)`", PAGE)) <= words
    assert "(docs/frameworks.md)" in (REPO / "README.md").read_text()


def test_the_newest_releases_are_tried_each_week() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((REPO / ".github/workflows/weekly.yml").read_text())
    runs = {step["run"] for one in job["jobs"].values() for step in one["steps"] if "run" in step}
    assert runs == {"make frameworks-latest", "make torch-matrix"}
    assert job[True]["schedule"]  # YAML's word for "on"
