"""A framework's version that no test has seen is named; patches of a tested one are not."""

from __future__ import annotations

import logging
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from rekindle.integrations.versions import warn_if_untested
from tests.integrations.environments import REPO, environment, pinned, ranks_of

_CALL = re.compile(r"warn_if_untested\((.+), \*_TESTED\)")
_TESTED = re.compile(r'^_TESTED = \("(\d+)\.(\d+)", "(\d+)\.(\d+)"\)$', re.MULTILINE)
_HELPERS = {"__init__", "epochs", "peft", "randomness", "versions", "dcp"}
"""What is no adapter to a framework with a version: DCP is torch's."""


@pytest.mark.parametrize(
    ("first", "last", "named"),
    [("1.9", "1.10", True), ("9999.1", "9999.2", True), ("1.0", "9999.1", False), ("series", "series", False)],
)
def test_versions(first: str, last: str, named: bool, caplog: pytest.LogCaptureFixture) -> None:
    here = ".".join(version("pytest").split(".")[:2])
    first, last = (here if name == "series" else name for name in (first, last))
    with caplog.at_level(logging.WARNING, "rekindle"):
        warn_if_untested("pytest", first, last)
    assert [f"pytest {version('pytest')}" in line for line in caplog.messages] == [True] * named


def test_a_framework_that_was_not_installed_as_a_package_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rekindle"):
        warn_if_untested("rekindle-no-such-package", "1.0", "9999.1")
    assert caplog.messages[0].startswith("rekindle-no-such-package of unknown version: ")


def adapters() -> dict[str, dict[str, tuple[tuple[int, int], tuple[int, int]]]]:
    """Maps each adapter to the packages whose versions it checks, each with the first and the last tested series."""
    top = REPO / "src" / "rekindle" / "integrations"
    found: dict[str, dict[str, tuple[tuple[int, int], tuple[int, int]]]] = {}
    for path in sorted(top.rglob("*.py")):
        name = path.relative_to(top).with_suffix("").parts[0]
        checked = found.setdefault(name, {}) if name not in _HELPERS else {}
        text = path.read_text()
        for call in _CALL.findall(text):
            series = _TESTED.search(text)
            assert series, f"{path}: _TESTED has the first and the last tested series"
            first, last = (int(series[1]), int(series[2])), (int(series[3]), int(series[4]))
            checked |= {package: (first, last) for package in re.findall(r'"([\w-]+)"', call)}
    return found


def test_each_adapter_checks_a_version_and_the_pinned_one_is_among_those_it_knows() -> None:
    assert adapters().keys() >= {"accelerate", "deepspeed", "lightning", "transformers"}
    for adapter, checked in adapters().items():
        known = {package: series for package, series in checked.items() if package in pinned()}
        assert known, f"{adapter}: warn_if_untested() is called with no package that the Makefile pins"
        for package, (first, last) in known.items():
            for pin in pinned()[package]:
                major, minor = map(int, pin.split(".")[:2])
                assert first <= (major, minor) <= last, f"{adapter}: {package} {pin} is pinned, and would be named"


@pytest.mark.campaign(seconds=10)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("package", "home", "ranks", "options"),
    [
        ("accelerate", "transformers", 1, ["run"]),
        ("deepspeed", "deepspeed", 2, ["run", "--steps", "1"]),
        ("lightning", None, 1, ["run", "--steps", "1"]),
        ("transformers", "transformers", 1, ["run", "own", "--max-steps", "1"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_real_framework_of_another_version_is_named(
    package: str, home: str | None, ranks: int, options: list[str], memory: Path, tmp_path: Path
) -> None:
    """The installed release says of itself that it is a later one."""
    python = sys.executable if home is None else environment(home)
    (pin, *_) = sorted(pinned()[package])
    later = f"{pin.split('.')[0]}.999.0"
    told = tmp_path / "later" / f"{package}-{later}.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {later}\n")
    program, path = f"train_{package}", f"{told.parent}:{REPO / 'src'}"
    codes = ranks_of(ranks, python, program, *options, where=tmp_path, PYTHONPATH=path, DS_ACCELERATOR="cpu")
    said = (tmp_path / f"{program}-0.out").read_text()
    assert codes == [0] * ranks, said
    assert f"{package} {later}: Rekindle's adapter was tested with " in said, said
