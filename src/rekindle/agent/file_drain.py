"""Drains files: carries them from this node's memory to their paths."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rekindle.common.failpoints import reach
from rekindle.common.os_errors import describe_error
from rekindle.errors import CorruptError, FormatError, RekindleError
from rekindle.format.file_receipt import FileReceipt
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.kept import KeptFile, OpenFile, key_of
from rekindle.storage import disk
from rekindle.storage.carry import carry
from rekindle.storage.open import open_place
from rekindle.storage.path_place import PathPlace, PlaceholderGone
from rekindle.storage.renaming import come_here, note_placing, renamed_to, was_taken
from rekindle.storage.throttle import Budget

__all__ = ["FileDrainProgress", "FileDrainer"]

log = logging.getLogger("rekindle.agent")

_RETRY_FIRST, _RETRY_LONGEST = 0.5, 30.0
"""Seconds between attempts at one path while storage refuses, doubled each time."""
_ROUND = 0.5
"""Seconds after which a round begins no more files: an agent that is told to end does so between rounds."""
_SWEEP_EVERY = 5.0
"""Seconds between two looks for what killed processes left."""
_SETTLED = 0.1
"""Seconds after a change of a directory until its time shows every later one: the kernel's clock of files is coarse."""


@dataclass
class FileDrainProgress:
    """State of the drain, for people to look at. Written by the drain, read by any thread."""

    path: str | None = None
    """Path or URL of the file on its way."""
    done: int = 0
    """Bytes of it that storage has taken."""
    total: int = 0
    """Bytes of it in all."""
    waiting: int = 0
    """Files that storage lacks."""
    drained: int = 0
    """Files carried to storage."""
    moved: float | None = None
    """Time at which storage last answered, by this node's clock; None while it is asked nothing."""
    failed: dict[str, str] = field(default_factory=dict)
    """Reason why the last attempt failed, by path, of those that wait for their next one or are damaged."""
    error: str | None = None
    """One of these, with its path."""
    waits: None = None
    anew: None = None
    deleted: None = None


@dataclass
class _Failure:
    """The failed attempts at one file."""

    target: str
    why: str
    pause: float
    due: float
    """Time of the next attempt; infinite for a damaged file."""
    waits: bool = False
    """True if nothing failed, and another node's file has to come first."""


