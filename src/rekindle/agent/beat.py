"""Defines what the agents of a start tell each other ten times a second: how far each node's ranks are."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rekindle.agent.common_step import NOTHING_TOLD, Told
from rekindle.format.fields import check_integer, check_integers, check_seconds, check_texts
from rekindle.format.names import MAX_RANKS
from rekindle.memory.fault import Fault
from rekindle.memory.status import PHASES, STAGES, Status

__all__ = ["Beat", "Page", "fault_from_json", "fault_to_json"]

_NOTE = 64
"""Characters of a rank's words on its progress."""
_MOST_NODES = 1 << 16
_LONGEST_AGO = 1e9
"""Seconds: what a node says of a time longer ago is refused."""


class Page(NamedTuple):
    """One rank's status page, and what its agent knows besides."""

    status: Status
    """Its times are of the clock of the node that holds this object."""
    floor: float | None
    """Seconds without progress that are never a hang; None without a watchdog."""
    stopped: bool
    """True if a signal has stopped the process."""


@dataclass(frozen=True)
class Beat:
    """One node's account of itself, with times of the clock of the node that holds this object."""

    hears: Collection[int] = ()
    """Numbers of the nodes of which it has a sign of life."""
    pages: dict[int, Page] = field(default_factory=dict)
    """By rank: those of its guarded ranks."""
    paused_at: float | None = None
    """Time at which a rank of it, or of a node that it has heard of, was last seen to pause; None for never. To be held
    by a debugger is a pause, too."""
    unsettled_at: float | None = None
    """Time at which it, or a node that it has heard of, last did not hear a node that may be back; None for never."""
    cleared: bool = False
    """True if ranks are late, and its own have said that no debugger holds them."""
    newest: int = -1
    """Newest step that all of its ranks have in its memory; -1 if unknown."""
    durable: int = -1
    """Newest step that it has seen on storage; -1 if unknown."""
    reached: int = -1
    """Newest step that its ranks have come to, an update that has begun included, once all of them have been told to
    go; -1 before. Ranks that have ended since count."""
    common: Told = NOTHING_TOLD
    """Its word on the step that all nodes keep."""

    def to_json(self) -> dict[str, Any]:
        """Returns the account as JSON, in which each time is given by the seconds that have passed since."""
        now = time.monotonic()
        return {
            "hears": list(self.hears),
            "pages": [_page_to_json(rank, page, now) for rank, page in self.pages.items()],
            "paused": None if self.paused_at is None else now - self.paused_at,
            "unsettled": None if self.unsettled_at is None else now - self.unsettled_at,
            "cleared": self.cleared,
            "newest": self.newest,
            "durable": self.durable,
            "reached": self.reached,
            "common": self.common.to_json(),
        }

    @staticmethod
    def from_json(value: Any) -> Beat:
        """Reads an account. Raises ValueError, TypeError or KeyError when a field is missing or malformed."""
        now = time.monotonic()
        if type(value["pages"]) is not list or len(value["pages"]) > MAX_RANKS:
            raise ValueError("the pages of a beat are not a list of so many ranks")
        return Beat(
            hears=check_integers(value["hears"], _MOST_NODES, _MOST_NODES),
            pages=dict(_page_from_json(page, now) for page in value["pages"]),
            paused_at=None if value["paused"] is None else now - _ago(value["paused"]),
            unsettled_at=None if value.get("unsettled") is None else now - _ago(value["unsettled"]),
            cleared=_truth(value["cleared"]),
            newest=check_integer(value["newest"], -1),
            durable=check_integer(value["durable"], -1),
            reached=check_integer(value.get("reached", -1), -1),
            common=Told.from_json(value["common"]),
        )


def _page_to_json(rank: int, page: Page, now: float) -> dict[str, Any]:
    status = page.status
    return {
        "rank": rank,
        "generation": status.generation,
        "step": status.step,
        "snapshot": status.snapshot,
        "secured": status.secured,
        "phase": status.phase,
        "stage": status.stage,
        "age": now - status.progress / 1e9,
        "paused": bool(status.paused),
        "stopped": page.stopped,
        "longest": status.longest,
        "pause": status.pause,
        "floor": page.floor,
        "note": status.note,
    }


def _page_from_json(value: Any, now: float) -> tuple[int, Page]:
    status = Status(
        pid=0,
        generation=check_integer(value["generation"]),
        phase=check_integer(value["phase"], 0, len(PHASES) - 1),
        stage=check_integer(value["stage"], 0, len(STAGES) - 1),
        paused=int(_truth(value["paused"])),
        step=check_integer(value["step"], -1),
        snapshot=check_integer(value["snapshot"], -1),
        secured=check_integer(value["secured"], -1),
        longest=_ago(value["longest"]),
        progress=int((now - _ago(value["age"])) * 1e9),
        note=check_texts([value["note"]])[0][:_NOTE],
        pause=_ago(value["pause"]),
    )
    floor = None if value["floor"] is None else check_seconds(value["floor"])
    return check_integer(value["rank"], 0, MAX_RANKS - 1), Page(status, floor, _truth(value["stopped"]))


def fault_to_json(fault: Fault) -> dict[str, Any]:
    """Returns a fault as another node is told of it: clocks differ, so it also says how long ago it was noticed."""
    return {"fault": fault.to_json(), "age": time.monotonic() - fault.noticed}


def fault_from_json(value: Any) -> Fault:
    """Reads a fault of another node, and puts its times on this node's clock. Raises ValueError or KeyError."""
    fault = Fault.from_json(value["fault"])
    noticed = time.monotonic() - _ago(value["age"])
    began = None if fault.began is None else noticed - (fault.noticed - fault.began)
    return replace(fault, noticed=noticed, began=began)


def _ago(value: Any) -> float:
    """Returns a number of seconds that is not negative: clocks and sums of them may be a little off."""
    seconds = max(0.0, check_seconds(value))
    if seconds > _LONGEST_AGO:
        raise ValueError(f"{seconds:.0f} s ago is too long")
    return seconds


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("expected true or false")
    return value
