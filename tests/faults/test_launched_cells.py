"""The matrix's short form under the real launcher: every fault once, with warm restarts and with cold ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.memory.job_dir import JobDir
from tests.faults.cluster import Cell, read_traces
from tests.faults.matrix import cells, judge, world_of
from tests.launch.launcher import WARM, Launcher

STRUCK = Path(__file__).with_name("struck.py")


@pytest.mark.campaign(seconds=25)
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("kind", [pytest.param(kind, id="-".join(kind)) for kind in cells("short")])
def test_a_fault_under_the_launcher(
    kind: tuple[str, str, str],
    warm: bool,
    root: Path,
    memory: Path,
    job: JobDir,
    tmp_path: Path,
    unbroken_cell: Callable[[Path, str, int], list[str]],
) -> None:
    config, fault, moment = kind
    world = world_of(config, fault)
    cell = Cell(root, memory, config, fault, moment, world=world)
    (tmp_path / "cell").write_bytes(pickle.dumps(cell))
    go = tmp_path / "go"
    options = ("--nproc-per-node", world, "--restart-pause", "0", *([] if warm else ["--no-warm"]))
    with Launcher(tmp_path, *options, STRUCK, "cell", *([go] if warm else [])) as launcher:
        if warm:
            launcher.wait_for(WARM)
            go.touch()
        code = launcher.process.wait(150)
        launcher.read_out()
    said = f"{launcher.output}\n{cell.log(0).read_text()[-3000:]}"
    assert code == 0, said
    assert "started cold" not in launcher.output
    assert judge(read_traces(cell), unbroken_cell(memory, config, world)) == [], said
