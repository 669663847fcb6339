"""Runs torchrun so that restarts work. Says in few words what failed, and at the end what is saved."""

from __future__ import annotations

import fcntl
import importlib.machinery
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.common.os_errors import explain
from rekindle.errors import NotFoundError, RekindleError, UsageError
from rekindle.faults import nccl
from rekindle.faults.torchelastic import LAUNCH, SURVIVOR_EXIT
from rekindle.format.names import Root
from rekindle.launch.compile_cache import keep_compile_cache
from rekindle.launch.elastic import Signals, deciding
from rekindle.launch.end_notes import note_end
from rekindle.launch.foresee import write_foreseen
from rekindle.launch.provide import PROVIDE, provide
from rekindle.launch.quiet import quiet_cpp, quiet_loggers
from rekindle.launch.rendezvous import entry
from rekindle.launch.rendezvous_settings import fit_settings, forget_defaults
from rekindle.launch.reports import (
    describe_exit,
    describe_fault,
    first_failure,
    first_words,
    forget_refusal,
    newest_steps,
    own_error,
    reached_step,
    reported_roots,
    take_refusal,
    traceback_of,
)
from rekindle.launch.restarts import MAX_RESTARTS, Decision, Failure, Limits, Restarts
from rekindle.launch.saved_files import describe_saved_files, files_saved_since
from rekindle.storage.catalog import MEMORY
from rekindle.storage.listing import ListedCopy, list_copies_within

if TYPE_CHECKING:
    from rekindle.launch.warm import WarmWorkers

__all__ = ["launch"]

_ANSWERS_WITHIN = 10.0
"""Seconds that storage gets to list what is saved."""
_REBUILT_WITHIN = 2.0
"""Seconds that the agent gets to rebuild the snapshots of dead ranks, so that the newest step is known."""

_NOBODY_ENDS_A_HANG = (
    f"{nccl.SETTINGS[0]}=0 is set, so that NCCL ends no rank before ckpt.guard() has secured its state: outside of "
    f"guard() nobody ends a job that hangs in a collective. For a script without guard() set {nccl.SETTINGS[0]}=3, "
    "which is torch's own value"
)


_STATIC_SHARES = (
    "torchrun's static rendezvous has one store for all starts, in which restarted ranks may meet the addresses of "
    "dead ones: give --rdzv-endpoint HOST:PORT in place of --master-addr, --master-port, --node-rank and --rdzv-backend"
)


class _Course:
    """Follows the starts of the job: describes each failure, and says what follows from it."""

    def __init__(self, limits: Limits, *, one_node: bool, place: Path, say: Callable[[str], object]) -> None:
        self._restarts = Restarts(limits)
        self._rank, self._place, self._say = "rank" if one_node else "local rank", place, say
        self.last = Decision(True, "")
        """The decision on the newest failure."""
        self.why = ""
        """The fault that the node's agent noticed last, in brackets, where the exit code says too little."""
        self.begin(False)
        self.role = "this node was a spare, and was not needed"
        """Words of a node without ranks on itself, in the end."""

    def begin(self, restarted: bool) -> None:
        """Notes that ranks start, for the first time or again. What those before have left late counts for nothing."""
        self._restarted, self.role = restarted, "this node was not needed any more"
        self._since, self._begun = time.time(), time.monotonic()
        forget_refusal(self._place)

    def decide(self, mend: Callable[[], object], failures: Mapping[int, Any]) -> Decision:
        """Decides what follows a failure of the ranks. Says so if they are started again.

        Calls ``mend`` first: all ranks of the node have ended, and none has been started again.
        """
        mend()
        rank, first = first_failure(self._place, self._since, failures)
        code = first.exitcode
        self.why = describe_fault(self._place, self._since, code)
        note_end(self._place, self._begun, rank, code)
        self.last = self._restarts.decide(self._describe(first, failures))
        if self.last.restart:
            self._say(
                f"{self._rank} {first.local_rank} {describe_exit(code)}{self.why}: all ranks are {self.last.words}"
            )
        return self.last

    def follow(self) -> None:
        """Says that the ranks are started again for others, and which fault this node has been told of, if any."""
        why = describe_fault(self._place, self._since, SURVIVOR_EXIT)
        self._say(f"all ranks are started again with those of other nodes{why}")

    def report_end(self, failures: Mapping[int, Any], *, redirected: bool) -> None:
        """Says what has ended the job, and what is saved. Raises an error that each further start would meet."""
        if self.last.error is not None:
            raise self.last.error from None
        rank, failure = first_failure(self._place, self._since, failures)
        self._say(first_words(failure.message) or f"rank {rank} {describe_exit(failure.exitcode)}{self.why}")
        if redirected:
            self._say(f"its output is in {Path(failure.error_file).parent}")
        self._say(self.last.words)
        _say_what_is_saved(self._place, self._say)
        if self.last.repeated:
            with suppress(OSError):  # nobody reads it, or a disk is full
                print(traceback_of(failure), end="", file=sys.stderr)

    def _describe(self, first: Any, failures: Mapping[int, Any]) -> Failure:
        return Failure(
            *own_error(first),
            steps=newest_steps(self._place, self._begun),
            reached=reached_step(self._place, self._begun),
            seconds=time.monotonic() - self._begun,
            files=files_saved_since(self._place, self._since),
            refused=take_refusal(self._place, failures),
            restarted=self._restarted,
        )


