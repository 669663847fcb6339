"""Tells which ranks share a memory store, and refuses a node whose ranks have several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rekindle.common.process_start import clock_id
from rekindle.errors import UsageError
from rekindle.session.session import Session

__all__ = ["Residence", "refuse_split_nodes", "residence_of"]


class Residence(NamedTuple):
    """The node and the directory in which one rank's snapshots lie."""

    node: str
    """Equal on ranks of the same host, boot, and file system behind the memory store. Containers on one host that have
    file systems of their own there are nodes of their own."""
    directory: str
    """Path of the job's directory, as this rank has it."""
    identity: tuple[int, int] | None
    """Device and inode of that directory; None where it can't be had."""


def residence_of(session: Session) -> Residence:
    """Returns the residence of a rank that has taken its place: the lock in the directory keeps others from removing
    it."""
    path = session.job_dir.path
    identity = None
    if session.job is not None:
        try:
            found = os.stat(path)
            identity = found.st_dev, found.st_ino
        except OSError:  # somebody has removed it: the first save will say so
            pass
    return Residence(_node_id(path.parent.parent), str(path), identity)


def refuse_split_nodes(residences: Sequence[Residence]) -> None:
    """Raises UsageError if ranks of one node, whose ``residences`` these are by rank, have different directories.

    An agent waits for the shards of all ranks of its node, and would find some of them in neither directory.
    """
    first: dict[str, tuple[int, Residence]] = {}
    for rank, there in enumerate(residences):
        if there.identity is None:
            continue
        earlier, its = first.setdefault(there.node, (rank, there))
        if its.identity != there.identity:
            raise UsageError(
                f"ranks {earlier} and {rank} run on one node, {there.node.split()[0]}, and have different memory "
                f"stores: {its.directory} and {there.directory}. Nothing would reach storage: give all ranks of a node "
                "the same memory= or $REKINDLE_MEMORY"
            )


def _node_id(memory: Path) -> str:
    try:
        device = os.stat(memory).st_dev
    except OSError:
        device = 0
    return f"{clock_id()} {device}"
