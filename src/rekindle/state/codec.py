"""Encodes values that are not tensors as typed JSON. Decoding runs no code, except for pickles, if they are allowed."""

from __future__ import annotations

import base64
import math
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rekindle.errors import FormatError, UnsupportedValueError, UsageError
from rekindle.format.fields import MAX_VALUE_DEPTH
from rekindle.state.numbers import NumberList
from rekindle.state.types import (
    CLASS_TAGS,
    DECODERS,
    ForeignValue,
    Recurse,
    class_names_in,
    decode_of_class,
    encode_other,
)

__all__ = ["decode", "encode", "is_well_formed", "has_pickle", "is_numpy", "is_plain", "is_typed"]

_EXACT = 1 << 53
"""Bound for integers as JSON numbers. Other JSON readers hold them as doubles, so larger ones are written as text."""

_NUMPY_KINDS = "biufcSUmM"
"""Kinds of NumPy dtypes with plain elements, which need no pickle."""


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def is_well_formed(text: str) -> bool:
    """True if ``text`` has no lone surrogates. In JSON two adjacent ones become another character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode(value: Any, room: int = MAX_VALUE_DEPTH - 1, *, allow_pickle: bool = False) -> Any:
    """Returns the JSON for a value, nested at most ``room`` levels deep.

    Raises UnsupportedValueError for a value that has no type in the format, or is nested too deeply.
    """
    kind = type(value)
    if room < 0:
        raise UnsupportedValueError("a value is nested too deeply")
    if kind is bool or value is None:
        return value
    if kind is str:
        plain = value.isascii() or is_well_formed(value)
        return value if plain else {"$str": _b64(value.encode("utf-8", "surrogatepass"))}
    if kind is int:  # hexadecimal: decimal takes quadratic time, and Python limits its length
        return value if -_EXACT < value < _EXACT else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is bytes:
        return {"$bytes": _b64(value)}
    if kind is list:
        return [encode(item, room - 1, allow_pickle=allow_pickle) for item in value]
    if kind in (tuple, set, frozenset):
        return {f"${kind.__name__}": [encode(item, room - 2, allow_pickle=allow_pickle) for item in value]}
    if kind is dict:
        return {
            "$dict": [[encode(item, room - 3, allow_pickle=allow_pickle) for item in pair] for pair in value.items()]
        }
    form = _encode_tensor_like(value)
    if form is None:
        form = encode_other(value, lambda inner: encode(inner, room - 3, allow_pickle=allow_pickle))
    if form is None and allow_pickle:
        return {"$pickle": _b64(pickle.dumps(value))}
    if form is None:
        raise UnsupportedValueError(_reason_to_refuse(value))
    return form


def _reason_to_refuse(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor can be saved inside of lists, tuples and dictionaries only: use one of them to hold it"
    kind = type(value)
    return (
        f"a value of type {kind.__module__}.{kind.__qualname__} has no type in the checkpoint format "
        "(allow_pickle=True would pickle it)"
    )


def _encode_tensor_like(value: Any) -> Any:
    """Returns the JSON for an array or a list of numbers, or for a tensor's shape, dtype or device; None for others."""
    kind = type(value)
    if kind is NumberList:
        return {"$numbers": [value.code, _b64(value.data)]}
    if kind is torch.Size:
        return {"$size": list(value)}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$device": str(value)}
    return _encode_numpy(value)


def is_numpy(value: Any) -> bool:
    """True if the value is a NumPy array or scalar. Does not import NumPy."""
    numpy = sys.modules.get("numpy")  # without the module imported, no value can be of its types
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _encode_numpy(value: Any) -> Any:
    if not is_numpy(value):
        return None
    import numpy  # noqa: PLC0415  imported already

    dtype = value.dtype
    if dtype.kind not in _NUMPY_KINDS or type(value) not in (numpy.ndarray, dtype.type):
        return None
    if isinstance(value, numpy.generic):
        return {"$scalar": [dtype.str, _b64(value.tobytes())]}
    return {"$array": [dtype.str, list(value.shape), _b64(value.tobytes())]}


