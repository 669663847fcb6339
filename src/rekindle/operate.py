"""What an operator can learn of jobs and do to them, without a word on how it is shown."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.advice import explain
from rekindle.agent.drain import Drainer
from rekindle.agent.fault import Fault
from rekindle.agent.http import ask
from rekindle.agent.loop import unknown
from rekindle.agent.spawn import TICK
from rekindle.errors import AgentError, BusyError, FormatError, NotDurableError, NotFoundError, RekindleError
from rekindle.patience import behind, within
from rekindle.roots import describe
from rekindle.snapshot.documents import Receipt, read
from rekindle.snapshot.fields import loads
from rekindle.snapshot.lineage import Incarnation, retired
from rekindle.snapshot.lock import Lock
from rekindle.snapshot.memory import Job, JobDir
from rekindle.snapshot.names import Root, receipt_name
from rekindle.snapshot.status import DOES, PHASES, STAGES, Status, read_status
from rekindle.storage.catalog import MEMORY, STORAGE, Copy, copies_in, survey
from rekindle.storage.standing import newest_on, was_deleted
from rekindle.storage.stores import open_store

__all__ = ["Listed", "copies_of", "ended", "info_of", "job_of", "job_status", "jobs", "look", "pages", "receipts"]
__all__ += ["stop", "values_of"]


_SHOWN = 10
"""Steps that a message lists at most."""
_SILENT = 10.0
"""Seconds without a sign of life after which storage hangs, and is not slow."""
_LOOK = 3.0
"""Seconds that storage gets to say whether a root was deleted: it may be one of many."""
_COMPOSING = 5.0
"""Seconds that an agent gets to put dead ranks' snapshots together, for which it takes the place of their trainers."""


@dataclass(frozen=True)
class Listed:
    """One copy of a checkpoint and what it is worth."""

    copy: Copy
    nbytes: int
    condition: str
    """``complete``, ``incomplete`` (a rank of this node lacks it), ``abandoned`` (the job went on from before it) or
    ``damaged`` (its manifest can't be read)."""
    saved_at: float | None = None
    """When it was saved into memory, or became durable, in seconds since 1970; None where that is not known."""

    def to_json(self) -> dict[str, Any]:
        copy = self.copy
        return {
            "step": copy.step,
            "place": copy.place,
            "condition": self.condition,
            "pinned": copy.pinned,
            "saved_at": None if self.saved_at is None else _iso(self.saved_at),
            "generation": copy.incarnation.generation,
            "incarnation": copy.incarnation.id,
            "continued_from": copy.incarnation.parent_step if copy.incarnation.parent else None,
            "world": copy.world,
            "ranks": sorted(copy.ranks),
            "bytes": self.nbytes,
            "path": str(copy.files),
        }


def look(root: Root, base: Path, seconds: float) -> tuple[list[Listed], OSError | RekindleError | None]:
    """As ``copies_of``, and what is wrong: the root was deleted, or storage can't say what it has within ``seconds``.

    In the second case it gives what memory holds; raises what is wrong when memory holds nothing.
    """
    job = JobDir.of(root, base)

    def everywhere() -> list[Listed]:
        noted = job.durable()
        if noted is not None:
            newest_on(open_store(root), noted, (), job.trace())  # else it is not mounted
        return copies_of(root, base)

    try:
        listed = within(seconds, root, everywhere)
        why = None if job.trainers() else _deleted(job, seconds)
        return listed, None if why is None else NotFoundError(f"{root}: {why}")
    except RekindleError:
        raise
    except OSError as error:
        with suppress(NotFoundError):
            return copies_of(root, base, stored=False), error
        raise


