"""Asks for a decision after each failure of torchrun's agent, at the point that torch provides for its subclasses."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from rekindle.launch.provide import seconds_to_end
from rekindle.launch.rendezvous.entry import BACKEND
from rekindle.launch.rendezvous.handler import Rendezvous
from rekindle.launch.restarts import Decision
from rekindle.launch.waits import wait_for_ends

if TYPE_CHECKING:
    from rekindle.launch.warm import WarmWorkers

__all__ = ["Signals", "deciding"]

_MEETINGS = 5
"""Times that nodes meet for one start, when each time one of them is lost just then."""


class Signals:
    """Answers signals to the launcher as torch does, but for one that comes while ranks are started.

    That one waits until all of them have been: before, torch does not know of those that run, and would leave them
    behind, without anybody to end them.
    """

    _answer: Callable[[int, FrameType | None], None]

    def __init__(self) -> None:
        self._starting = self._ignored = False
        self._waits: int | None = None

    @contextmanager
    def taken(self, processes: ModuleType) -> Iterator[None]:
        """Takes signals in place of torch's handler, which torch looks up at each start.

        A torch that has none of that name answers them itself, at once.
        """
        name = "_terminate_process_handler"
        if not hasattr(processes, name):
            yield
            return
        self._answer = getattr(processes, name)
        setattr(processes, name, self.take)
        try:
            yield
        finally:
            setattr(processes, name, self._answer)

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal. Raises torch's SignalException, unless ranks are being started or signals are ignored."""
        if self._ignored:
            return
        if self._starting:
            self._waits = number
        else:
            self._answer(number, frame)

    def ignore(self) -> None:
        """Ignores all that it takes: an answer would only disturb the launcher's end.

        The system is told so as well, as Python gives it back what it handles itself before it has ended.
        """
        self._ignored = True
        for number in signal.valid_signals():
            if signal.getsignal(number) == self.take:
                signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Wraps the start of ranks. Raises torch's SignalException at its end for a signal that came meanwhile."""
        self._starting = True
        try:
            yield
        finally:
            self._starting = False
        if self._waits is not None:
            number, self._waits = self._waits, None
            self._answer(number, None)


