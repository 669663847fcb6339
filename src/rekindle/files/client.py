"""Makes this process one that saves files: its place in memory, its slots, the agent that it keeps running."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from rekindle.agent.file_drain import FileDrainer
from rekindle.common.os_errors import describe_error
from rekindle.errors import BusyError, MemoryStoreError, NotDurableError, RekindleError, UsageError
from rekindle.files.access import lacks_access
from rekindle.files.contents import Contents
from rekindle.files.exclusive import Exclusive
from rekindle.files.filling import Filler
from rekindle.files.finding import bring_here
from rekindle.files.pool import Pool
from rekindle.files.quota import Quota
from rekindle.files.settings import FileSettings, current_settings
from rekindle.format.file_receipt import FileReceipt, Terms
from rekindle.memory.files_dir import FilesDir
from rekindle.memory.job import JobInfo
from rekindle.memory.kept import Identity, key_of
from rekindle.session.agent_keeper import AgentKeeper
from rekindle.storage.open import open_place
from rekindle.storage.path_place import PathPlace
from rekindle.storage.place import Place
from rekindle.storage.renaming import note_placing

__all__ = ["Client", "current_client", "forked", "the_client", "write_in_turn"]

log = logging.getLogger("rekindle")

_LOOK_EVERY = 1.0
"""Seconds between looks at the agent and at memory that others have given up."""
_AGENT_WITHIN = 10.0
"""Seconds that the end of a process gives an agent to start."""
_TURN = 600.0
"""Seconds that a write straight to a path waits for an older one of the same path."""


class Client:
    """This process, as one that saves files. Thread-safe."""

    def __init__(self, settings: FileSettings) -> None:
        """Joins the files of this node. Raises MemoryStoreError, BusyError or OSError where that can't be done."""
        self.settings = settings
        self.pid = os.getpid()
        self.store = FilesDir.below(settings.base)
        self._filler = Filler()
        self._joining = Exclusive()
        self._lock = self.store.join()
        self._pool = self._new_pool()
        info = JobInfo(str(self.store.path), [], 1, None, None, settings.idle_timeout, drain_limit=settings.drain_limit)
        self._keeper = AgentKeeper(self.store, info, drainer=FileDrainer(self.store))
        self._ended = threading.Event()
        self._agent_has_access = False
        """True once it was seen to that the agent reaches the object stores that this process does."""
        self._saved: dict[str, str] = {}
        """Names of the memory stores that this process saved into, by key of the file, until it is known to arrive."""
        with suppress(RuntimeError):  # no thread can be had, as at the end of the process: saves look after the agent
            threading.Thread(target=self._watch, name="rekindle-files-watch", daemon=True).start()

    def _new_pool(self) -> Pool:
        return Pool(self.store, self._lock, self.settings.limit, Quota(self.store, self.settings.roots))

    def _rejoin(self) -> None:
        """Joins again after somebody removed memory."""
        with self._joining.entered():
            if not (self._lock.held() and self.store.kept_path.is_dir() and self.store.paths.slots.is_dir()):
                self._lock.release()
                self._lock = self.store.join()
                self._pool.close()
                self._pool = self._new_pool()
                self.store.write_job_again()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_EVERY):
            self.look()

    def look(self) -> None:
        """Looks after the agent and the slots."""
        with suppress(OSError, RekindleError):
            self._pool.tidy()
            if self.store.kept_path.is_dir():
                self._keeper.check()

    def save(
        self,
        target: str,
        contents: Contents,
        trace: list[int] | None,
        terms: Terms,
        *,
        placeholder: str | None = None,
        mode: int | None = None,
    ) -> None:
        """Saves a file into memory. Raises MemoryStoreError where that can't be done: nothing is left of it then.

        ``placeholder``: mark of the placeholder at its path; None if none stands there.
        """
        if "://" in target:
            self._give_access()
        self.keep(target, contents, trace, None, terms, placeholder=placeholder, mode=mode)
        self._saved[key_of(target)] = self.store.id()
        self._keeper.begin()

    def _give_access(self) -> None:
        """Has an agent with other credentials than ours replaced: once, lest two processes do so in turn for ever."""
        if not self._agent_has_access:
            self._agent_has_access = True
            agent = self.store.agent()
            if agent and lacks_access(agent):
                self._keeper.replace(agent)

    def keep(
        self,
        target: str,
        contents: Contents,
        trace: list[int] | None,
        stored: Identity | None,
        terms: Terms = Terms(),  # noqa: B008  never changed
        *,
        placeholder: str | None = None,
        mode: int | None = None,
    ) -> None:
        """Puts a file into memory. ``stored`` is what storage shows of one that it has: it never supersedes a save.

        Raises MemoryStoreError, and the errors of the contents' segments. Either leaves nothing of it.
        """
        with self._memory_errors():
            self._rejoin()
            pool = self._pool
            slot = pool.take(target, contents.nbytes)
        try:
            sums = self._filler.fill(contents, slot)
            receipt = FileReceipt(
                *(target, contents.kind, contents.nbytes, sums, time.time(), trace, terms),
                *(placeholder is not None, mode, placeholder or ""),
            )
            with self._memory_errors():
                committed = pool.commit(slot, receipt, stored)
        except BaseException:
            pool.give_back(slot)
            raise
        if committed:
            pool.prepare(contents.nbytes)
        else:
            pool.give_back(slot)

    @contextmanager
    def _memory_errors(self) -> Iterator[None]:
        """Turns errors of the memory store's files into MemoryStoreError."""
        try:
            yield
        except MemoryStoreError:
            raise
        except (OSError, BusyError) as error:
            raise MemoryStoreError(f"memory store {self.store.path}: {describe_error(error)}") from error

    def check_memory(self, target: str | None) -> None:
        """Raises NotDurableError if memory was removed since this process saved a file, or that of ``target``.

        Nobody knows then if it had arrived. To be called when memory has nothing that storage lacks: each file is told
        of once, lost or not.
        """
        here = self.store.id()
        wanted = list(self._saved) if target is None else [key_of(target)]
        lost = sum(self._saved.pop(key, here) != here for key in wanted)
        if lost:
            raise NotDurableError(
                f"memory store {self.store.path}: was removed, and {lost} file(s) of this process with it that may not "
                "have been on storage: save them again"
            )

    def place(self, target: str) -> Place:
        """Returns the place of a target, to write to."""
        return open_place(target, self.store.id())

    def close(self) -> None:
        """Sees to it that somebody carries on what this process has saved, and gives back what it has not used."""
        if os.getpid() != self.pid:
            return
        until = time.monotonic() + _AGENT_WITHIN
        with suppress(OSError, RekindleError):
            while self.store.agent() in (None, self.pid) and self.store.kept.newest(stored=False):
                self._keeper.check()
                if time.monotonic() > until:
                    log.warning("no agent could be started: files stay in memory, until 'rekindle flush' carries them")
                    break
                time.sleep(0.02)
        self._ended.set()
        self._keeper.close()
        self._pool.close()
        self._lock.release()