def launch(arguments: list[str], usage: Callable[[], str], say: Callable[[str], object]) -> int:
    """Runs torchrun with these arguments. Returns the exit code.

    ``usage`` returns the text for ``--help``; ``say`` is given each line for people. An error that came again is shown
    with its traceback on stderr. Raises UsageError when there is nothing to run, SystemExit for other arguments that
    torchrun refuses, and the error that ended a rank if each further start would meet it (``Restarts``).
    """
    _open_standard_streams()
    switched_off = nccl.set_defaults(os.environ)
    os.environ.setdefault("PET_MAX_RESTARTS", str(MAX_RESTARTS))  # torchrun's own default is not to restart at all
    # Imported here, as the other commands need no torch.
    with quiet_cpp():
        from torch.distributed import is_nccl_available  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes  # noqa: PLC0415

    parser = get_args_parser()
    parser.prog, parser.usage = "rekindle run", "rekindle run [OPTIONS] SCRIPT [ARGUMENTS]... ('rekindle run --help')"
    parser.allow_abbrev = False  # else arguments of the script, such as --compile, are refused as ambiguous
    parser.print_help = lambda file=None: print(usage())  # type: ignore[method-assign]
    _add_options(parser)
    forget_defaults(parser)
    args = parser.parse_args(arguments)
    _check(args)
    nodes = parse_min_max_nnodes(args.nnodes)[1]
    fit_settings(args, nodes)
    if args.rdzv_backend != entry.BACKEND:
        # Without this, restarted ranks find the addresses of dead ones in the store of --rdzv-backend c10d.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if args.rdzv_backend == "static":
        say(_STATIC_SHARES)
    # Some programs leave it ignored for those that they start: the kernel then keeps no exit code of a rank, and each
    # would seem to have ended well.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _leave_hangup_ignored(args)
    provide(",".join(args.provide) or os.environ.get(PROVIDE, ""), _first_on_path(args))
    if switched_off and is_nccl_available():  # whether the script has a guard() is not to be seen from here
        say(_NOBODY_ENDS_A_HANG)
    signals = Signals()
    try:
        with _own_directory() as place:
            os.environ[LAUNCH] = place
            try:
                return _train(args, nodes, Path(place), say, signals)
            finally:
                signals.ignore()  # all is told, and Python takes some tenths of a second to end
    except SignalException as error:  # a second one, while the answer to the first was on its way
        return 128 + int(error.sigval)


def _train(args: Any, nodes: int, place: Path, say: Callable[[str], object], signals: Signals) -> int:
    """Starts the ranks until they have ended well, or the job is given up. Returns the exit code."""
    from torch.distributed import DistError  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record  # noqa: PLC0415
    from torch.distributed.elastic.rendezvous import (  # noqa: PLC0415
        RendezvousClosedError,
        RendezvousError,
        RendezvousGracefulExitError,
    )
    from torch.distributed.run import run  # noqa: PLC0415

    def miss() -> bool:
        if args.rdzv_backend == "static":  # its nodes can't meet again
            return False
        say("a node was lost just after all had met: the others meet again")
        return True

    course = _Course(_limits(args), one_node=nodes == 1, place=place, say=say)
    entry.register()
    quiet_loggers()
    try:
        with (
            keep_compile_cache(args.compile_cache, place, say) as mend,
            _warm_workers(args, place, say) as workers,
            deciding(partial(course.decide, mend), workers, say, miss, course.begin, course.follow, signals),
        ):
            # record() writes the first error of all to that file, for schedulers that read it.
            (record(run) if "TORCHELASTIC_ERROR_FILE" in os.environ else run)(args)
    except ChildFailedError as error:
        course.report_end(error.failures, redirected=args.redirects != "0")
        return 1
    except SignalException as error:
        say(f"ended by {error.sigval.name}")
        _say_what_is_saved(place, say)
        signals.ignore()  # also while what the error holds is freed
        return 128 + int(error.sigval)
    except RendezvousGracefulExitError:
        say(f"the job has ended; {course.role}")
        return 0
    except RendezvousClosedError:
        say("ended, because the job has ended on another node")
        _say_what_is_saved(place, say)
        return 1
    except (RendezvousError, DistError) as error:
        say(f"ended: {str(error).partition(chr(10))[0]}")  # a store's error goes on with frames of C++
        _say_what_is_saved(place, say)
        return 1
    return 0


