"""Implements ``ckpt.guard()``: watches over guarded training from its first step to its end, by a fault or well."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import ContextDecorator, ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from rekindle.agent.report import main_stack
from rekindle.common.os_errors import describe_error
from rekindle.devices.rescue import RescueStreams
from rekindle.devices.table import current_devices, enter, used
from rekindle.errors import NonFiniteLossError, RekindleError
from rekindle.faults import nccl
from rekindle.faults.agent_link import AgentLink
from rekindle.faults.built_in import stop_hook
from rekindle.faults.deadline import FLUSH, Deadline
from rekindle.faults.gasp import Gasp
from rekindle.faults.hooks import HookCalls, Hooks
from rekindle.faults.inject import inject_fault
from rekindle.faults.late_work import describe_raised, late_work_counts
from rekindle.faults.notices import Notice, Notices, check_notices
from rekindle.faults.peers import Peers
from rekindle.faults.securing import StateSecurer
from rekindle.faults.spares import SpareDescriptors
from rekindle.faults.stacks import HangRecord, debugger_of, describe_stacks
from rekindle.faults.torchelastic import SURVIVOR_EXIT, tell_launcher
from rekindle.memory.fault import Fault
from rekindle.memory.status import SECURING, STABLE, StatusPage
from rekindle.save.gate import Gate
from rekindle.save.saver import Saver
from rekindle.session.group import ProcessGroup, SingleProcess
from rekindle.session.session import Session
from rekindle.settings import check_bool, check_seconds

__all__ = ["Guard"]

log = logging.getLogger("rekindle")

_WORD = 0.2
"""Seconds that a rank which raised waits for the agent's word on whether somebody else was first."""
_LONGEST_DEADLINE = 86400.0
"""Most seconds of a deadline: a wait for ever can't be had of a thread, and would keep the job from starting again."""


