"""The decision on a restart, from failures made by hand."""

from __future__ import annotations

import pytest

import rekindle
from rekindle.launch.restarts import Decision, Failure, Limits, Restarts


def failure(error: str | None = "rank 0 raised ValueError: bad", step: int | None = 6, **rest: object) -> Failure:
    return Failure(error, raised=True, steps={} if step is None else {"root": step}, **rest)  # type: ignore[arg-type]


def decide(restarts: Restarts, *failures: Failure) -> list[Decision]:
    return [restarts.decide(one) for one in failures]


def restarted(found: list[Decision]) -> list[bool]:
    return [decision.restart for decision in found]


def test_the_third_like_error_at_one_step_ends_the_job() -> None:
    found = decide(Restarts(Limits()), *[failure(reached=1203, step=1203)] * 3)
    assert restarted(found) == [True, True, False] and found[-1].repeated
    assert found[-1].words == "the same error 3 times at step 1204: the job is not started again"


@pytest.mark.parametrize(
    "between",
    [
        failure(step=7),
        failure("rank 0 raised KeyError: bad"),
        failure(None),
        failure(step=None, seconds=61.0),
    ],
    ids=["progress", "another error", "killed", "nothing is known of a long start"],
)
def test_what_lies_between_two_errors_parts_them(between: Failure) -> None:
    found = decide(Restarts(Limits()), failure(), failure(), between, failure(), failure())
    assert restarted(found) == [True] * 5


def test_an_error_is_the_same_whichever_rank_and_address_it_names() -> None:
    texts = [
        f"rank {rank} raised RuntimeError: peer 10.0.0.{rank}:{port} at {port:#x}" for rank, port in ((0, 4), (1, 5))
    ]
    assert restarted(decide(Restarts(Limits(same=2)), *map(failure, texts))) == [True, False]


def test_long_starts_without_a_known_step_are_never_called_the_same() -> None:
    assert all(restarted(decide(Restarts(Limits()), *[failure(step=-1, seconds=61.0)] * 20)))
    assert all(restarted(decide(Restarts(Limits()), *[failure(step=None, seconds=61.0)] * 20)))
    assert restarted(decide(Restarts(Limits()), *[failure(step=None, seconds=59.0)] * 3)) == [True, True, False]


def test_progress_gives_all_restarts_back() -> None:
    restarts = Restarts(Limits(restarts=2))
    found = decide(restarts, *[failure(None, step) for step in (4, 4, 9, 9)])
    assert [decision.words for decision in found] == [
        "started again, restart 1 of 2 since step 4",
        "started again, restart 2 of 2 since step 4",
        "started again, restart 1 of 2 since step 9",
        "started again, restart 2 of 2 since step 9",
    ]
    end = restarts.decide(failure(None, 9))
    assert not end.restart and end.words.startswith("the job failed 3 times at or before step 9: --max-restarts 2 ")


def test_to_reach_an_earlier_step_again_is_no_progress() -> None:
    """A job that goes back on purpose, and fails on the way, would otherwise be started for ever."""
    assert restarted(decide(Restarts(Limits(restarts=2)), *[failure(None, s) for s in (9, 2, 3, 4)])) == [
        *(True, True, False, False)
    ]


def saving(*paths: str, error: str | None = None, after: float = 5.0, seconds: float = 9.0) -> Failure:
    """The end of a start of a job that saves files only."""
    return Failure(error, raised=True, files=dict.fromkeys(paths, after), seconds=seconds)


def test_a_file_at_a_new_path_gives_all_restarts_back() -> None:
    restarts = Restarts(Limits(restarts=2))
    starts = [saving("/e1"), saving("/e1"), saving("/e2", "/e3"), saving(), saving("/e2")]
    found = decide(restarts, *starts)
    assert [decision.words for decision in found[:4]] == [
        "started again, restart 1 of 2 since /e1 was saved",
        "started again, restart 2 of 2 since /e1 was saved",
        "started again, restart 1 of 2 since /e3 was saved",
        "started again, restart 2 of 2 since /e3 was saved",
    ]
    assert not found[4].restart
    assert found[4].words == "the job failed 3 times since /e3 was saved: --max-restarts 2 allows no more"


def test_a_file_that_is_saved_again_is_progress_after_a_minute() -> None:
    """A script that saves to one path when it begins would otherwise be started for ever."""
    assert all(restarted(decide(Restarts(Limits(restarts=2)), *[saving("/last", after=61.0, seconds=62.0)] * 9)))
    assert restarted(decide(Restarts(Limits(restarts=2)), *[saving("/last", seconds=99.0)] * 3)) == [
        *(True, True, False)
    ]


def test_the_same_error_after_new_files_is_another_one() -> None:
    found = decide(Restarts(Limits()), *[saving(f"/e{number}", error="bad") for number in range(9)])
    assert all(restarted(found)) and found[-1].pause == 0
    found = decide(Restarts(Limits()), *[saving("/e1", error="bad")] * 3)
    assert restarted(found) == [True, True, False]
    assert found[2].words == "the same error 3 times after /e1, the newest file saved: the job is not started again"


def test_files_are_no_progress_where_a_step_is_known() -> None:
    found = decide(Restarts(Limits(restarts=2)), *[failure(None, 6, files={f"/e{n}": 99.0}) for n in range(3)])
    assert restarted(found) == [True, True, False]
    assert found[1].words == "started again, restart 2 of 2 since step 6"


def test_restarts_in_the_life_of_a_job_that_saves_files() -> None:
    found = decide(Restarts(Limits(restarts=2, since_progress=False)), *[saving(f"/e{n}") for n in range(3)])
    assert restarted(found) == [True, True, False]


def test_progress_at_one_of_several_roots_is_progress() -> None:
    restarts = Restarts(Limits(restarts=1))
    for step in range(50):
        assert restarts.decide(Failure(None, steps={"first": 100, "second": step})).restart


def test_restarts_in_the_life_of_a_job() -> None:
    found = decide(Restarts(Limits(restarts=2, since_progress=False)), *[failure(None, step) for step in (1, 2, 3)])
    assert restarted(found) == [True, True, False]
    assert found[-1].words == "the job was started 3 times and failed each time: --max-restarts 2 allows no more"


def test_the_pause_grows_without_progress_to_its_bound() -> None:
    restarts = Restarts(Limits(restarts=5000))
    found = decide(restarts, *[failure(None, step=None)] * 2000)
    assert [decision.pause for decision in found[:9]] == [0, 1, 2, 4, 8, 16, 32, 60, 60] and found[-1].pause == 60
    assert found[3].words == "started again in 4 s, restart 4 of 5000"
    assert restarts.decide(failure(None, 0)).pause == 0
    assert all(not one.pause for one in decide(Restarts(Limits(pause=0)), *[failure(None)] * 9))


def test_errors_that_each_start_would_meet_end_the_job() -> None:
    mismatch, busy = rekindle.StateMismatchError("other shapes"), rekindle.BusyError("in use")
    end = Restarts(Limits()).decide(failure(refused=mismatch))
    assert isinstance(end.error, rekindle.StateMismatchError) and "other shapes: the job is not" in str(end.error)
    assert Restarts(Limits(retry_refused=True)).decide(failure(refused=mismatch)).restart
    assert not Restarts(Limits()).decide(failure(refused=busy)).restart
    assert restarted(decide(Restarts(Limits()), failure(refused=busy, restarted=True))) == [True]


def test_no_restart_is_allowed() -> None:
    end = Restarts(Limits(restarts=0)).decide(failure())
    assert not end.restart and end.words == "the job is not started again: --max-restarts is 0"
