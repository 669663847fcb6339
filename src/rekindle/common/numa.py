"""Keeps threads on the processors that are near a part of the machine's memory: the kernel then takes pages from it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["node_of_pci", "run_near"]

_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


def node_of_pci(address: str) -> int | None:
    """Returns the NUMA node of a device on the PCI bus, such as ``0000:3b:00.0``; None if the kernel knows of none."""
    try:
        node = int((_PCI / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def run_near(node: int | None) -> None:
    """Keeps the calling thread, and those that it starts, to the processors of ``node`` that it may use.

    Does nothing where there are none, or ``node`` is None. Never fails; has an effect on Linux only.
    """
    if node is not None and hasattr(os, "sched_setaffinity"):
        with suppress(OSError, ValueError):
            near = _processors(node) & os.sched_getaffinity(0)
            if near:
                os.sched_setaffinity(0, near)


def _processors(node: int) -> set[int]:
    found: set[int] = set()
    for part in (_NODES / f"node{node}" / "cpulist").read_text().strip().split(","):
        first, _, last = part.partition("-")
        if first:  # a node may have memory and no processors
            found.update(range(int(first), int(last or first) + 1))
    return found
