"""Runs torchrun so that restarts work. Says in few words what failed, and at the end what is saved."""

from __future__ import annotations

import importlib.machinery
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rekindle.common.os_errors import explain
from rekindle.errors import BusyError, NotFoundError, RekindleError, UsageError
from rekindle.faults import nccl
from rekindle.faults.torchelastic import LAUNCH, REFUSED, SURVIVOR_EXIT
from rekindle.format.fields import loads
from rekindle.format.names import Root, canonical_root
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.storage.catalog import MEMORY
from rekindle.storage.listing import ListedCopy, list_copies_within

__all__ = ["MAX_RESTARTS", "launch"]

MAX_RESTARTS = 20
"""Default number of restarts in the life of a job. torchrun counts failures and never forgets them. An error that comes
again at each start should not be repeated for an hour."""

_ANSWERS_WITHIN = 10.0
"""Seconds that storage gets to list what is saved."""
_REBUILT_WITHIN = 2.0
"""Seconds that the agent gets to rebuild the snapshots of dead ranks, so that the newest step is known."""

_NOBODY_ENDS_A_HANG = (
    f"{nccl.SETTINGS[0]}=0 is set, so that NCCL ends no rank before ckpt.guard() has secured its state: outside of "
    f"guard() nobody ends a job that hangs in a collective. For a script without guard() set {nccl.SETTINGS[0]}=3, "
    "which is torch's own value"
)
_QUIET = ("Sending process %s closing", "Received %s death signal", "Got termination signal", "\n*****")
"""Beginnings of torchrun's messages at each failure and start, in place of which Rekindle writes its own."""
_FAILED = "failed (exitcode: %s) local_rank: %s"
_LOGGERS = ("run", "elastic.agent.server.api", "elastic.multiprocessing.api")


class _FailureFilter(logging.Filter):
    """Replaces torchrun's messages about a failure, which come from three modules, by one line for each restart."""

    def __init__(self, most: int, *, one_node: bool, place: Path, say: Callable[[str], object]) -> None:
        super().__init__()
        self.failures = 0
        self.why = ""
        """The fault that the node's agent noticed last, in brackets, where the exit code says too little."""
        self._most, self._rank, self._place, self._say = most, "rank" if one_node else "local rank", place, say
        self._since = time.time()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns False for a message that is replaced."""
        message = str(record.msg)
        if message.startswith(_FAILED) and isinstance(record.args, tuple):
            self.failures += 1
            code, rank = record.args[:2]
            self._refuse_in_vain()
            self.why = _noticed(self._place, self._since) if code in (-signal.SIGKILL, SURVIVOR_EXIT) else ""
            self._since = time.time()
            if self.failures <= self._most:
                self._say(
                    f"{self._rank} {rank} {_ended(code)}{self.why}: all ranks are started again, "
                    f"restart {self.failures} of {self._most}"
                )
            return False
        return not message.startswith(_QUIET)

    def _refuse_in_vain(self) -> None:
        """Raises BusyError, through torchrun, when another job trains the root that the first start wanted.

        At a later start it may be a dying rank of this job, so then another try may do.
        """
        with suppress(FileNotFoundError):
            why = (self._place / REFUSED).read_text()
            if self.failures == 1:
                raise BusyError(f"{why}: the job is not started again")


def _ended(code: Any) -> str:
    """Describes the end of a process by its exit code, as subprocess gives it."""
    if code == -signal.SIGTERM:
        return "failed"  # torchrun told it to end while it was about to
    if not isinstance(code, int) or code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def launch(arguments: list[str], usage: Callable[[], str], say: Callable[[str], object]) -> int:
    """Runs torchrun with these arguments. Returns the exit code.

    ``usage`` returns the text for ``--help``; ``say`` is given each line for people. Raises UsageError when there is
    nothing to run, BusyError when another job trains the root, SystemExit for other arguments that torchrun refuses.
    """
    # Without this, restarted ranks find the addresses of dead ones in torchrun's store.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    switched_off = nccl.set_defaults(os.environ)
    os.environ.setdefault("PET_MAX_RESTARTS", str(MAX_RESTARTS))  # torchrun's own default is not to restart at all
    # Imported here, as the other commands need no torch.
    from torch.distributed import is_nccl_available  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record  # noqa: PLC0415
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes, run  # noqa: PLC0415

    parser = get_args_parser()
    parser.prog, parser.usage = "rekindle run", "rekindle run [OPTIONS] SCRIPT [ARGUMENTS]... ('rekindle run --help')"
    parser.print_help = lambda file=None: print(usage())  # type: ignore[method-assign]
    args = parser.parse_args(arguments)
    _check(args)
    if switched_off and is_nccl_available():  # whether the script has a guard() is not to be seen from here
        say(_NOBODY_ENDS_A_HANG)
    with tempfile.TemporaryDirectory(prefix="rekindle-launch-") as place:
        os.environ[LAUNCH] = place
        one_node = parse_min_max_nnodes(args.nnodes)[1] == 1
        failures = _FailureFilter(args.max_restarts, one_node=one_node, place=Path(place), say=say)
        if "LOGLEVEL" not in os.environ:  # torchrun's own setting: a user who sets it wants to read its log
            for name in _LOGGERS:
                logging.getLogger(f"torch.distributed.{name}").addFilter(failures)
        try:
            # record() writes the first error of all to that file, for schedulers that read it.
            (record(run) if "TORCHELASTIC_ERROR_FILE" in os.environ else run)(args)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            say(_first_words(failure.message) or f"rank {rank} {_ended(failure.exitcode)}{failures.why}")
            if args.redirects != "0":
                say(f"its output is in {Path(failure.error_file).parent}")
            say(_describe_attempts(failures.failures, args.max_restarts))
            _say_what_is_saved(Path(place), say)
            return 1
        except SignalException as error:
            say(f"ended by {error.sigval.name}")
            _say_what_is_saved(Path(place), say)
            return 128 + int(error.sigval)
    return 0


def _check(args: Any) -> None:
    """Raises UsageError when the script, module or program to run isn't there: no start would find it."""
    script: str = args.training_script
    if args.no_python and not args.module:
        if shutil.which(script) is None:
            raise UsageError(f"{script}: there is no such program")
        return
    if args.module:
        top = script.partition(".")[0]
        if top not in sys.builtin_module_names and not importlib.machinery.PathFinder.find_spec(
            top, [os.getcwd(), *sys.path]
        ):
            raise UsageError(f"there is no module {top!r}: nothing was started")
        return
    path = os.path.join(script, "__main__.py") if os.path.isdir(script) else script
    try:
        open(path, "rb").close()
    except OSError as error:
        raise UsageError(f"{script}: {error.strerror}: nothing was started") from error


