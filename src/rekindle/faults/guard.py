"""``ckpt.guard()``: what goes on around guarded training, from its first step to a fault's end."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator, ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, Protocol

from rekindle.agent.report import main_stack
from rekindle.common.os_errors import describe_error
from rekindle.errors import FormatError, NonFiniteLossError
from rekindle.faults.agent_link import Line
from rekindle.faults.gasp import Gasp
from rekindle.faults.inject import obey
from rekindle.faults.notices import Notice, Notices
from rekindle.faults.stacks import debugger_of, last_collectives, recording, stacks
from rekindle.faults.torchelastic import tell_launcher
from rekindle.format.receipt import write_atomic
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir
from rekindle.memory.status import SECURING, STABLE, Status, StatusPage, StatusReader
from rekindle.save.gate import Gate

__all__ = ["LEFT", "Guard", "Guarded", "Hooks"]

log = logging.getLogger("rekindle")

LEFT = 75
"""Exit code of a rank that ended because of another one's fault: EX_TEMPFAIL, try again."""

_WORD = 0.2
"""Seconds that a rank which raised waits for the agent's word on whether somebody else was first."""
_FLUSH = 0.2
_LINE, _LONGEST = 500, 16 << 10
"""Characters of what was raised, and of its traceback, that others are told."""


class Guarded(Protocol):
    """The part of a Checkpointer that a guard needs."""

    @property
    def job(self) -> JobDir | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def alone(self) -> bool:
        """Whether the job has no other rank."""

    @property
    def local_ranks(self) -> Sequence[int]:
        """Ranks on this node."""

    @property
    def generation(self) -> int: ...

    def begin(self, gate: Gate) -> None:
        """From now on tell ``gate`` what training does."""

    def end(self) -> None:
        """Tell it no more."""

    def finish(self, step: int) -> None:
        """The guarded part has ended well, and the state is that of ``step``: see it into memory."""

    def secure(self, step: int, whole: bool) -> None:
        """Bring the live state, which is that of ``step``, into memory: all of it or this rank's part. Any thread,
        while nothing changes it."""

    def shared_by_all(self, step: int) -> bool:
        """Whether all ranks of this node have secured their parts of ``step``, or have none of what others hold too."""

    def durable(self, step: int) -> bool:
        """Whether ``step`` is on storage."""


@dataclass(frozen=True)
class Hooks:
    """Callables for backends and frameworks that need to do something of their own. What they raise is logged."""

    on_stop: Callable[[Fault], object] | None = None
    """First thing after a fault: free threads that are stuck in an operator."""
    on_clean: Callable[[int], object] | None = None
    """Before the state of a step is read: let the device take work again, if ``on_stop`` kept it from that."""
    on_gasp: Callable[[int], object] | None = None
    """After the state of a step was secured: save something more."""
    on_exit: Callable[[Fault], object] | None = None
    """Last thing before the process ends."""

    def call(self, name: str, argument: Any) -> None:
        hook = getattr(self, name)
        if hook is not None:
            try:
                hook(argument)
            except BaseException:  # SystemExit, too, would end the thread that is to secure the state
                log.exception("%s failed", name)


