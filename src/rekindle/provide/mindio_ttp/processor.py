"""Defines Processor: one rank's guard, through which its training is watched and its last step is dumped at a fault."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import rekindle
from rekindle.errors import RekindleError, UsageError
from rekindle.memory.fault import LOST, Fault
from rekindle.provide.mindio_ttp import mindx
from rekindle.provide.mindio_ttp.board import Board
from rekindle.provide.mindio_ttp.callbacks import callbacks
from rekindle.provide.mindio_ttp.dump import Dump, Result
from rekindle.provide.mindio_ttp.replicas import groups_to_json, parse_groups

__all__ = ["Processor", "action_limit", "begin", "current", "end", "root"]

log = logging.getLogger("rekindle")

_ROOT = "REKINDLE_TTP_ROOT"
"""Environment variable: folder of the job's records, the same on all ranks."""
_LIMIT = "TTP_NORMAL_ACTION_TIME_LIMIT"
"""Environment variable of the original: seconds that an action may take."""
_DEADLINE = 25.0
"""Seconds from the moment a rank is told of a fault to the end of its process. torchrun kills ranks 30 s after the
first has ended."""
_SHARE = 0.85
"""Part of the time left that the dump may take; the hook in which it runs is left behind after 0.9."""
_CLOSE = 60.0
"""Seconds for the last record to reach storage."""
_AGENT = 30.0
"""Seconds in which the node's agent should be there when training begins."""
_NEVER = 1 << 62
"""Steps between two snapshots: the program holds the state, so there is nothing to save at each."""


def root() -> Path:
    """Returns the folder of the job's records: $REKINDLE_TTP_ROOT, else ``rekindle-ttp`` in the current one."""
    given = os.environ.get(_ROOT) or "rekindle-ttp"
    if "://" in given:
        raise UsageError(f"{_ROOT} is {given!r}: must be a folder that all ranks see, not a URL")
    return Path(given).absolute()


def action_limit() -> float:
    """Returns the seconds from the moment a rank is told of a fault to the end of its process. Raises UsageError."""
    given = os.environ.get(_LIMIT)
    if not given:
        return _DEADLINE
    if not given.isdigit() or not 30 <= int(given) <= 1800:
        raise UsageError(f"{_LIMIT} is {given!r}: must be a number of seconds, 30 to 1800")
    return float(given)