def _open_standard_streams() -> None:
    """Opens the null device in place of each standard stream that is closed.

    The next file to be opened would get its number, and would be a rank's standard input, say.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free


def _leave_hangup_ignored(args: Any) -> None:
    """Takes SIGHUP from torchrun where it is ignored, as nohup does: the job would end with its terminal."""
    handled = getattr(args, "signals_to_handle", "")  # an option that older versions of torch don't have
    if handled and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        args.signals_to_handle = ",".join(name for name in handled.split(",") if name.strip() != "SIGHUP")


@contextmanager
def _own_directory() -> Iterator[str]:
    """Gives a temporary directory for what the ranks tell. It is locked, so that it stays in a job of weeks.

    systemd-tmpfiles removes from /tmp what is ten days old, unless somebody has locked the directory that it is in.
    """
    with tempfile.TemporaryDirectory(prefix="rekindle-launch-") as place:
        lock = os.open(place, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield place
        finally:
            os.close(lock)


def _add_options(parser: ArgumentParser) -> None:
    """Adds what torchrun has no option for. As with torchrun's own, PET_NAME in the environment sets a default."""
    from torch.distributed.argparse_util import check_env, env  # noqa: PLC0415

    parser.add_argument("--same-error-limit", "--same_error_limit", action=env, type=_count, default=Limits.same)
    parser.add_argument("--restart-pause", "--restart_pause", action=env, type=_seconds, default=Limits.pause)
    ways = ("progress", "job")
    parser.add_argument("--count-restarts", "--count_restarts", action=env, choices=ways, default=ways[0])
    parser.add_argument("--retry-refused", "--retry_refused", action=check_env)
    parser.add_argument("--compile-cache", "--compile_cache", action=env, metavar="ROOT")
    parser.add_argument("--no-warm", "--no_warm", action=check_env)
    parser.add_argument("--provide", action="append", default=[])


def _limits(args: Any) -> Limits:
    return Limits(
        restarts=args.max_restarts,
        since_progress=args.count_restarts == "progress",
        same=args.same_error_limit,
        pause=args.restart_pause,
        retry_refused=args.retry_refused,
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is no number of starts")
    return int(text)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) < math.inf:
            return seconds
    raise ArgumentTypeError(f"{text!r} is no number of seconds")


def _warm_workers(args: Any, place: Path, say: Callable[[str], object]) -> AbstractContextManager[WarmWorkers | None]:
    """Returns the context in which restarted workers come from a warm process, where the ranks are Python's."""
    if args.no_warm or args.no_python or args.run_path or sys.platform != "linux":
        return nullcontext()
    from rekindle.launch.warm import WarmWorkers, warm_workers  # noqa: PLC0415  # not on every platform

    def foresee(record: Path) -> bool:
        script = Path(args.training_script).resolve()
        return write_foreseen(script, [str(script.parent), *sys.path], record)

    return warm_workers(WarmWorkers(place, _script_dir(args), say, None if args.module else foresee))


def _script_dir(args: Any) -> Path:
    """Returns the folder of the script, or that of the module's top package: what is in it is the user's own code."""
    if not args.module:
        return Path(args.training_script).resolve().parent
    found = importlib.machinery.PathFinder.find_spec(args.training_script.partition(".")[0], [os.getcwd(), *sys.path])
    return Path(found.origin).resolve().parent if found and found.origin else Path.cwd()


def _first_on_path(args: Any) -> str | None:
    """Returns the folder in which Python looks for a rank's modules first of all; None for another program."""
    if args.no_python:
        return None
    return os.getcwd() if args.module else os.path.dirname(os.path.realpath(args.training_script))


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


def _say_what_is_saved(place: Path, say: Callable[[str], object]) -> None:
    found = reported_roots(place)
    for root, base in found:
        say(f"{root}: {_saved(root, base)}")
    files = describe_saved_files(place)
    if files is not None:
        say(files)
    elif not found:
        say("this run has saved nothing: no rank on this node has made a rekindle.Checkpointer or saved a file")


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
    copies = [copy for copy in complete if copy.step == newest]
    places = {copy.place for copy in copies}
    stored = max((copy.step for copy in complete if copy.place != MEMORY), default=None)
    where = "on storage" if places - {MEMORY} else f"in this node's memory, {_further(stored)}"
    others = (
        "" if any(len(copy.ranks) == copy.world for copy in copies) else ", if the other nodes have their parts of it"
    )
    return f"step {newest} is the newest saved, {where}; the next start goes on from there{others}"


def _further(stored: int | None) -> str:
    return "and nothing is on storage yet" if stored is None else f"and step {stored} on storage"
