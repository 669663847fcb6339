"""Packs nested values and tensors into one text and one tensor: their structure may then change at any step."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import torch

from rekindle.state.codec import decode, encode

__all__ = ["Packer"]

_TENSOR = "rekindle tensor"
"""Key of what stands in the text for a tensor."""
_SMALLEST = 4096
"""Bytes of the tensor at first. It is made anew, twice as large, only when it is too small: a snapshot is planned anew
then, which takes as long as a small step."""


class Packer:
    """Packs into a tensor on ``device``, to which the host does not wait for anything."""

    def __init__(self, device: torch.device, *, allow_pickle: bool) -> None:
        self._device, self._allow_pickle = device, allow_pickle
        self._bytes = torch.zeros(_SMALLEST, dtype=torch.uint8, device=device)

    def pack(self, tree: Any) -> tuple[str, torch.Tensor]:
        """Returns text and tensor, which the next call overwrites. Raises UnsupportedValueError for other values."""
        tensors: list[torch.Tensor] = []
        form = _take_out(tree, tensors)
        text = json.dumps(encode(form, allow_pickle=self._allow_pickle), separators=(",", ":"))
        if tensors:
            flat = torch.cat([_bytes_of(tensor, self._device) for tensor in tensors])
            if len(flat) > len(self._bytes):
                self._bytes = torch.zeros(1 << (len(flat) - 1).bit_length(), dtype=torch.uint8, device=self._device)
            self._bytes[: len(flat)].copy_(flat)
        return text, self._bytes

    def unpack(self, text: str, packed: torch.Tensor) -> Any:
        """Returns what ``pack`` was given. Tensors are where they were, on the host or on the device."""
        form = decode(json.loads(text), allow_pickle=self._allow_pickle)
        return _Unpacking(packed, self._device).put_back(form)


class _Unpacking:
    """Cuts tensors from the packed one, in their order."""

    def __init__(self, packed: torch.Tensor, device: torch.device) -> None:
        self._packed, self._device, self._at = packed, device, 0

    def put_back(self, form: Any) -> Any:
        if isinstance(form, dict) and _TENSOR in form:
            return self._cut(*form[_TENSOR])
        if type(form) is dict:
            return {key: self.put_back(item) for key, item in form.items()}
        if type(form) in (list, tuple):
            return type(form)(self.put_back(item) for item in form)
        return form

    def _cut(self, dtype: torch.dtype, shape: tuple[int, ...], on_host: bool) -> torch.Tensor:
        first = self._at
        self._at += torch.Size(shape).numel() * dtype.itemsize
        # a copy, whose address suits any type of number
        found = self._packed[first : self._at].clone().view(dtype).reshape(shape)
        return found.to("cpu" if on_host else self._device)


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {_TENSOR: (value.dtype, tuple(value.shape), value.device.type == "cpu")}
    if type(value) in (dict, OrderedDict):
        return {key: _take_out(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take_out(item, tensors) for item in value)
    return value


def _bytes_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device, non_blocking=True).contiguous().reshape(-1).view(torch.uint8)