def copies_of(root: Root, base: Path, step: int | None = None, stored: bool = True) -> list[Listed]:
    """Every copy of every checkpoint of ``root`` that this node can see, newest first; of one step if given.

    Without ``stored`` nothing is asked of storage. Raises NotFoundError when there is none, which tells what is at
    ``root`` instead.
    """
    job = JobDir.of(root, base)
    job.check()
    info = job.read_job()
    try:
        contents = open_store(root).contents() if stored else None
    except NotADirectoryError as error:
        if copies_in(job, None):
            raise
        raise NotFoundError(f"{root}: no checkpoint{_instead(root, base)}") from error
    copies = copies_in(job, contents)
    seen = {copy.incarnation for copy in copies}
    when = {entry.stamp.key: entry.saved_at for entry in contents.published} if contents is not None else {}
    listed = []
    for copy in copies:
        if step is not None and copy.step != step:
            continue
        local = info.ranks if info is not None and copy.world == info.world else range(copy.world)
        condition = "complete" if copy.place != MEMORY or copy.ranks.issuperset(local) else "incomplete"
        if retired(copy.step, copy.incarnation, seen):
            condition = "abandoned"
        saved_at = when.get(copy.key) if copy.place == STORAGE else _saved_at(copy)
        listed.append(Listed(copy, _bytes(copy), condition, saved_at))
    for number, files in contents.damaged if contents is not None else ():
        if step is None or number == step:
            listed.append(Listed(Copy(number, Incarnation(0, ""), 0, STORAGE, files, frozenset(), True), 0, "damaged"))
    if not listed:
        raise NotFoundError(f"{root}: {_none_of(step, copies, root, base, stored)}")
    return listed


def _none_of(step: int | None, copies: list[Copy], root: Root, base: Path, stored: bool) -> str:
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    if copies:
        newest = list(dict.fromkeys(str(copy.step) for copy in copies))
        return f"{wanted}: it has {', '.join(newest[:_SHOWN])}{', ...' if len(newest) > _SHOWN else ''}"
    return wanted + (_instead(root, base) if stored else "")


def _instead(root: Root, base: Path) -> str:
    what = describe(root, [info.root for job in jobs(base) if (info := info_of(job)) is not None])
    return f": {what}" if what else ""


def info_of(job: JobDir) -> Job | None:
    """As it was written down; None where it can't be read, which another command tells of."""
    with suppress(OSError, FormatError):
        return job.read_job()
    return None


def job_of(root: Root, base: Path) -> JobDir:
    """The job of ``root`` on this node. Raises NotFoundError when it has no memory here."""
    job = JobDir.of(root, base)
    if not job.path.is_dir():
        raise NotFoundError(f"{root}: has nothing in memory on this node{_instead(root, base)}")
    return job


def _bytes(copy: Copy) -> int:
    total = 0
    for rank in copy.ranks:
        try:
            total += copy.files.shard_size(rank, copy.world)
        except OSError:
            continue
    return total


def _saved_at(copy: Copy) -> float | None:
    """When the last rank's part came into memory: receipts are written once."""
    names = [copy.files.named(receipt_name(rank, copy.world)) for rank in copy.ranks]
    try:
        return max(os.stat(name).st_mtime for name in names)
    except OSError:  # a newer step has just taken its place
        return None


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(timespec="seconds")


def receipts(copy: Copy) -> Iterator[Receipt]:
    """The receipts of one copy, rank by rank. Raises CorruptError or FileNotFoundError."""
    for rank in sorted(copy.ranks):
        name = receipt_name(rank, copy.world)
        yield Receipt.decode(copy.files.read(name), copy.files.named(name))


def values_of(receipt: Receipt) -> Iterator[tuple[str, Any]]:
    """(path, typed JSON) of every value in the state that is not a tensor."""

    def walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, list):
            for index, item in enumerate(node):
                yield from walk(item, f"{path}[{index}]")
        elif isinstance(node, dict):
            tag: str = next(iter(node), "")
            body: Any = node.get(tag)
            if tag == "$value":
                yield path, receipt.values[body]
            elif tag == "$tuple":
                yield from walk(body, path)
            elif tag.startswith("$") and tag != "$tensor":
                for key, item in body:
                    yield from walk(item, f"{path}[{key!r}]")
            elif tag != "$tensor":
                for key, item in node.items():
                    yield from walk(item, f"{path}.{key}" if path else key)

    return walk(receipt.structure, "")


def jobs(base: Path) -> list[JobDir]:
    """Every job that has memory on this node."""
    if not base.is_dir():
        return []
    found = [JobDir(path) for path in sorted(base.iterdir()) if path.is_dir()]
    for job in found:
        job.check()
    return found


def pages(job: JobDir) -> dict[int, Status]:
    """Status pages of the node's live ranks that train inside of ``guard()``."""
    found = {}
    for rank, pid in job.trainers().items():
        with suppress(OSError, FormatError):
            page = read_status(job.status_page(rank))
            if page.pid == pid:
                found[rank] = page
    return found


