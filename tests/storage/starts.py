"""Starts of a job and their claims of a root, one call of the store after the other, in an order that chance draws."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle.format.claim import Claim, Starts
from rekindle.storage.claims import claim_root, hold_claim, newest_claim
from rekindle.storage.posix import PosixStore
from rekindle.storage.store import Store

__all__ = ["WAIT", "claimed", "meet_at", "parted", "start"]

WAIT = 60.0


def start(number: int, *past: Starts, launch: str = "", nodes: int = 1, generation: int = 1) -> Starts:
    """A start on nodes that remember the ``past`` ones."""
    own = Claim(f"{number:016x}", generation, hosts=[f"host{number}"], nodes=nodes, at="today", launch=launch)
    return Starts(own, tuple(one for starts in past for one in starts.remembered))


def claimed(store: Store, starts: Starts) -> Starts:
    own, rival = claim_root(store, starts)
    assert rival is None and own.number
    return Starts(own)


class Turns:
    """Lets threads make their calls of a store one at a time, in an order that ``chance`` draws."""

    def __init__(self, chance: random.Random, names: list[str]) -> None:
        self._chance, self._changed = chance, threading.Condition()
        self._running, self._waiting, self._turn = set(names), set[str](), ""

    def wait(self) -> None:
        name = threading.current_thread().name
        with self._changed:
            self._waiting.add(name)
            self._draw()
            assert self._changed.wait_for(lambda: self._turn == name, WAIT)
            self._turn = ""
            self._waiting.remove(name)

    def leave(self) -> None:
        with self._changed:
            self._running.discard(threading.current_thread().name)
            self._draw()

    def _draw(self) -> None:
        if self._running and self._waiting == self._running:
            self._turn = self._chance.choice(sorted(self._waiting))
        self._changed.notify_all()


class Gated(PosixStore):
    """A store whose callers wait for their turn before each call that claims make."""

    def __init__(self, root: Path, turns: Turns) -> None:
        super().__init__(root)
        self._turns = turns

    def extras(self, directory: str) -> list[str]:
        self._turns.wait()
        return super().extras(directory)

    def write_extra(self, name: str, data: bytes, *, exclusive: bool = False) -> None:
        self._turns.wait()
        super().write_extra(name, data, exclusive=exclusive)

    def read_extra(self, name: str, most: int) -> bytes:
        self._turns.wait()
        return super().read_extra(name, most)


def meet_at(
    root: Path, chance: random.Random, starts: list[Starts], do: Callable[[PosixStore, Starts], Any]
) -> list[Any]:
    """What ``do`` returns, or the error that it raises, for each of ``starts`` at once."""
    found: list[Any] = [None] * len(starts)
    turns = Turns(chance, [f"start {n}" for n in range(len(starts))])

    def work(number: int) -> None:
        try:
            found[number] = do(Gated(root, turns), starts[number])
        except OSError as error:
            found[number] = error
        finally:
            turns.leave()

    threads = [threading.Thread(target=work, args=(n,), name=f"start {n}") for n in range(len(starts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    return found


def parted(root: Path, seed: int) -> None:
    chance = random.Random(seed)
    store = PosixStore(root)
    former = claimed(store, start(1, nodes=2))
    sides = [start(n, former, generation=chance.randint(2, 4)) for n in range(2, 2 + chance.choice((2, 3)))]
    outcomes = meet_at(root, chance, sides, claim_root)
    winners = [own for own, rival in outcomes if rival is None]
    assert len(winners) == 1, outcomes
    assert newest_claim(store) == winners[0]
    writes = meet_at(root, chance, sides, hold_claim)
    assert [side.own.start for side, error in zip(sides, writes, strict=True) if error is None] == [winners[0].start]