@contextmanager
def deciding(
    decide: Callable[[Mapping[int, Any]], Decision],
    workers: WarmWorkers | None,
    say: Callable[[str], object],
    missed: Callable[[], bool],
    begin: Callable[[bool], object],
    follow: Callable[[], object],
    signals: Signals,
) -> Iterator[None]:
    """Makes torchrun's agents ask ``decide`` after each failure, and tend ``workers`` whenever they look at the ranks.

    ``begin`` is called before ranks are started, with False if these are the job's first; ``follow`` before they are
    ended because those of other nodes have failed, or a node has come. ``decide`` is given torch's failures, by global
    rank. The agents look ten times a second (``--monitor-interval``). ``say`` is given the lines of Rekindle's own
    rendezvous. ``missed`` is called when a node is lost between a rendezvous and the exchange that follows; it returns
    True if the others are to meet again. torchrun has no option for its agent's class, so the name by which its
    launcher knows it is replaced.
    """
    # Imported here, as the other commands need no torch.
    from torch.distributed import DistError  # noqa: PLC0415
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState  # noqa: PLC0415
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing import api as processes  # noqa: PLC0415
    from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError  # noqa: PLC0415
    from torch.distributed.launcher import api  # noqa: PLC0415

    class Agent(LocalElasticAgent):
        def __init__(self, spec: WorkerSpec, *args: Any, **options: Any) -> None:
            self._look_every, spec.monitor_interval = spec.monitor_interval, 0.0  # waited for below, not slept
            super().__init__(spec, *args, **options)
            self._restarted = self._has_failed = False
            handler: object = spec.rdzv_handler
            if isinstance(handler, Rendezvous):
                handler.say = say
                if workers is not None and isinstance(spec.entrypoint, str):
                    handler.prepare = partial(workers.expect, [spec.entrypoint, *map(str, spec.args)])

        def run(self, *args: Any, **options: Any) -> RunResult:
            """Returns the result of the ranks. Raises RendezvousGracefulExitError for a spare node that had none.

            torch's returns None then, which its launcher takes for a result.
            """
            result: RunResult | None = super().run(*args, **options)
            if result is None:
                raise RendezvousGracefulExitError
            if not result.is_failed():
                signals.ignore()  # the job is done, whatever comes while all is given back
            return result

        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            """Meets the other nodes, and once more when one that had come doesn't say what all must know of it."""
            for left in reversed(range(_MEETINGS)):
                try:
                    super()._rendezvous(worker_group)
                    return
                except DistError:
                    if not left or not missed():
                        raise

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            """Starts the ranks. Those that dump a checkpoint for long get as long to end as they were promised."""
            begin(self._restarted or not getattr(worker_group.spec.rdzv_handler, "is_first_round", True))
            self._restarted = True
            with signals.starting():
                started: dict[int, Any] = super()._start_workers(worker_group)
                ranks: Any = self._pcontext  # which also closes itself, once a rank has failed
                close = ranks.close
                ranks.close = lambda signal=None, timeout=0: close(signal, max(timeout, seconds_to_end()))
            return started

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            """Returns the state of the ranks. When they have failed, all of them have ended by now.

            Those that have ended well are waited for on all nodes, as the job is not done before. They count as healthy
            if all are to be started again: torch then does so.
            """
            handler = worker_group.spec.rdzv_handler
            meets = handler.get_backend() == BACKEND
            if workers is not None:
                workers.tend()
            wait_for_ends([worker.id for worker in worker_group.workers], self._look_every)
            result: RunResult = super()._monitor_workers(worker_group)
            self._has_failed = result.is_failed()
            if self._has_failed:
                decision = decide(result.failures)
                if decision.restart and self._remaining_restarts < 1:
                    # Both numbers: a rank's TORCHELASTIC_RESTART_COUNT is their difference, and tells its starts apart.
                    self._remaining_restarts += 1
                    worker_group.spec.max_restarts += 1
                elif not decision.restart:
                    worker_group.spec.max_restarts -= self._remaining_restarts
                    self._remaining_restarts = 0
                if meets:  # a node that slept would be taken for one whose ranks don't end
                    handler.pause = decision.pause  # type: ignore[attr-defined]
                else:
                    time.sleep(decision.pause)
            if result.state == WorkerState.SUCCEEDED and meets and not self._all_end(handler):
                return RunResult(state=WorkerState.HEALTHY)
            return result

        def _restart_workers(self, worker_group: WorkerGroup) -> None:
            """Ends the ranks and starts them again. ``follow`` says so if none of this node has failed."""
            if not self._has_failed:
                follow()
            super()._restart_workers(worker_group)

        def _all_end(self, handler: Any) -> bool:
            """Waits for the ranks of other nodes to end well. Returns False if all are to be started again instead.

            Raises torch's errors if they won't, and its SignalException.
            """
            try:
                ended: bool = handler.await_ends(self._exit_barrier_timeout)
            except processes.SignalException:
                say("all ranks of this node had ended well; those of others may not have")
                raise
            return ended

        def _exit_barrier(self) -> None:
            """Waits for other nodes as torch does, but for Rekindle's own rendezvous, by which ``_all_end`` has waited.

            torch's wait answers no signal, so it has a thread of its own.
            """
            if self._worker_group.spec.rdzv_handler.get_backend() != BACKEND:
                waits = threading.Thread(target=super()._exit_barrier, name="rekindle-exit", daemon=True)
                waits.start()
                waits.join(self._exit_barrier_timeout)

    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    try:
        with signals.taken(processes):
            yield
    finally:
        api.LocalElasticAgent = LocalElasticAgent  # type: ignore[attr-defined]
