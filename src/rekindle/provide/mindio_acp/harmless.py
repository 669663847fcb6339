"""Lets ``weights_only`` load values that checkpoints of Megatron hold, and that run no code.

Namespaces, and NumPy's arrays of numbers. NumPy's own functions are not let in: with a forged dtype they take any bytes
for addresses. What stands in for them here makes arrays of plain numbers only.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pickle import UnpicklingError
from typing import Any

__all__ = ["harmless"]

_NUMBERS = re.compile(r"[biufc]\d{1,2}", re.ASCII)
_ORDERS = ("<", ">", "=", "|")
_of_thread = threading.local()
"""Has the dtypes that a thread's load has met."""
_lock = threading.Lock()
_added: list[Any] = []
_users = 0
"""Loads that go on in threads of this process: torch has one list for all of them."""


@contextmanager
def harmless() -> Iterator[None]:
    """Lets such values in while the block runs, if torch is there and knows how (2.5)."""
    if find_spec("torch") is None:
        yield
        return
    from torch import serialization  # noqa: PLC0415  bytes are loaded without it

    torch: Any = serialization
    if not hasattr(torch, "safe_globals"):
        yield
        return
    _come(torch)
    _of_thread.dtypes = []
    try:
        yield
        if not all(dtype.made for dtype in _of_thread.dtypes):
            raise UnpicklingError(
                "it holds a dtype of NumPy by itself: load it with weights_only=False, if you trust it"
            )
    finally:
        _of_thread.dtypes = []
        _go(torch)


def _come(torch: Any) -> None:
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            known = {_name(one) for one in torch.get_safe_globals()}
            _added[:] = [one for one in _harmless() if _name(one) not in known]  # the program's own stay as they are
            torch.add_safe_globals(_added)


def _go(torch: Any) -> None:
    global _users
    with _lock:
        _users -= 1
        if not _users:
            torch.safe_globals(_added).__exit__(None, None, None)


def _begin_anew() -> None:
    """Ends in a forked child the loads of its parent's threads, which it hasn't got."""
    global _lock, _users
    _lock, users, _users = threading.Lock(), _users, 0
    if users:
        sys.modules["torch.serialization"].safe_globals(_added).__exit__(None, None, None)


os.register_at_fork(after_in_child=_begin_anew)


def _name(one: Any) -> str:
    return str(one[1]) if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}"


def _no_bytes() -> bytes:
    """Stands in for the type of bytes, by which a pickle names those of length 0."""
    return b""


def _harmless() -> list[Any]:
    plain: list[Any] = [argparse.Namespace, types.SimpleNamespace, (_no_bytes, "builtins.bytes")]
    return plain + (_of_numpy() if find_spec("numpy") is not None else [])


class _Dtype:
    """Stands in for a dtype, until an array is made of it."""

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        self.code, self.order, self.made = code, "=", False
        _of_thread.dtypes.append(self)

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def make(self) -> Any:
        """Returns the dtype. Raises UnpicklingError for any but that of numbers."""
        import numpy  # noqa: PLC0415  optional, and there

        if not isinstance(self.code, str) or not _NUMBERS.fullmatch(self.code) or self.order not in _ORDERS:
            raise UnpicklingError(f"an array of NumPy of {self.order!r}, {self.code!r} is not of numbers")
        self.made = True
        return numpy.dtype(self.order + self.code)


@cache
def _of_numpy() -> list[Any]:
    import numpy  # noqa: PLC0415  optional, and there

    class Array(numpy.ndarray):
        """An array that a pickle can make of numbers only. Pickled again, it is one of NumPy."""

        def __new__(cls, *args: Any) -> Any:
            raise UnpicklingError("an array of NumPy is made in another way than NumPy's")

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self.view(numpy.ndarray).__reduce_ex__(protocol)

        def __setstate__(self, state: Any) -> None:
            _, shape, dtype, fortran, data = state
            if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
                raise UnpicklingError("an array of NumPy is not of numbers")
            super().__setstate__((1, shape, dtype.make(), fortran, data))

    def reconstruct(kind: Any, shape: Any, code: Any) -> Any:
        return numpy.ndarray.__new__(Array, (0,), "b")

    def scalar(dtype: _Dtype, data: bytes) -> Any:
        return numpy.frombuffer(data, dtype.make())[0]

    found: list[Any] = [(Array, "numpy.ndarray"), (_Dtype, "numpy.dtype")]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        found += [(reconstruct, f"{module}._reconstruct"), (scalar, f"{module}.scalar")]
    return found