class Processor:
    """Watches over one rank. For the thread that trains, except ``order_dump``."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.result: Result | None = None
        """Outcome of the dump, once there was one."""
        self._groups: list[Any] | None = None
        """Groups of replicas that this rank told of, as JSON; None before it did."""
        self._checkpointer: rekindle.Checkpointer | None = None
        self._board: Board | None = None
        self._guard: Any = None
        self._watch: Any = None
        """The guard, also while it is being left."""
        self._failed = False
        self._damaged = False
        """True once the memory of this rank's device has lost what it held: then it writes nothing."""
        self._generators: dict[int, dict[str, Any]] = {}
        """States of the random generators at the ends of the two newest steps."""
        self._secured: int | None = None
        """The step that this rank's state is of, after a fault."""
        self._stands_still, self._ordered, self._over = threading.Event(), threading.Event(), threading.Event()
        self._on_devices: Callable[[], Any] = ExitStack

    # -- beginning and ending -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Joins the job. A collective of all ranks. Raises UsageError where they have no process group."""
        if self._checkpointer is not None:
            raise UsageError(f"the processor of rank {self.rank} is started already")
        rank, world = _rank_and_world()
        if (rank, world) != (self.rank, self.world):
            raise UsageError(
                f"tft_init_processor was given rank {self.rank} of {self.world}, and this process is rank {rank} of "
                f"{world}: initialise torch.distributed first, and give both its numbers"
            )
        action_limit()  # refused here: at a fault it would be too late
        state = {"ttp": rekindle.Values()}
        self._checkpointer = rekindle.Checkpointer(root(), state, rng=False, snapshot_every=_NEVER)
        self._checkpointer.restore(step=0)  # the program has checkpoints of its own, and loads them itself
        folder = root() / "dumps" / _agree(lambda: _make_board(root() / "dumps"))
        try:
            self._board = Board(folder, rank)
        except OSError as error:
            raise UsageError(
                f"rank {rank} can't write to {folder}, which rank 0 has made: {error}. All ranks must see it: "
                f"set {_ROOT} to a folder that they share"
            ) from error
        if self._groups is not None:
            self._board.tell(f"groups-{rank}", self._groups)

    def tell_replicas(self, info: Any) -> None:
        """Notes which ranks hold copies of what this one holds. Raises UsageError."""
        self._groups = groups_to_json(parse_groups(self.rank, info))
        if self._board is not None:
            self._board.tell(f"groups-{self.rank}", self._groups)

    def stop(self) -> None:
        """Leaves the job. Does nothing the second time."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is None or self._failed:  # what a failed rank had to do for others is done
            return
        self._leave_guard(None)
        try:
            checkpointer.close(_CLOSE)
        except RekindleError as error:  # only records are on their way
            log.warning("rank %d: %s", self.rank, error)

    # -- training -----------------------------------------------------------------------------------------------

    def run(self, train: Callable[[], Any]) -> Any:
        """Calls ``train``, and sees to the faults that strike meanwhile."""
        self._enter_guard()
        try:
            answer = train()
        except BaseException as error:
            self.fail(error)
            raise
        self._leave_guard(None)
        return answer

    def start_update(self) -> None:
        """Notes that the optimizer's update begins. Doesn't return once there is a fault."""
        self._enter_guard()
        assert self._checkpointer is not None
        with self._standing(), self._checkpointer.updating():
            pass

    def end_update(self, step: int) -> None:
        """Notes that ``step`` updates are complete. Doesn't return once there is a fault."""
        from rekindle.state.rng import RngState  # noqa: PLC0415

        self._enter_guard()
        assert self._checkpointer is not None
        self._generators = {known: self._generators[known] for known in list(self._generators)[-1:]}
        self._generators[step] = RngState().state_dict()
        with self._standing():
            self._checkpointer.step(step)

    @contextmanager
    def _standing(self) -> Iterator[None]:
        """Wraps what waits once there is a fault. The thread that trains draws no random numbers in it."""
        self._stands_still.set()
        yield
        self._stands_still.clear()

    def _enter_guard(self) -> None:
        if self._guard is not None or self._failed:
            return
        if self._checkpointer is None:
            raise UsageError("tft_start_processor comes before training")
        if self._groups is None:
            log.warning(
                "rank %d: tft_set_optimizer_replica was not called: no copies are known of what this rank holds, so "
                "nothing is dumped if a rank dies",
                self.rank,
            )
            self.tell_replicas([{"rank_list": [self.rank], "replica_cnt": 1, "replica_shift": 0}])
        self._on_devices = _beside_training()
        self._guard = self._watch = self._checkpointer.guard(
            gasp_deadline=action_limit(),
            notices=(signal.SIGTERM, self._ordered.is_set),
            on_gasp=self._note_secured,
            on_exit=self._dump,
        )
        self._guard.__enter__()
        if self.world > 1:
            self._guard.connected(_AGENT)  # else a fault of the first steps reaches no other rank

    def _leave_guard(self, error: BaseException | None) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.__exit__(type(error) if error is not None else None, error, getattr(error, "__traceback__", None))

    # -- failing ------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException, *, damaged: bool = False) -> None:
        """Dumps, as this rank can't go on. Doesn't return if another rank's fault was first.

        What ``damaged`` memory holds is not written: only ranks with copies can do so.
        """
        self._stands_still.set()
        self._damaged = damaged or callbacks.tells_damage(error)
        if words := callbacks.describe(error):
            log.warning("rank %d: %s", self.rank, words)
        self._enter_guard()
        self._failed = True
        self._leave_guard(error)

    def await_dump(self) -> None:
        """Returns once this process has done its part in a dump, or there was none in time."""
        self._stands_still.set()
        if not self._failed:
            self._over.wait(action_limit())

    def order_dump(self) -> bool:
        """Dumps, and ends the job, as if it had been told to go. Returns False if it doesn't train. For any thread."""
        self._ordered.set()
        return self._guard is not None

    def _note_secured(self, step: int) -> None:
        """Notes a step. Before the first one is complete, the program's own checkpoint has all there is."""
        self._secured = step or None

    def _dump(self, fault: Fault) -> None:
        """Takes part in the dump, in a thread of its own, as the last thing before the process ends."""
        assert self._board is not None
        left = self._watch.ends_at - time.monotonic()
        faults = {fault.rank: mindx.PROCESS_ERROR}
        mindx.report_fault(faults)
        dump = Dump(
            self._board,
            self.rank,
            self.world,
            callbacks,
            None if self._damaged else self._secured,
            self._set_generators,
            self._stands_still,
            self._on_devices,
            time.monotonic() + _SHARE * left,
        )
        ended = fault.cause in ("signal", "exit", "oom", LOST)
        self.result = dump.run({fault.rank} if ended else ())
        mindx.report_result(faults, self.result)
        self._over.set()
        callbacks.call("exit")

    def _set_generators(self, step: int) -> None:
        from rekindle.state.rng import RngState  # noqa: PLC0415

        if step in self._generators:
            RngState().load_state_dict(self._generators[step])


_processor: Processor | None = None
"""That of this process, which has one at a time."""


def begin(rank: int, world: int) -> None:
    """Makes this process's processor, in place of one before."""
    global _processor
    end()
    _processor = Processor(rank, world)
    atexit.unregister(_end_at_exit)
    atexit.register(_end_at_exit)


def _end_at_exit() -> None:
    """Lets the processor leave, unless an uncaught exception ends the program: then the others must hear of a fault."""
    if getattr(sys, "last_value", None) is None:
        end()


def current() -> Processor | None:
    """Returns this process's processor; None if there is none."""
    return _processor


def end() -> None:
    """Lets the processor leave the job. Does nothing if there is none."""
    global _processor
    leaving, _processor = _processor, None
    if leaving is not None:
        leaving.stop()


def _rank_and_world() -> tuple[int, int]:
    import torch.distributed as dist  # noqa: PLC0415

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _agree(make: Callable[[], str]) -> str:
    """Returns on all ranks what ``make`` returns on rank 0. A collective. Raises UsageError on all where it fails."""
    import torch.distributed as dist  # noqa: PLC0415

    rank, world = _rank_and_world()
    made = ["", ""]
    if rank == 0:
        try:
            made[0] = make()
        except OSError as error:
            made[1] = f"rank 0 can't make a folder for records: {error}. {_ROOT} names another place"
    if world > 1:
        dist.broadcast_object_list(made)
    if made[1]:
        raise UsageError(made[1])
    return made[0]


def _make_board(above: Path) -> str:
    name = secrets.token_hex(8)
    Board.make(above, name)
    return name


def _beside_training() -> Callable[[], Any]:
    """Returns what wraps calls in streams of their own: what training has queued may be stuck. Makes these now."""
    from rekindle.devices.table import current_devices, require_backend  # noqa: PLC0415

    pairs = [(require_backend(device), device) for device in current_devices()]
    made = [(backend, device, backend.new_stream(device)) for backend, device in pairs]

    @contextmanager
    def beside() -> Iterator[None]:
        with ExitStack() as entered:
            for backend, device, stream in made:
                backend.enter(device)
                entered.enter_context(backend.on(stream))
            yield

    return beside