@dataclass
class Guard(ContextDecorator):
    """Context manager and decorator. One at a time for a Checkpointer, in the thread that trains."""

    trainer: Guarded
    step: Callable[[], int]
    """Completed updates at the start."""
    floor: float | None
    """Seconds without progress that are no hang; None: there is no watchdog."""
    deadline: float = 25.0
    notices: Sequence[Notice] = (signal.SIGTERM,)
    hooks: Hooks = field(default_factory=Hooks)
    _fault: Fault | None = None
    _first: Fault | None = None
    """What the agent says was first."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _heard: threading.Event = field(default_factory=threading.Event)

    # -- entering and leaving -----------------------------------------------------------------------------------

    def __enter__(self) -> Guard:
        self._fault = self._first = None
        self._heard.clear()
        self._pages: dict[int, StatusReader] = {}
        self._stacks: IO[str] | None = None
        self._line: Line | None = None
        self._pid, self._thread = os.getpid(), threading.get_ident()
        trainer = self.trainer
        with ExitStack() as undo:
            page = self._own_page(trainer.job)
            self._gate = Gate(page or StatusPage(None, trainer.generation), self.step(), obey)
            if page is not None and trainer.job is not None:
                undo.enter_context(self._connect(trainer.job))
            self._notices = Notices(self.notices, self._told_to_go)
            undo.callback(self._notices.close)
            trainer.begin(self._gate)
            undo.callback(trainer.end)
            self._undo = undo.pop_all()
        return self

    def _own_page(self, job: JobDir | None) -> StatusPage | None:
        why = "there is no memory store"
        if job is not None:
            try:
                return StatusPage(job.paths.status_page(self.trainer.rank), self.trainer.generation)
            except OSError as error:
                why = f"memory store {job.path}: {describe_error(error)}"
        log.warning("%s, so no agent watches this rank: it notices its own exceptions and signals, nothing else", why)
        return None

    def _connect(self, job: JobDir) -> ExitStack:
        """Let the agent watch this rank, and ask it at a hang where its threads stand."""
        trainer, number = self.trainer, 0
        with ExitStack() as undo:
            with suppress(OSError):
                job.paths.flight_record(trainer.rank).unlink(missing_ok=True)
                self._stacks = undo.enter_context(open(job.paths.stacks(trainer.rank), "w"))
                if hasattr(signal, "SIGRTMIN"):
                    number = int(signal.SIGRTMIN) + 7
                    faulthandler.register(number, self._stacks, all_threads=True)
                    undo.callback(faulthandler.unregister, number)
            hello: dict[str, Any] = {"rank": trainer.rank, "pid": os.getpid()}
            hello |= {"watchdog": self.floor, "deadline": self.deadline, "stacks": number, "since": time.monotonic()}
            self._line = Line(job, hello, self._hear)
            undo.callback(self._line.close)
            return undo.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:  # a forked child that has come to its end
            return
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            if self._fault is None and self._gate.phase == STABLE:
                self.trainer.finish(self._gate.step)
            if self._fault is not None:
                time.sleep(self.deadline + _FLUSH)  # the state stands: a thread secures it, and ends the process
            self._gate.end(True)
        else:
            self._gate.end(False)
            self._raised(error)
        self._undo.close()

    def connected(self, timeout: float) -> bool:
        """Wait for the agent, which takes about a second to start. Until then only collectives tell of a death."""
        return self._line is not None and self._line.connected(timeout)

    def _raised(self, error: BaseException) -> None:
        rank, generation = self.trainer.rank, self.trainer.generation
        what = f"rank {rank} raised {type(error).__name__}: {error}".partition("\n")[0][:_LINE]
        detail = "".join(traceback.format_exception(error))[-_LONGEST:]
        cause = "loss" if isinstance(error, NonFiniteLossError) else "exception"
        fault = Fault(cause, rank, generation, self._gate.step, what, detail)
        if self._line is not None and self._line.say({"fault": fault.to_json()}):
            self._heard.wait(_WORD)
        first = self._first or fault
        if not self._take_up(first):
            time.sleep(self.deadline + _FLUSH)  # another thread secures the state, and ends the process
        own = first.rank == rank
        timer = self._end_by(first, 1 if own else LEFT)
        if not own:
            traceback.print_exception(error)
        self._act(first)
        timer.cancel()
        if not own:
            _leave(LEFT)

    # -- faults -------------------------------------------------------------------------------------------------

    def _take_up(self, fault: Fault) -> bool:
        """True for the first fault only."""
        with self._lock:
            if self._fault is not None:
                return False
            self._fault = fault
            return True

    def _hear(self, message: dict[str, Any]) -> None:
        if "fault" in message:
            fault = self._first = Fault.from_json(message["fault"])
            self._heard.set()
            said = fault.cause in ("exception", "loss", "notice") and fault.rank == self.trainer.rank
            if not said:  # what we have said ourselves is seen to by who said it
                self._strike(fault, LEFT)
        elif "pause" in message:
            self._gate.learn_nothing()
        elif "debugger" in message and self._line is not None:
            self._line.say({"debugger": debugger_of(self._thread)})
        elif "drill" in message:
            self._gate.order = message["drill"]

    def _told_to_go(self, what: str, number: int) -> None:
        rank = self.trainer.rank
        fault = Fault("notice", rank, self.trainer.generation, self._gate.step, f"rank {rank} {what}")
        if self._line is not None:
            self._line.say({"fault": fault.to_json()})
        self._strike(fault, 128 + number if number else LEFT)

    def _strike(self, fault: Fault, code: int) -> None:
        if self._take_up(fault):
            threading.Thread(target=self._die, args=(fault, code), name="rekindle-gasp", daemon=True).start()

    def _die(self, fault: Fault, code: int) -> None:
        self._end_by(fault, code)
        self._gate.stage(SECURING)  # the agent sees that somebody is at it, whatever the hooks take
        log.error("fault: %s%s", fault.what, self._stand_there(fault) if fault.cause == "hang" else "")
        self._act(fault)
        _leave(code)

    def _end_by(self, fault: Fault, code: int) -> threading.Timer:
        """See to it that the process ends at the deadline, whatever hangs."""
        timer = threading.Timer(max(0.1, fault.noticed + self.deadline - time.monotonic()), os._exit, [code])
        timer.daemon, timer.name = True, "rekindle-deadline"
        timer.start()
        return timer

    def _act(self, fault: Fault) -> None:
        """All that a fault asks of a rank, but to end."""
        self._gate.stage(SECURING)
        tell_launcher(fault, self.trainer.rank)
        self.hooks.call("on_stop", fault)
        trainer = self.trainer
        waits = trainer.shared_by_all, trainer.durable
        who = trainer.rank, trainer.alone
        gasp = Gasp(self._gate, *who, self._mates, trainer.secure, *waits, self.deadline, self.hooks.call)
        gasp.run(fault)
        if fault.cause == "hang":
            self._write_down_collectives()
        self.hooks.call("on_exit", fault)
        gasp.end()

    def _stand_there(self, fault: Fault) -> str:
        """What the agent knows of a hang, and where this rank's threads stand; these also for the agent's report."""
        text = stacks()
        if self._stacks is not None:
            with suppress(OSError):
                self._stacks.write(text)
                self._stacks.flush()
        return f"\n{fault.detail}\nrank {self.trainer.rank} stands here: {main_stack(text)}"

    def _write_down_collectives(self) -> None:
        """For the agent's report."""
        if self._stacks is None or self.trainer.job is None:
            return
        with suppress(Exception):  # what torch has to say of a broken group is its own affair
            self._stacks.write("".join(f"\n\nlast of {line}" for line in last_collectives()) + "\n")
            self._stacks.flush()
            record = recording()
            if record:
                write_atomic(self.trainer.job.paths.flight_record(self.trainer.rank), record)

    def _mates(self, alive: bool) -> list[Status]:
        """Pages of this start's other ranks on this node; of live ones only, or of those that have ended too."""
        job, trainer = self.trainer.job, self.trainer
        found: list[Status] = []
        if job is None:
            return found
        there = job.trainers() if alive else trainer.local_ranks
        for rank in trainer.local_ranks:
            if rank == trainer.rank or rank not in there:
                continue
            with suppress(OSError, FormatError):
                if rank not in self._pages:
                    self._pages[rank] = StatusReader(job.paths.status_page(rank))
                page = self._pages[rank].read()
                if page.generation == trainer.generation:
                    found.append(page)
        return found


def _leave(code: int) -> None:
    flush = threading.Thread(target=_flush, daemon=True)  # the stuck thread may hold a stream's lock
    flush.start()
    flush.join(_FLUSH)
    os._exit(code)


def _flush() -> None:
    for handler in log.handlers + logging.getLogger().handlers:
        with suppress(Exception):
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
