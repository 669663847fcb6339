"""Describes an object as a file of ``torch.save``, without copying its tensors."""

from __future__ import annotations

import pickle
import sys
from typing import Any

from rekindle.errors import UnsupportedValueError
from rekindle.files.contents import Contents, Segment, of_records, segment_of

__all__ = ["of_object", "of_storage"]

_PROTOCOL = 2
"""Protocol of torch's own files, the newest that ``weights_only`` reads."""
_VERSION = b"3\n"
"""Version of torch's files, which every reader since torch 1.6 knows."""


class _Pieces(list[bytes]):
    """Collects what a pickler writes."""

    def write(self, data: Any) -> int:
        self.append(bytes(data))
        return len(data)


def of_object(obj: object) -> Contents:
    """Returns the contents of the file that ``torch.save`` would write, which stay in ``obj`` until they are copied.

    Raises UnsupportedValueError for tensors that share memory and read it as different types; and what the pickling of
    a value raises, as ``torch.save`` does.
    """
    storages, pickled = _pickle(obj)
    records = [("data.pkl", _of_bytes(pickled)), ("byteorder", _of_bytes(sys.byteorder.encode()))]
    records += [(f"data/{number}", of_storage(storage, 0)) for number, storage in enumerate(storages)]
    return of_records([*records, ("version", _of_bytes(_VERSION))])


def _pickle(obj: object) -> tuple[list[Any], bytes]:
    """Returns the storages of an object's tensors, and its pickle, which refers to them by their numbers."""
    import torch  # noqa: PLC0415  bytes are saved without it
    from torch import serialization  # noqa: PLC0415

    torch_names: Any = serialization
    keys: dict[int, str] = {}
    storages: list[Any] = []
    dtypes: dict[int, torch.dtype] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            storage: Any = value
            if isinstance(value, torch.storage.TypedStorage):
                typed, storage = storage, value._untyped_storage
                dtype, count = value.dtype, typed._size()
                kind = getattr(torch, typed._pickle_storage_type())
            elif torch.is_storage(value):
                dtype, count = torch.uint8, storage.nbytes()
                kind = torch_names.normalize_storage_type(type(value))
            else:
                return None
            address = storage.data_ptr() if storage.device.type != "meta" else 0
            if address and dtypes.setdefault(address, dtype) != dtype:
                raise UnsupportedValueError(
                    f"two tensors share memory and read it as {dtypes[address]} and as {dtype}: a file of torch.save "
                    "can't hold them. Clone one of the two"
                )
            key = keys.setdefault(storage._cdata, str(len(keys)))
            if len(storages) < len(keys):
                storages.append(storage)
            return ("storage", kind, key, torch_names.location_tag(storage), count)

    pieces = _Pieces()
    Pickler(pieces, protocol=_PROTOCOL).dump(obj)
    return storages, b"".join(pieces)


def _of_bytes(data: bytes) -> Segment:
    return segment_of(memoryview(data), 0)


def of_storage(storage: Any, start: int) -> Segment:
    """Returns the segment of a storage, in memory or on a device."""
    if storage.device.type == "cpu":
        return Segment(start, storage.nbytes(), storage.data_ptr(), storage)

    def put(place: memoryview) -> None:
        import torch  # noqa: PLC0415

        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        torch.frombuffer(place, dtype=torch.uint8).copy_(whole)

    return Segment(start, storage.nbytes(), 0, storage, put)
