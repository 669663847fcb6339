"""torchrun's rendezvous as launchers call it: several in one process, over real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from rekindle.faults.torchelastic import FRESH_STORE
from rekindle.launch.rendezvous.handler import Rendezvous
from tests.launch.test_nodes import until

WITHIN = 60.0
"""Seconds that each step gets."""


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(FRESH_STORE, "")  # so that it is taken back: a handler sets it for the ranks
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def made() -> Iterator[list[Rendezvous]]:
    launchers: list[Rendezvous] = []
    yield launchers
    for launcher in launchers:
        launcher._hub.stop()


def test_a_spare_waits_longer_than_others_may_and_prepares_itself_meanwhile(
    endpoint: str, made: list[Rendezvous]
) -> None:
    def launcher(**settings: float) -> Rendezvous:
        made.append(Rendezvous(RendezvousParameters("rekindle", endpoint, "job", 2, 2, **settings)))
        return made[-1]

    prepared: list[float] = []
    with ThreadPoolExecutor(6) as pool:
        first, second = launcher(), launcher()
        begun = [pool.submit(each.next_rendezvous) for each in (first, second)]
        assert {each.result(WITHIN).rank for each in begun} == {0, 1}
        spare = launcher(join_timeout=1.0, read_timeout=1.0)
        spare.prepare = lambda: prepared.append(time.monotonic())
        steps_in = pool.submit(spare.next_rendezvous)
        until(lambda: steps_in.done() or (len(prepared) > 1 and prepared[-1] - prepared[0] > 1.2))
        assert not steps_in.done(), steps_in.exception()
        leaves = launcher()
        waits = pool.submit(leaves.next_rendezvous)
        until(lambda: leaves._hub.view.was_spare)
        leaves.shutdown()
        assert waits.exception(WITHIN) is not None
        another = pool.submit(launcher().next_rendezvous)
        second._hub.stop()
        until(lambda: first.is_closed() or first.num_nodes_waiting() > 0)
        assert not first.is_closed(), "by a spare that has left"
        again = pool.submit(first.next_rendezvous)
        rounds = [each.result(WITHIN) for each in (again, steps_in)]
        assert {each.rank for each in rounds} == {0, 1}
        (port,) = {each.bootstrap_store_info.master_port for each in rounds}
        assert port not in {each.result().bootstrap_store_info.master_port for each in begun}, "a new store"
        assert not another.done()
        first.set_closed()
        assert isinstance(another.exception(WITHIN), RendezvousGracefulExitError)
        with pytest.raises(RendezvousClosedError):  # it has trained
            spare.next_rendezvous()


@pytest.mark.parametrize("leaves", [0, 1])
def test_who_has_ended_well_waits_for_a_lost_node_for_a_bounded_time(
    leaves: int, endpoint: str, made: list[Rendezvous]
) -> None:
    with ThreadPoolExecutor(3) as pool:
        made.extend(Rendezvous(RendezvousParameters("rekindle", endpoint, "job", 2, 2)) for _ in range(2))
        for each in [pool.submit(each.next_rendezvous) for each in made]:
            each.result(WITHIN)
        stays, lost = made[1 - leaves], made[leaves]
        waits = pool.submit(stays.await_ends, 1.0)
        time.sleep(2.0)
        assert not waits.done(), "the other one is there, and its ranks run"
        lost._hub.stop()
        error = waits.exception(WITHIN)
        assert isinstance(error, RendezvousTimeoutError) and "none takes its place within 1 s" in str(error)
        assert not stays.is_closed()
        stays.shutdown()


def test_who_asks_for_a_round_of_a_job_that_is_done_has_ended_well(endpoint: str, made: list[Rendezvous]) -> None:
    """As one that was told to start again for a node that had come, just before the others' ranks ended well, too."""
    with ThreadPoolExecutor(2) as pool:
        made.extend(Rendezvous(RendezvousParameters("rekindle", endpoint, "job", 2, 2)) for _ in range(2))
        for each in [pool.submit(each.next_rendezvous) for each in made]:
            each.result(WITHIN)
        assert all([each.result(WITHIN) for each in [pool.submit(each.await_ends, WITHIN) for each in made]])
        for each in made:
            with pytest.raises(RendezvousGracefulExitError):
                each.next_rendezvous()