class FileDrainer:
    """Carries a user's files from this node's memory to their paths. All it needs to know is in files.

    ``tick`` is to be called again and again, by one thread in one process per node.
    """

    def __init__(self, store: FilesDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self.progress = FileDrainProgress()
        self._failures: dict[KeptFile, _Failure] = {}
        self._budget = Budget()
        self._swept = -_SWEEP_EVERY
        self._empty_at = -1
        """``Kept.changed`` at a look that found nothing to do."""

    def hurry(self, *, on: bool = True) -> None:
        """Lifts the limit on bytes per second, for the file in hand too. With False the limit counts again."""
        self._budget.lift(on=on)

    def tick(self) -> bool:
        """Carries files that storage lacks and whose time has come, the oldest first. True when one became durable.

        Begins no file after half a second.
        """
        self.progress.moved = time.monotonic()
        try:
            self._sweep()
            changed = self._store.kept.changed()
            if changed == self._empty_at:
                return False
            pending = self._pending()
            if not pending and time.time_ns() - changed > _SETTLED * 1e9:
                self._empty_at = changed
            return self._carry_all(pending)
        except (OSError, RekindleError) as error:  # of memory itself
            self.progress.error = describe_error(error)
            return False
        finally:
            self.progress.path = self.progress.moved = None

    def _carry_all(self, pending: list[KeptFile]) -> bool:
        until, any_durable = time.monotonic() + _ROUND, False
        for file in pending:
            failure = self._failures.get(file)
            if time.monotonic() < until and (failure is None or failure.due <= self._clock()):
                any_durable |= self._carry(file)
        return any_durable

    def pending(self) -> int | None:
        """Returns the number of files that storage lacks; None if there are none."""
        return len(self._pending()) or None

    def _pending(self) -> list[KeptFile]:
        pending = self._store.kept.newest(stored=False)
        known = set(pending)
        self._failures = {file: failure for file, failure in self._failures.items() if file in known}
        self.progress.waiting = len(pending)
        self._report()
        return pending

    def _report(self) -> None:
        failed = {failure.target: failure.why for failure in self._failures.values()}
        self.progress.failed = failed
        self.progress.error = next((f"{target}: {why}" for target, why in failed.items()), None)

    def _sweep(self) -> None:
        if self._clock() - self._swept >= _SWEEP_EVERY:
            self._swept = self._clock()
            self._store.sweep()

    def _carry(self, file: KeptFile) -> bool:
        """Carries one file. True when it is durable; failures are put off, each path's by itself."""
        turn = self._store.writing(file.key)
        if not turn.acquire():  # a process for which memory was full writes something newer there
            return False
        try:
            with self._store.kept.pin(file) as opened:
                return self._upload(file, opened)
        except FileNotFoundError:  # superseded since it was listed
            return False
        except CorruptError as error:
            self._failed(file, file.name(), f"stays as it was on storage: {error}", for_good=True)
            return False
        finally:
            turn.release()

    def _upload(self, file: KeptFile, opened: OpenFile) -> bool:
        receipt = opened.receipt
        self.progress.path, self.progress.done, self.progress.total = receipt.target, 0, receipt.nbytes
        self._read_limit()
        try:
            if self._waits(file, receipt):
                return False
            reach("upload.started", file.number)
            place = open_place(receipt.target, self._store.id())
            if receipt.trace is not None:
                place.check_mounted(receipt.trace)
            if receipt.mode is not None:
                place.mode = receipt.mode
            if isinstance(place, PathPlace) and not self._goes_there(file, receipt, place):
                return False
            if receipt.terms.removes is not None:
                _remove(Path(receipt.target).with_name(receipt.terms.removes))
            identity = carry(opened, place, self._count, self._budget)
            reach("upload.placed", file.number)
            with self._store.arranging():
                if file.receipt.exists() and opened.is_current():
                    file.note_stored(identity)
        except PlaceholderGone:  # the next round looks where it is
            return False
        except CorruptError as error:
            self._failed(file, receipt.target, f"stays as it was on storage: {error}", for_good=True)
            return False
        except Exception as error:  # others are not to wait for this one, whatever it is
            known = isinstance(error, (OSError, RekindleError))
            why = describe_error(error) if known else f"{type(error).__name__}: {error}"
            self._failed(file, receipt.target, why, for_good=False)
            return False
        reach("upload.noted", file.number)
        self.progress.drained += 1
        self._failures.pop(file, None)
        self._report()
        return True

    def _goes_there(self, file: KeptFile, receipt: FileReceipt, place: PathPlace) -> bool:
        """True if the file is to go to its path now.

        One whose placeholder was renamed belongs where that is from now on. One whose placeholder was removed is given
        up, and so is one whose placeholder another program's file has replaced; but not one whose placeholder a file of
        this node has, as that of the save before. Where another file's placeholder was renamed to this path, the newer
        of both counts.
        """
        kept, mark = self._store.kept, receipt.mark
        aside = file.key != key_of(receipt.target)
        for _ in range(2):  # one that is renamed again during the first look is found by the second
            stands = place.standing()
            stays = bool(mark) and stands == mark
            place.mark = mark if stays else ""
            renamed = renamed_to(place, mark) if mark and not stays else None
            if aside and renamed is None:
                alone = kept.find(key_of(receipt.target)) is None
                renamed = place.path if stays or (alone and not place.path.parent.is_dir()) else None
            if renamed is not None:
                self._store.retarget(file, str(renamed))
                return False
            taken = was_taken(kept, place, mark)
            gone = place.lacks(mark) if mark else receipt.placeholder and place.was_removed()
            if not aside and (taken or not gone):
                break
        else:
            if gone and stands is None and not (aside or place.was_removed()):
                log.warning("%s: memory gives its file up: another one has taken its place there", receipt.target)
            elif not taken:
                why = "its placeholder was removed, replaced, or renamed further than it is looked for"
                log.info("%s: memory gives its file up: %s", receipt.target, why)
            self._store.give_up([file])  # such as a program's oldest checkpoint, which would come back
            return False
        place.placing, place.stood = partial(note_placing, kept, place), stands or ""
        other = come_here(kept, place) if stands else None
        if other is not None:
            self._store.retarget(other, receipt.target)
        return other is None

    def _waits(self, file: KeptFile, receipt: FileReceipt) -> bool:
        """True if storage has yet to get a file that comes before this one.

        One of this node is looked for at each round, one of another node ever less often.
        """
        newest = {other.key: other for other in self._store.kept.newest()} if receipt.terms.after else {}
        for target in receipt.terms.after:
            ours = newest.get(key_of(target))
            if ours is not None and not ours.is_stored():
                return True
            if ours is None and not open_place(target).has_arrived():
                why = f"waits for {target}, which no process of this node has saved, and storage does not have"
                self._failed(file, receipt.target, why, for_good=False, waits=True)
                return True
        return False

    def give_up_waiting(self) -> None:
        """Gives up files that wait for others to come first, once nothing else is left to do. Nobody saves those now.

        To be called when no process saves, and memory is to be given back.
        """
        pending = self._pending()
        if not all(self._is_waiting(file) for file in pending):
            return
        for file in pending:
            if not self._carry(file) and self._is_waiting(file):  # its next attempt might have been due much later
                log.warning("%s: does not come to be: %s", self._failures[file].target, self._failures[file].why)
                self._store.give_up([file])

    def _is_waiting(self, file: KeptFile) -> bool:
        return file in self._failures and self._failures[file].waits

    def _failed(self, file: KeptFile, target: str, why: str, *, for_good: bool, waits: bool = False) -> None:
        before = self._failures.get(file)
        pause = _RETRY_FIRST if before is None else min(2 * before.pause, _RETRY_LONGEST)
        due = float("inf") if for_good else self._clock() + pause
        if before is None or before.why != why:
            log.log(logging.INFO if waits else logging.WARNING, "%s: memory keeps it: %s", target, why)
        self._failures[file] = _Failure(target, why, pause, due, waits)
        self._report()

    def _count(self, nbytes: int) -> None:
        self.progress.done += nbytes
        self.progress.moved = time.monotonic()

    def _read_limit(self) -> None:
        with suppress(OSError, FormatError):  # the limit stays as it was
            info = self._store.read_job()
            self._budget.limit = info.drain_limit if info is not None else None


def _remove(path: Path) -> None:
    """Removes a file from storage, if it is there."""
    with suppress(FileNotFoundError, NotADirectoryError):
        disk.unlink(path)
        disk.sync(path.parent)
