"""Threads near a part of the machine's memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from rekindle.common import numa
from rekindle.common.numa import node_of_pci, run_near

REAL = Path("/sys/devices/system/node/node0")


def processors_near(node: int | None) -> set[int]:
    """Those that a thread may use once it is to run near ``node``."""
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: (run_near(node), found.append(os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(not REAL.is_dir(), reason="the kernel names no nodes")
def test_the_kernel_s_own_list_is_understood() -> None:
    linked = {int(path.name[3:]) for path in REAL.glob("cpu[0-9]*")}
    assert numa._processors(0) == {cpu for cpu in linked if (REAL / f"cpu{cpu}" / "topology").exists()}


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Node 0 has the last of this process's processors; node 1 has one that it may not use, and node 2 has none."""
    mine = max(os.sched_getaffinity(0))
    for node, cpus in enumerate([f"{mine},5000-5003", "6000", ""]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    return tmp_path


def test_a_thread_keeps_to_what_is_near_and_allowed(nodes: Path) -> None:
    mine = os.sched_getaffinity(0)
    assert numa._processors(0) == {max(mine), 5000, 5001, 5002, 5003}
    assert processors_near(0) == {max(mine)}
    assert os.sched_getaffinity(0) == mine, "the thread that trains goes where it likes"


@pytest.mark.parametrize("node", [1, 2, 3, None])
def test_a_thread_stays_free_where_nothing_is_near(nodes: Path, node: int | None) -> None:
    assert processors_near(node) == os.sched_getaffinity(0)


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("", None)])
def test_the_node_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, node: int | None) -> None:
    """The kernel writes -1 where it knows of none, as on a machine with one node."""
    monkeypatch.setattr(numa, "_PCI", tmp_path)
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text(text)
    assert node_of_pci("0000:3b:00.0") == node
    assert node_of_pci("0000:3c:00.0") is None