def _first_words(message: Any) -> str:
    """Returns the first line of a rank's message about its failure; empty when it left none."""
    return str(message.get("message", "")).partition("\n")[0] if isinstance(message, dict) else ""


def _describe_attempts(failures: int, most: int) -> str:
    if most == 0:
        return "the job is not started again: --max-restarts is 0"
    return f"the job was started {failures} times and failed each time: --max-restarts {most} allows no more"


def _roots(place: Path) -> list[tuple[Root, Path]]:
    """Returns each root that the ranks of this node have reported, and the base of its job's memory."""
    found = sorted(json.loads(path.read_text()) for path in place.glob("*.json"))
    return [(canonical_root(root), memory_base(memory)) for root, memory in found]


def _noticed(place: Path, since: float) -> str:
    """Describes, in brackets, the hang or want of memory that ended a rank; empty for no such fault."""
    faults = []
    for root, base in _roots(place):
        with suppress(OSError, ValueError, KeyError, TypeError):
            faults.append(Fault.from_json(loads(JobDir.of(root, base).paths.fault.read_bytes())))
    told = [fault for fault in faults if fault.at >= since and fault.cause in ("hang", "oom")]
    newest = max(told, key=lambda fault: fault.at, default=None)
    return f" ({newest.what})" if newest is not None else ""


def _say_what_is_saved(place: Path, say: Callable[[str], object]) -> None:
    found = _roots(place)
    for root, base in found:
        say(f"{root}: {_saved(root, base)}")
    if not found:
        say("this run has saved nothing: no rank on this node came as far as making a rekindle.Checkpointer")


def _saved(root: Root, base: Path) -> str:
    until = time.monotonic() + _REBUILT_WITHIN
    while True:
        try:
            listed, trouble = list_copies_within(root, base, _ANSWERS_WITHIN)
        except NotFoundError:
            return "nothing is saved, so the next start begins anew"
        except (OSError, RekindleError) as error:
            return f"can't tell what is saved: {explain(error) if isinstance(error, OSError) else error}"
        if listed[0].condition != "incomplete" or time.monotonic() > until:
            break
        time.sleep(0.1)
    if isinstance(trouble, RekindleError):
        return str(trouble)  # memory has steps that the next start doesn't go on from
    if trouble is not None:
        return f"{_newest(listed)}; what is on storage is not known: {explain(trouble)}"
    return _newest(listed)


def _newest(listed: list[ListedCopy]) -> str:
    complete = [entry.copy for entry in listed if entry.condition == "complete"]
    if not complete:
        return "nothing is saved completely: 'rekindle ls ROOT' lists what there is"
    newest = max(copy.step for copy in complete)
    places = {copy.place for copy in complete if copy.step == newest}
    stored = max((copy.step for copy in complete if copy.place != MEMORY), default=None)
    where = "on storage" if places - {MEMORY} else f"in this node's memory, {_further(stored)}"
    return f"step {newest} is the newest saved, {where}; the next start goes on from there"


def _further(stored: int | None) -> str:
    return "and nothing is on storage yet" if stored is None else f"and step {stored} on storage"
