"""Agrees with all ranks on the copying of a snapshot: by whom, and inside of ``step()`` or behind it. Collectives."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rekindle.errors import UsageError
from rekindle.save.capture import Capture
from rekindle.save.missing import describe_missing
from rekindle.session.group import ProcessGroup, SingleProcess
from rekindle.settings import Overlap, Settings

__all__ = ["agree_on_overlap", "share_out"]

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
    """The overlap that counts, and whether snapshots are committed inside of ``step()``. A collective.

    All ranks do so or none: a step is only as safe as its last part.
    """
    overlap = settings.overlap
    if overlap == "auto" and settings.snapshot_every == "auto":
        overlap = True  # what is hidden behind training costs the budget nothing, so that more snapshots can be had
    in_step = all(group.gather(capture.copied_in_step(overlap)))
    return overlap if in_step or overlap != "auto" else True, in_step


def share_out(
    group: SingleProcess | ProcessGroup, capture: Capture, allow_missing: bool, local_ranks: list[int]
) -> int:
    """Tell ``capture`` with whom to share its work. Bytes that a snapshot will take. A collective.

    Raises UsageError where parameters are trained and not saved, unless ``allow_missing``.

    Where ranks that are to share the copying of something don't mean the same, every rank copies all. Where two groups
    of ranks have parameters of one name they may be copies of each other, of which no tensor tells, or different layers
    of a pipeline's stages, which differ by now: then each rank's are its own.
    """
    if not allow_missing:
        _refuse_missing(group, capture.state)
    capture.among(group.rank, group.world, local_ranks)
    owners: dict[str, tuple[int, ...]] = {}
    twice = {
        name
        for families in group.gather(capture.shared_params())
        for ranks, names in families.items()
        for name in names
        if owners.setdefault(name, ranks) != ranks
    }
    looks: dict[str, str] = {}
    found = [look for looked in (group.gather(capture.fingerprints(twice)) if twice else []) for look in looked]
    if any(looks.setdefault(name, seen) != seen for name, seen in found):
        if group.rank == 0:
            log.warning(
                "ranks that are no replicas of each other have parameters of the same names, such as %s: each rank's "
                "are saved as its own, to be restored on as many ranks",
                sorted(twice)[0],
            )
        capture.among(group.rank, group.world, local_ranks, twice)
    shares: list[dict[tuple[int, ...], str]] = group.gather(capture.shares())
    for rank, own in enumerate(shares):
        for ranks, digest in own.items():
            differing = [other for other in ranks if shares[other].get(ranks) != digest]
            if differing:
                capture.among(group.rank, group.world, [group.rank], twice)
                if group.rank == 0:
                    log.warning(
                        "ranks %d and %d are replicas of each other, but don't have the same tensors in their state: "
                        "each rank saves all that it has",
                        *(rank, differing[0]),
                    )
                return capture.estimate()
    return capture.estimate()
