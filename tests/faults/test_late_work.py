"""An error that came from a failed collective is told from others, whatever a framework made of it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from rekindle.faults.late_work import describe_raised, late_work_counts
from rekindle.memory.fault import Fault


def raised(wrap: int, *, hide: bool = False, inner: str = "DistBackendError") -> BaseException:
    """An error of a communicator, raised again ``wrap`` times as an error of a framework."""
    error: BaseException = getattr(dist, inner)("NCCL error: aborted") if inner.startswith("Dist") else OSError(inner)
    for _ in range(wrap):
        try:
            try:
                raise error
            except Exception as cause:
                raise RuntimeError("the training step failed\nsee above") from None if hide else cause
        except RuntimeError as outer:
            error = outer
    return error


def counts(error: BaseException) -> bool:
    return late_work_counts(Fault("exception", 3, 1, 5, describe_raised(error, 3)[0]))


@pytest.mark.parametrize("wrap", [0, 1, 5])
@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("inner", ["DistBackendError", "DistNetworkError"])
def test_a_collective_that_failed_is_seen_through_what_was_raised_from_it(wrap: int, hide: bool, inner: str) -> None:
    assert not counts(raised(wrap, hide=hide, inner=inner))


@pytest.mark.parametrize("wrap", [0, 1, 5])
def test_work_counts_where_no_collective_failed(wrap: int) -> None:
    assert counts(raised(wrap, inner="no such file"))


def test_one_line_tells_what_was_raised_and_from_what() -> None:
    assert (
        describe_raised(raised(1), 3)[0]
        == "rank 3 raised RuntimeError: the training step failed (from DistBackendError)"
    )
    assert describe_raised(raised(0), 0)[0] == "rank 0 raised DistBackendError: NCCL error: aborted"
    assert describe_raised(KeyboardInterrupt(), 0)[0] == "rank 0 raised KeyboardInterrupt"
    error = RuntimeError("x" * 10_000)
    error.__context__ = raised(0)
    assert len(describe_raised(error, 0)[0]) < 600 and not counts(error)


def test_errors_that_lead_to_each_other_are_looked_at_once_and_not_without_end() -> None:
    first, second = ValueError(), TypeError()
    first.__context__, second.__context__ = second, first
    assert counts(first)
    chain = first = OSError()
    for _ in range(100_000):
        chain.__context__ = chain = OSError()
    chain.__context__ = raised(0)
    assert counts(first), "too far away to have led to it"
    while first.__context__ is not None:  # to let go of them all at once would take too deep a stack
        first.__context__, first = None, first.__context__