def has_pickle(value: Any) -> bool:
    """True if decoding the value would run code."""
    if isinstance(value, list):
        return any(map(has_pickle, value))
    return isinstance(value, dict) and ("$pickle" in value or any(map(has_pickle, value.values())))


def is_plain(value: Any) -> bool:
    """True if any program can decode the value: it has no pickle, and needs no class."""
    return not has_pickle(value) and next(class_names_in(value), None) is None


def is_typed(value: Any) -> bool:
    """True if ``value`` looks like the typed form of a value. Also used outside of checkpoints."""
    return type(value) is dict and len(value) == 1 and next(iter(value)) in {*_DECODERS, *CLASS_TAGS, "$pickle"}


def decode(value: Any, *, allow_pickle: bool = False, classes: Mapping[str, type] | None = None) -> Any:
    """Returns the value that ``encode`` was given.

    ``classes`` maps names to the classes that values may be of, beyond Python's own. None makes each such value a
    ForeignValue. Raises FormatError for an unknown type, UsageError for a pickle that is not allowed.
    """

    def again(inner: Any) -> Any:
        return decode(inner, allow_pickle=allow_pickle, classes=classes)

    if isinstance(value, list):
        return [again(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise FormatError(f"not a typed value: {value!r:.80}")
    ((tag, body),) = value.items()
    if tag == "$pickle":
        if not allow_pickle:
            raise UsageError(
                "this checkpoint holds pickled values, and loading them runs code: restore(allow_pickle=True) allows it"
            )
        return pickle.loads(base64.b64decode(body))
    decoder = _DECODERS.get(tag)
    if decoder is None and tag not in CLASS_TAGS:
        raise FormatError(f"unknown type {tag!r} of a value")
    try:
        if decoder is not None:
            return decoder(body, again)
        if classes is None:
            return ForeignValue(value)
        return decode_of_class(tag, body, again, classes, may_import=allow_pickle)
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError, OverflowError, MemoryError) as error:
        if isinstance(error, (FormatError, UsageError)):
            raise
        raise FormatError(f"a value of type {tag!r} is not readable: {error}") from error


def _dtype(body: Any, _: Recurse) -> torch.dtype:
    found = vars(torch).get(body)  # getattr() would import modules that torch loads lazily
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{body} is not a dtype")
    return found


def _array(body: Any, _: Recurse) -> Any:
    import numpy  # noqa: PLC0415  torch works without NumPy, and so does Rekindle until a checkpoint has an array

    return numpy.frombuffer(base64.b64decode(body[2]), _numpy_dtype(body[0])).reshape(body[1]).copy()


def _numpy_dtype(name: Any) -> Any:
    import numpy  # noqa: PLC0415

    dtype = numpy.dtype(name)
    if type(name) is not str or dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"{name!r:.80} is not a dtype of plain elements")
    return dtype


def _scalar(body: Any, again: Recurse) -> Any:
    dtype = _numpy_dtype(body[0])
    if not dtype.itemsize:  # an empty string, which frombuffer() refuses
        return dtype.type()
    return _array([body[0], [1], body[1]], again)[0]


_DECODERS: dict[str, Callable[[Any, Recurse], Any]] = {
    "$int": lambda body, _: int(body, 16),
    "$str": lambda body, _: base64.b64decode(body).decode("utf-8", "surrogatepass"),
    "$float": lambda body, _: float(body),
    "$bytes": lambda body, _: base64.b64decode(body),
    "$tuple": lambda body, again: tuple(map(again, body)),
    "$set": lambda body, again: set(map(again, body)),
    "$frozenset": lambda body, again: frozenset(map(again, body)),
    "$dict": lambda body, again: {again(k): again(v) for k, v in body},
    "$size": lambda body, _: torch.Size(body),
    "$dtype": _dtype,
    "$device": lambda body, _: torch.device(body),
    "$numbers": lambda body, _: NumberList(body[0], base64.b64decode(body[1])).items(),
    "$array": _array,
    "$scalar": _scalar,
    **DECODERS,
}
