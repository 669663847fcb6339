"""Keeps the places of a job's nodes at a restart: a spare node takes one only when its node has gone.

torchrun has spare nodes: those that come when ``--nnodes`` are there already wait in its redundancy list. But each
restart empties the job for a moment. A spare of torchrun's then takes the place of a node that is about to come back,
and the memory of that one, with the newest snapshots, is left out of the job; or it waits in the list of those for
whom a running job is started again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["VACANT_FOR", "keep_places"]

VACANT_FOR = 1.0
"""Seconds for which a place has to be free until a spare node takes it. A node that comes back is away for
milliseconds: torchrun's agent leaves a round and asks for the next one in two writes to the store."""


@contextmanager
def keep_places() -> Iterator[None]:
    """Has a node that is no part of the job yet wait as a spare until a place is free, and stays so."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous  # noqa: PLC0415  # other commands need no torch

    module: Any = dynamic_rendezvous  # torch has no setting for it
    torchs = module._RendezvousJoinOp
    act = module._Action
    members: set[Any] = set()  # one node, but for tests

    class Join(torchs):  # type: ignore[misc, valid-type]
        """Decides on each next act of a node that wants to join, as torch's does. One for each time that it joins."""

        def __init__(self) -> None:
            self._vacancy = _Vacancy()

        def __call__(self, ctx: Any, deadline: float) -> Any:
            action, state, node = super().__call__(ctx, deadline), ctx.state, ctx.node
            if action is act.FINISH:
                members.add(node)
            elif action is act.ADD_TO_REDUNDANCY_LIST:
                members.discard(node)
            if node in state.wait_list and state.complete and len(state.participants) >= ctx.settings.max_nodes:
                return act.REMOVE_FROM_WAIT_LIST  # the places are taken; a job with nodes that wait is started again
            if node in members or (not state.round and not state.complete) or self._vacancy.is_mine(ctx):
                return action
            if action in (act.ADD_TO_PARTICIPANTS, act.ADD_TO_WAIT_LIST):
                return act.ADD_TO_REDUNDANCY_LIST
            if action is act.REMOVE_FROM_REDUNDANCY_LIST:
                return act.KEEP_ALIVE if module._should_keep_alive(ctx) else act.SYNC
            return action

    module._RendezvousJoinOp = Join
    try:
        yield
    finally:
        module._RendezvousJoinOp = torchs


class _Vacancy:
    """Knows since when one of the places has been free for this node. Once it is taken for its own, it stays so."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._mine = False

    def is_mine(self, ctx: Any) -> bool:
        """Returns True once a place has been free for long enough, and no other spare is before this one."""
        state = ctx.state
        if state.complete and len(state.participants) >= ctx.settings.max_nodes:
            self._since, self._mine = None, False  # taken by another one
        if self._mine:
            return True
        free = ctx.settings.max_nodes - len(state.participants) - len(state.wait_list - {ctx.node})
        if ctx.node not in sorted(state.redundancy_list | {ctx.node})[: max(0, free)]:
            self._since = None
            return False
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        self._mine = now - self._since >= VACANT_FOR
        return self._mine