def write_in_turn(store: FilesDir, place: Place, contents: Contents) -> None:
    """Writes a file straight to its path, and gives up what memory has had of older ones there.

    One that is saved meanwhile is newer. Raises OSError where storage refuses, BusyError while another process writes
    there, or in a signal handler that has interrupted its thread there.
    """
    key = key_of(place.target)
    ours = threading.get_ident(), key
    if ours in _writing:
        raise BusyError(f"{place.target}: this thread is just writing it, which its signal handler has interrupted")
    if isinstance(place, PathPlace):
        bring_here(store, place)
        place.placing = partial(_note_placing, store, place)
    older, turn = store.kept.files(key), store.writing(key)
    _writing.add(ours)
    try:
        if not turn.acquire(_TURN):
            raise BusyError(f"{place.target}: an older file is still being written there: see that storage answers")
        place.write_stream(contents.chunks(), contents.nbytes)
        if older:  # else nothing is waited for: a process that was stopped may hold the lock of memory
            for file in older:
                store.set_aside(file)
            store.give_up(older)
    finally:
        turn.release()
        _writing.discard(ours)


def _note_placing(store: FilesDir, place: PathPlace) -> None:
    with suppress(OSError):  # memory is full: what is saved at this moment in place of a placeholder may be given up
        note_placing(store.kept, place)


_writing: set[tuple[int, str]] = set()
"""Threads that write straight to storage, each with the key of the file. Of the process, as locks of files are."""


def forked() -> bool:
    """True in a forked child of a process that saves files."""
    return _client is not None and _client.pid != os.getpid()


def current_client() -> Client | None:
    """Returns the client of this process, if it has one."""
    return _client if _client is not None and _client.pid == os.getpid() else None


_client: Client | None = None
"""The process's client. One, as a process has one place for its files."""
_making = Exclusive()


def the_client() -> Client:
    """Returns the client of this process, made at the first call.

    Raises UsageError in a forked child of a process that has one; else as ``Client``.
    """
    global _client
    if _client is not None and _client.pid != os.getpid():
        raise UsageError(
            f"process {os.getpid()} was forked from process {_client.pid}, which saves files, and can't save files "
            "itself: start it by spawn, or exec"
        )
    with _making.entered():
        settings = current_settings()
        if _client is not None and _client.settings != settings:
            _client.close()
            _client = None
        if _client is None:
            try:
                _client = Client(settings)
            except MemoryStoreError:
                raise
            except (OSError, BusyError) as error:
                raise MemoryStoreError(f"memory store {settings.base}: {describe_error(error)}") from error
        return _client


def _renew() -> None:
    """Lets a forked child in, which else waits for a thread of its parent that was just joining the files."""
    global _making
    _making = Exclusive()


os.register_at_fork(after_in_child=_renew)


def _close() -> None:
    if _client is not None:
        _client.close()


atexit.register(_close)
