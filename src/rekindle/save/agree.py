"""Agrees with all ranks on who copies what, and whether inside of ``step()`` or behind it. All are collectives."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rekindle.errors import UsageError
from rekindle.save.capture import Capture
from rekindle.save.missing import describe_missing
from rekindle.session.group import ProcessGroup, SingleProcess
from rekindle.settings import Overlap, Settings

__all__ = ["agree_on_overlap", "agree_on_partition"]

log = logging.getLogger("rekindle")


def _refuse_missing(group: SingleProcess | ProcessGroup, state: Mapping[str, Any]) -> None:
    """Raise UsageError, on all ranks, when an optimizer of any rank trains what nothing in the state holds."""
    for rank, missing in enumerate(group.gather(describe_missing(state))):
        if missing:
            where = f"rank {rank}: " if group.world > 1 else ""
            raise UsageError(
                f"{where}parameters are trained and not saved, so that a restart would lose them: {missing}. Put the "
                "module that has them into `state`, or allow it with Checkpointer(..., allow_missing=True)"
            )


def agree_on_overlap(group: SingleProcess | ProcessGroup, capture: Capture, settings: Settings) -> tuple[Overlap, bool]:
    """Returns the overlap that counts, and True if snapshots are committed inside of ``step()``. A collective.

    All ranks do so or none: a step is only as safe as its last part.
    """
    overlap = settings.overlap
    in_step = all(group.gather(capture.copied_in_step(overlap)))
    return overlap if in_step or overlap != "auto" else True, in_step


def agree_on_partition(
    group: SingleProcess | ProcessGroup, capture: Capture, local_ranks: list[int], *, allow_missing: bool
) -> int:
    """Tell ``capture`` with which ranks to share the copying. Returns the estimated bytes of a snapshot. A collective.

    Raises UsageError where parameters are trained and not saved, unless ``allow_missing``.

    Where two groups of ranks have parameters of one name they may be copies of each other, of which no tensor tells, or
    different layers of a pipeline's stages, which differ by now: then each rank's are private to it. Where replicas
    don't hold the same tensors, every rank copies all that it has.
    """
    if not allow_missing:
        _refuse_missing(group, capture.state)
    capture.share_with(group.rank, group.world, local_ranks)
    private = _find_rank_private(group, capture)
    if private:
        capture.share_with(group.rank, group.world, local_ranks, private)
    strangers = _find_unequal_replicas(group, capture)
    if strangers is not None:
        capture.share_with(group.rank, group.world, [group.rank], private)
        if group.rank == 0:
            log.warning(
                "ranks %d and %d are replicas of each other, but don't have the same tensors in their state: each rank "
                "saves all that it has",
                *strangers,
            )
    return capture.estimate()


def _find_rank_private(group: SingleProcess | ProcessGroup, capture: Capture) -> set[str]:
    """Returns the names of parameters that several groups of ranks have, with different contents. A collective."""
    owners: dict[str, tuple[int, ...]] = {}
    twice = {
        name
        for shared in group.gather(capture.shared_params())
        for ranks, names in shared.items()
        for name in names
        if owners.setdefault(name, ranks) != ranks
    }
    if not twice:
        return set()
    first: dict[str, str] = {}
    found = [entry for own in group.gather(capture.fingerprints(twice)) for entry in own]
    if all(first.setdefault(name, fingerprint) == fingerprint for name, fingerprint in found):
        return set()
    if group.rank == 0:
        log.warning(
            "Ranks that are not replicas share parameter names, such as %s. Each rank's copy is saved separately; "
            "restore with the same number of ranks.",
            sorted(twice)[0],
        )
    return twice


def _find_unequal_replicas(group: SingleProcess | ProcessGroup, capture: Capture) -> tuple[int, int] | None:
    """Returns two ranks that share the copying, and don't mean the same; None if there are none. A collective."""
    digests: list[dict[tuple[int, ...], str]] = group.gather(capture.partition_digests())
    for rank, own in enumerate(digests):
        for ranks, digest in own.items():
            for other in ranks:
                if digests[other].get(ranks) != digest:
                    return rank, other
    return None