def job_status(job: JobDir) -> dict[str, Any]:
    """What is known of one job; ``problem`` is None when all is well."""
    info, agent, trainers = job.read_job(), job.agent(), job.trainers()
    memory = survey(job, None)
    status: dict[str, Any] = {
        "root": info.root if info else None,
        "directory": str(job.path),
        "trainers": trainers,
        "ranks": {rank: _described(page) for rank, page in pages(job).items()},
        "fault": _last_fault(job),
        "agent": agent,
        "memory_bytes": job.held_bytes(),
        "memory_steps": sorted({copy.step for copy in memory}, reverse=True),
        "durable_step": job.durable(),
        "problem": None,
        "drain": None,
    }
    try:
        if agent is not None:
            status["drain"] = ask(job.socket, "GET", "/status")
    except AgentError as error:
        # A trainer that could get no agent drains in a thread, holds the agent's lock and answers no questions.
        status["problem"] = None if agent in trainers.values() else str(error)
    if agent is None and trainers:
        status["problem"] = "no agent: nothing is being carried to storage"
    elif agent is None and memory and (status["durable_step"] is None or memory[0].step > status["durable_step"]):
        status["problem"] = f"step {memory[0].step} is only in memory, and nobody is there: run 'rekindle stop ROOT'"
    elif status["drain"] and status["drain"]["error"]:
        status["problem"] = status["drain"]["error"]
    elif status["drain"]:
        status["problem"] = status["drain"].get("waits") or status["drain"].get("given_up")
    deleted = None if trainers else _deleted(job, _LOOK)
    if deleted is not None:
        status["durable_step"] = None
    problem = deleted or unknown(job) or status["problem"]
    status["problem"] = problem and problem.removeprefix(f"{status['root'] or status['directory']}: ")
    if status["durable_step"] is None and status["drain"] and deleted is None:
        status["durable_step"] = status["drain"]["durable"]  # that of an earlier start of the job
    return status


def ended(root: Root, base: Path) -> dict[str, Any]:
    """The status of a job that has ended here, which has nothing in memory any more.

    Raises NotFoundError when storage has nothing of it either.
    """
    try:
        published = open_store(root).published()
    except NotADirectoryError:
        published = []
    if not published:
        instead = _instead(root, base)
        raise NotFoundError(f"{root}: has nothing in memory on this node, and no checkpoint on storage{instead}")
    return {
        **{"root": str(root), "directory": None, "trainers": {}, "ranks": {}, "fault": None, "agent": None},
        **{"memory_bytes": 0, "memory_steps": [], "durable_step": published[-1].stamp.step},
        **{"problem": None, "drain": None},
    }


def _described(page: Status) -> dict[str, Any]:
    return {
        "phase": "paused" if page.paused else STAGES[page.stage] if page.stage else PHASES[page.phase],
        "does": "pauses" if page.paused else STAGES[page.stage] if page.stage else DOES[page.phase],
        "step": page.step,
        "in_memory": page.snapshot if page.snapshot >= 0 else None,
        "age": round(page.age, 3),
        "longest_step": round(page.longest, 3),
        "note": page.note,
    }


def _last_fault(job: JobDir) -> dict[str, Any] | None:
    try:
        return Fault.from_json(loads(read(job.fault))).to_json()
    except (OSError, ValueError):
        return None


def stop(job: JobDir, timeout: float, discard: bool, progress: Callable[[dict[str, Any]], object]) -> None:
    """End a job for good: what only memory holds goes to storage, then the memory is given back.

    With ``discard`` it is given back at once, and what only it held is lost. Raises BusyError while trainers live,
    NotDurableError when storage didn't take everything in ``timeout`` seconds: the memory then stays.
    """
    deadline = time.monotonic() + timeout
    patience = time.monotonic() + _COMPOSING
    while set(job.trainers().values()) == {job.agent()} and time.monotonic() < patience:
        time.sleep(TICK)
    if job.trainers():
        raise BusyError(f"{job.path}: is being trained by processes {sorted(job.trainers().values())}")
    why = unknown(job)
    if why is not None and not discard:
        raise NotDurableError(f"{job.path}: {why}")
    if not discard and job.path.exists():
        _refuse_deleted(job, deadline)
    agent = job.agent()
    if agent is not None:
        _end_agent(job, agent, deadline, discard, progress)
    if job.path.exists():
        _end_here(job, deadline, discard, progress)