class Guard(ContextDecorator):
    """Context manager and decorator. One at a time for a Checkpointer, in the thread that trains."""

    def __init__(
        self,
        saver: Saver,
        session: Session,
        group: SingleProcess | ProcessGroup,
        *,
        fence: bool,
        floor: float | None,
        deadline: float,
        notices: Sequence[Notice],
        hooks: Hooks,
    ) -> None:
        """``floor``: seconds without progress that are no hang; None for no watchdog. ``deadline``: gasp_deadline.

        Raises UsageError for an option that makes no sense: at a fault it would be too late to notice.
        """
        fence = check_bool("fence", fence)
        check_seconds("gasp_deadline", deadline, most=_LONGEST_DEADLINE)
        check_notices(notices)
        self._saver, self._session, self._group, self._job = saver, session, group, session.job
        self._rank, self._generation = group.rank, session.agreed.incarnation.generation
        self._securer = StateSecurer(saver, session)
        self._fence, self._floor, self._deadline = fence, floor, deadline
        self._wanted, self._hooks = notices, hooks
        self._fault: Fault | None = None
        """The fault that ends this rank, once there is one."""
        self._first: Fault | None = None
        """The fault that the agent noticed first."""
        self._lock = threading.Lock()
        self._heard = threading.Event()
        self.ends_at = math.inf
        """Time at which the process ends, come what may, by the monotonic clock, once there is a fault."""

    # -- entering and leaving -----------------------------------------------------------------------------------

    def __enter__(self) -> Guard:
        self._fault, self._first, self.ends_at = None, None, math.inf
        self._heard.clear()
        nccl.warn_of_settings(self._rank)
        self._hang_record: HangRecord | None = None
        self._link: AgentLink | None = None
        self._pid, self._thread = os.getpid(), threading.get_ident()
        local = self._session.local_ranks
        afar = len(local) < self._group.world
        self._peers = Peers(self._job, self._rank, local, self._generation, afar=afar)
        with ExitStack() as undo:
            self._timer = Deadline()
            undo.callback(self._timer.close)
            self._spares = SpareDescriptors()
            undo.callback(self._spares.give_up)
            page = self._make_page()
            before_update = self._stand_before_update if self._fence else self._note_before_update
            self._gate = Gate(
                *(page or StatusPage(None, self._generation), self._saver.reached, inject_fault, before_update),
                clock=self._saver.live.clock,
            )
            self._rescue = self._rehearse_rescue()
            undo.callback(self._rescue.close)
            self._devices = self._rescue.devices + current_devices()
            if page is not None and self._job is not None:
                self._hang_record = HangRecord(self._job, self._rank)
                undo.callback(self._hang_record.close)
                self._link = AgentLink(self._job, self._introduce(self._hang_record), self._hear)
                undo.callback(self._link.close)
            self._notices = Notices(self._wanted, self._told_to_go)
            undo.callback(self._notices.close)
            self._saver.begin_guard(self._gate)
            undo.callback(self._saver.end_guard)
            self._keep_local_state()
            self._undo = undo.pop_all()
        return self

    def _make_page(self) -> StatusPage | None:
        why = "there is no memory store"
        if self._job is not None:
            try:
                return StatusPage(self._job.paths.status_page(self._rank), self._generation)
            except OSError as error:
                why = f"memory store {self._job.path}: {describe_error(error)}"
        log.warning("%s, so no agent watches this rank: it notices its own exceptions and signals, nothing else", why)
        return None

    def _introduce(self, record: HangRecord) -> dict[str, Any]:
        """Returns the words with which this rank connects to its agent."""
        who = {"rank": self._rank, "pid": os.getpid(), "since": time.monotonic(), "joined": self._session.joined}
        return {**who, "watchdog": self._floor, "deadline": self._deadline, "stacks": record.signal}

    def _keep_local_state(self) -> None:
        """Put down the state that only this rank has, and warn of parameters that no other rank has."""
        live = self._saver.live
        live.note(self._session.shard_id(self._gate.step, persist=False))
        if live.alone and self._group.world > 1:
            log.warning(
                "rank %d: %d tensors, such as %s, have no replica that is known: if this rank dies, its newest "
                "snapshot is all that is left of them. DistributedDataParallel and rekindle.replica_groups are known",
                *(self._rank, len(live.alone), live.alone[0]),
            )

    def _rehearse_rescue(self) -> RescueStreams:
        """Make what it takes to read devices after a fault, and try it once."""
        try:
            tensors = self._saver.live.device_tensors()
        except RekindleError:  # which has been reported: nothing of it can be secured
            tensors = []
        rescue = RescueStreams(used(tensors))
        rescue.rehearse(tensors)
        return rescue

    def _stand_before_update(self, step: int) -> None:
        """Let no rank begin an update before all are about to, and have put down what they were like."""
        self._saver.live.note_update(self._session.shard_id(step, persist=False))
        self._group.barrier()

    def _note_before_update(self, step: int) -> None:
        """Put down what this rank is like before the update that makes ``step``, if the step before has no snapshot.

        Other ranks complete their update though this one dies in the middle of its own: only ``step`` is left then.
        Devices complete what is queued, as their host's death comes too late for that.
        """
        newest = self._saver.newest
        saved = newest is not None and newest.step >= step - 1
        if self._group.world > 1 and not saved and not self._gate.on_devices:
            self._saver.live.note_update(self._session.shard_id(step, persist=False))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:  # a forked child that has come to its end
            return
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            if self._fault is None and self._gate.phase == STABLE:
                self._securer.secure_last(self._gate.step)
            if self._fault is not None:
                self._wait_for_the_end()
            self._gate.end(well=True)
        else:
            self._gate.end(well=False)
            self._raised(error)
        self._undo.close()

    def _wait_for_the_end(self) -> None:
        """Leave the state as it is: another thread secures it, and ends the process."""
        time.sleep(self._deadline + FLUSH)

    def connected(self, timeout: float) -> bool:
        """Wait for the agent, which takes about a second to start. It tells of deaths before that once it is there."""
        return self._link is not None and self._link.connected(timeout)

    # -- noticing -----------------------------------------------------------------------------------------------

    def _raised(self, error: BaseException) -> None:
        """End by what the guarded part raised, or by another rank's fault if the agent says that was first."""
        self._spares.give_up()
        what, detail = describe_raised(error, self._rank)
        cause = "loss" if isinstance(error, NonFiniteLossError) else "exception"
        fault = Fault(cause, self._rank, self._generation, self._gate.step, what, detail)
        self._gate.freeze(late=late_work_counts(fault))
        if self._link is not None and self._link.say({"fault": fault.to_json()}):
            self._heard.wait(_WORD)
        first = self._first or fault
        if not self._take_up(first):
            self._wait_for_the_end()
        own = first.rank == self._rank
        self._timer.set(self.ends_at, 1 if own else SURVIVOR_EXIT)
        if not own:
            traceback.print_exception(error)
        self._act(first)
        if not own:
            self._timer.end_now(SURVIVOR_EXIT)

    def _hear(self, message: dict[str, Any]) -> None:
        """Act on a message of the agent, in the link's thread."""
        if "fault" in message:
            fault = Fault.from_json(message["fault"])
            if fault.generation < self._generation:
                return  # an agent that was stopped has just learned of it
            self._first = fault
            self._heard.set()
            said = fault.cause in ("exception", "loss", "notice") and fault.rank == self._rank
            if not said:  # what this rank has said itself is seen to by the thread that said it
                self._die_in_background(fault, SURVIVOR_EXIT)
        elif "pause" in message:
            self._gate.learn_nothing()
        elif "debugger" in message and self._link is not None:
            self._link.say({"debugger": debugger_of(self._thread)})
        elif "afar" in message:
            self._peers.hear(message["afar"])
        elif "drill" in message:
            self._gate.order = message["drill"]

    def _told_to_go(self, what: str, number: int) -> None:
        """Act on a notice: ``what`` happened, by the signal ``number`` if that is not 0."""
        fault = Fault("notice", self._rank, self._generation, self._gate.step, f"rank {self._rank} {what}")
        if self._link is not None:
            self._link.say({"fault": fault.to_json()})
        self._die_in_background(fault, 128 + number if number else SURVIVOR_EXIT)

    def _take_up(self, fault: Fault) -> bool:
        """Returns True for the first fault only, which is acted on.

        The time to do so counts from now: another node's fault may be old when this one is told of it.
        """
        with self._lock:
            if self._fault is not None:
                return False
            self._fault, self.ends_at = fault, time.monotonic() + self._deadline
            return True

    # -- ending -------------------------------------------------------------------------------------------------

    def _die_in_background(self, fault: Fault, code: int) -> None:
        """Secure the state and end the process, in a thread of its own: the thread that trains may be stuck."""
        if self._take_up(fault):
            try:
                threading.Thread(target=self._die, args=(fault, code), name="rekindle-gasp", daemon=True).start()
            except RuntimeError:  # no thread is to be had: the one that heard of the fault has no other work left
                self._die(fault, code)

    def _die(self, fault: Fault, code: int) -> None:
        self._spares.give_up()
        self._gate.freeze(late=late_work_counts(fault))
        self._timer.set(self.ends_at, code)
        self._gate.stage(SECURING)  # the agent sees that somebody is at it, whatever the hooks take
        log.error("fault: %s%s", fault.what, self._describe_hang(fault) if fault.cause == "hang" else "")
        self._act(fault)
        self._timer.end_now(code)

    def _act(self, fault: Fault) -> None:
        """Do all that a fault asks of a rank, except ending."""
        self._gate.freeze(late=late_work_counts(fault))
        self._gate.stage(SECURING)
        tell_launcher(fault, self._rank)
        stop = self._hooks.on_stop or stop_hook(self._rescue.devices)
        hooks = HookCalls(replace(self._hooks, on_stop=stop), fault, self.ends_at, self._devices)
        self._free_what_is_stuck(hooks)
        alone = self._group.world == 1
        gasp = Gasp(self._gate, self._securer, self._peers, self._rank, alone, self.ends_at, hooks)
        gasp.run(fault)
        hooks.exit()
        if fault.cause == "hang" and self._hang_record is not None:
            self._hang_record.write_collectives()  # after the hook: torch may take long to tell of all that it has
        gasp.end()

    def _free_what_is_stuck(self, hooks: HookCalls) -> None:
        """Call ``on_stop``, unless the state is on devices that can be read beside what is stuck on them.

        To stop what they do takes time, may hang itself, and lets them do what was queued behind it.
        """
        with suppress(RuntimeError):  # a device that has failed
            enter(self._devices)
        self._saver.live.read_by(self._rescue)
        if not self._rescue.devices:
            hooks.stop()
        elif not self._rescue.probe():
            self._gate.distrust()
            log.warning(
                "rank %d: %s can't be read beside what it does, which is stopped if there is a way to",
                *(self._rank, " and ".join(map(str, self._rescue.silent))),
            )
            hooks.stop()

    def _describe_hang(self, fault: Fault) -> str:
        """Returns what the agent knows of a hang, and where the main thread is; writes all stacks for its report."""
        text = describe_stacks()
        if self._hang_record is not None:
            self._hang_record.write_stacks(text)
        return f"\n{fault.detail}\nrank {self._rank} stands here: {main_stack(text)}"
