"""A script sees the same in a warm start as in a cold one."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from tests.launch.launcher import WARM, Launcher

LOOKS = Path(__file__).parent / "looks"
REPOSITORY = Path(__file__).parents[2]


def look(directory: Path, command: list[object], *, warm: bool) -> list[str]:
    """Returns what the script has written in its second start, line by line, of both ranks."""
    directory.mkdir()
    go, logs = directory / "go", directory / "logs"
    options = ["--nproc-per-node=2", "--max-restarts=1", "--redirects=3", f"--log-dir={logs}"]
    options += [] if warm else ["--no-warm"]
    with Launcher(directory, *options, *command, "root", "go", "--more", "words", PYTHONPATH=str(REPOSITORY)) as job:
        if warm:
            job.wait_for(WARM)
        else:
            job.wait_until(lambda: len(list(logs.rglob("stderr.log"))) == 2)
        go.touch()
        job.wait_for("allows no more")
        pid = job.process.pid
        assert "started cold" not in job.output
        assert "the end" in job.output or "exit code 1" in job.output
    written = []
    for log in sorted(logs.rglob("attempt_1/*/std*.log")):
        written += [f"{log.parent.name} {log.name}", *log.read_text().split("\n")]
    changing = {rf"\b{pid}\b": "LAUNCHER", re.escape(str(directory)): "DIRECTORY"}
    changing |= {r"rekindle-launch-\w+": "PLACE", r"none_\w{8}|[0-9a-f-]{36}_\w{8}": "LOGS"}
    changing |= {r"(MASTER_PORT\W+)\d+": r"\1PORT", r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}": "RUN"}
    changing |= {r" at 0x[0-9a-f]+": "", r"(/proc/|pid=)\d+": r"\1PID"}
    text = "\n".join(written)
    for pattern, plain in changing.items():
        text = re.sub(pattern, plain, text)
    return text.split("\n")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([LOOKS / "train.py"], id="script", marks=pytest.mark.campaign(seconds=45)),
        pytest.param(["-m", "tests.launch.looks.train"], id="module", marks=pytest.mark.campaign(seconds=45)),
    ],
)
def test_a_script_sees_the_same_in_a_warm_start_as_in_a_cold_one(tmp_path, command):
    cold = look(tmp_path / "cold", command, warm=False)
    warm = look(tmp_path / "warm", command, warm=True)
    assert len(cold) > 100
    assert any(line.startswith("parent LAUNCHER") for line in cold)
    drawn = [line for line in cold + warm if line.startswith("drawn ")]
    assert len({number for line in drawn for number in line.split()[1:]}) == 3 * 4, drawn
    cold, warm = ([line for line in lines if line not in drawn] for lines in (cold, warm))
    differ = list(difflib.unified_diff(cold, warm, "cold", "warm", lineterm="", n=0))
    assert not differ, "\n".join(differ)