def _refuse_deleted(job: JobDir, deadline: float) -> None:
    """Raise NotDurableError where the root was deleted: it must be said what is to become of memory's snapshots."""
    why = _deleted(job, max(1.0, min(_SILENT, deadline - time.monotonic())))
    if why is not None:
        info = job.read_job()
        raise NotDurableError(f"{info.root if info is not None else job.path}: {why}")


def _deleted(job: JobDir, seconds: float) -> str | None:
    """What to tell of a job that isn't trained, and whose root was deleted, while memory still has some of it.

    None where that isn't so, and where storage doesn't say within ``seconds``.
    """
    info, steps, trace = info_of(job), sorted({stamp.step for stamp, _ in job.stamps()}), job.trace()
    if info is None or not steps or trace is None:
        return None
    root = info.root
    with suppress(OSError):
        if within(seconds, root, lambda: was_deleted(open_store(root), job.durable(), trace)):
            return (
                f"was deleted, and memory still has steps {steps} of it: the next start gives them up, as 'rekindle "
                f"stop --discard ROOT' does; a start with restore(step={steps[-1]}) goes on from there"
            )
    return None


def _end_agent(
    job: JobDir, agent: int, deadline: float, discard: bool, progress: Callable[[dict[str, Any]], object]
) -> None:
    if discard and agent > 0:  # 0: it has not written down its process id yet
        os.kill(agent, signal.SIGTERM)  # it leaves after the drain in hand, and leaves the memory to us
    elif not discard:
        ask(job.socket, "POST", "/stop")
    while job.agent() == agent:
        if time.monotonic() > deadline:
            raise NotDurableError(f"{job.path}: agent {agent} is still at it: {_error(job)}")
        try:
            progress(ask(job.socket, "GET", "/status", timeout=2.0))
        except AgentError:
            pass  # it is just leaving
        time.sleep(TICK)


def _error(job: JobDir) -> str:
    try:
        progress = ask(job.socket, "GET", "/status", timeout=2.0)
    except AgentError as failure:
        return str(failure)
    return progress["error"] or progress.get("waits") or _so_far(progress)


def _so_far(progress: Mapping[str, Any]) -> str:
    if progress["step"] is None:
        return "storage is slow, or other nodes have not finished"
    done, total = progress["done"], progress["total"]
    return f"storage has {done:,} of {total:,} bytes of step {progress['step']} so far: give it more time (--timeout)"


def _end_here(job: JobDir, deadline: float, discard: bool, progress: Callable[[dict[str, Any]], object]) -> None:
    lock = Lock(job.agent_lock)
    if not lock.acquire(5.0):
        raise BusyError(f"{job.path}: process {job.agent()} has become its agent")
    try:
        drainer = Drainer(job)
        while not discard:
            # At least once: it also gives a killed drain's checkpoint its proper name.
            busy = _in_time(deadline, job, drainer, drainer.tick, progress)
            if not _in_time(deadline, job, drainer, lambda: _pending(drainer), progress):
                break
            if time.monotonic() > deadline:
                raise _not_in_time(job, drainer)
            if not busy:
                time.sleep(TICK)
        if not job.remove():
            raise BusyError(f"{job.path}: a trainer has come back")
    finally:
        lock.release()


def _in_time(
    deadline: float,
    job: JobDir,
    drainer: Drainer,
    work: Callable[[], bool],
    progress: Callable[[dict[str, Any]], object],
) -> bool:
    """What ``work`` gives, which storage that is slow, or hangs, keeps from ending; ``progress`` is told meanwhile.

    Raises NotDurableError.
    """
    answer = behind(work, "rekindle-stop")
    last = max(deadline, time.monotonic() + 1.0)
    while not wait([answer], TICK).done:
        progress(vars(drainer.progress))
        if time.monotonic() > last:
            raise _not_in_time(job, drainer)
    progress(vars(drainer.progress))
    return answer.result()


def _not_in_time(job: JobDir, drainer: Drainer) -> NotDurableError:
    done = drainer.progress
    silent = 0.0 if done.moved is None else time.monotonic() - done.moved
    why = done.error or done.waits or _so_far(vars(done))
    if silent > _SILENT:
        info = info_of(job)
        where = info.root if info is not None else job.path
        why = f"{where}: does not answer, for {silent:.0f} s now: its file system hangs, see that the server is there"
    return NotDurableError(f"{job.path}: what memory holds is not on storage: {why}")


def _pending(drainer: Drainer) -> bool:
    try:
        return drainer.pending() is not None
    except OSError as error:
        drainer.progress.error = explain(error)
        return True
