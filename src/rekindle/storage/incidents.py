"""Keeps the records of a job's incidents on storage, beside the checkpoints: a line of JSON in a file each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from rekindle.common.os_errors import describe_error
from rekindle.errors import FormatError
from rekindle.memory.incident import LONGEST_LINE, Incident
from rekindle.storage.store import Store

__all__ = ["INCIDENTS", "load_incidents", "store_incident"]

INCIDENTS = "incidents"
"""Directory of the records."""
_MOST = 1000
"""Records that storage keeps of a job, some 800 bytes each; the oldest goes first. Reading all takes an object store,
at 20 ms for a request, some three seconds."""
_REQUESTS = 8
"""Records that are read at a time."""


def store_incident(store: Store, incident: Incident) -> None:
    """Writes a record, over an earlier one of the same start and host. Raises OSError when storage refuses."""
    store.write_extra(f"{INCIDENTS}/{incident.name}", incident.encode())
    for surplus in _names(store)[:-_MOST]:
        store.take_away(surplus)


def _names(store: Store) -> list[str]:
    return [name for name in store.extras(INCIDENTS) if name.endswith(".jsonl")]


def load_incidents(store: Store) -> tuple[list[Incident], list[str]]:
    """Reads all records, oldest start first, and describes each that is torn or foreign, which is left out.

    Raises OSError when storage can't be listed.
    """
    names = _names(store)[-_MOST:]
    with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="rekindle-ask") as pool:
        found = list(pool.map(partial(_load, store), names))
    return [one for one in found if isinstance(one, Incident)], [one for one in found if isinstance(one, str)]


def _load(store: Store, name: str) -> Incident | str:
    """Returns the record, or words on why it is none."""
    try:
        return Incident.decode(store.read_extra(name, LONGEST_LINE + 1))
    except FormatError as error:
        return f"{store.root}/{name} {error}"
    except OSError as error:
        return f"{store.root}/{name} can't be read: {describe_error(error)}"
