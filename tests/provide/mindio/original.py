"""Writes files in MindIO's own format, as its documents and its reader have it, independent of ours."""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

import torch

__all__ = ["of_bytes", "of_object", "wrapped"]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[int, Any] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.storage.TypedStorage):
            return None
        storage = value._untyped_storage
        self.storages.setdefault(storage._cdata, storage)
        key = str(list(self.storages).index(storage._cdata))
        return "storage", getattr(torch, value._pickle_storage_type()), key, "cpu", value._size()


def wrapped(body: bytes, table: Any, at: int | None = None, nbytes: int | None = None) -> bytes:
    """A file of this body and table, which may lie about where the table is."""
    pickled = table if isinstance(table, bytes) else pickle.dumps(table)
    tail = struct.pack("QQ", len(body) if at is None else at, len(pickled) if nbytes is None else nbytes)
    return body + pickled + tail + b"mindio\0"


def of_object(obj: Any) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(obj)
    body = file.getvalue()
    table = {"data.pkl": (0, len(body))}
    for number, storage in enumerate(pickler.storages.values()):
        table[f"data/{number}"] = (len(body), storage.nbytes())
        body += bytes(storage)
    return wrapped(body, table)


def of_bytes(data: bytes) -> bytes:
    return wrapped(data, {"mindio_save_data_type": "directly_bytes", "bytes_length": len(data)})
