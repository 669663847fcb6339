"""Puts the memory store under Megatron-core's distributed checkpoints: ``install``.

Megatron's own names, planners and resharding stay. Only the storage is another one, where its ``torch_dist`` strategies
call torch.distributed.checkpoint.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save

from rekindle.errors import UsageError
from rekindle.format.names import canonical_root
from rekindle.integrations.dcp import RekindleReader, RekindleWriter
from rekindle.integrations.versions import warn_if_untested

__all__ = ["install"]

_TESTED = ("0.16", "0.16")
"""First and last series of megatron-core that the tests have run with."""

_torch: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
_async: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.async_utils")
_Save: Any = _torch.TorchDistSaveShardedStrategy
_STEP = re.compile(r"\D*(\d{1,10})")
"""Name of a checkpoint's directory, which ends in the iteration: ``iter_0001000``."""

_writers: dict[str, RekindleWriter] = {}
"""Writers by root. Global to the process, as what they stand in for is."""
_where: dict[str, str | None] = {}
"""The root that ``install`` was given. Empty before its first call."""


def install(root: str | os.PathLike[str] | None = None) -> None:
    """Lets Megatron-core save its ``torch_dist`` checkpoints into memory, and load them from there.

    To be called on all ranks, before ``pretrain`` or the first ``dist_checkpointing.save``. Saving returns when the
    checkpoint is in memory, synchronous or asynchronous. Agents carry it to storage.

    Args:
        root: directory or URL that Rekindle keeps the tensors in; without it, the directory that has those of
            Megatron's checkpoints, such as ``--save``.
    """
    warn_if_untested("megatron-core", *_TESTED)
    first = not _where
    _where["root"] = None if root is None else str(canonical_root(root))
    if first:
        own = _torch._get_filesystem_reader
        _torch._get_filesystem_reader = lambda directory, cache_metadata=False: (
            own(directory, cache_metadata) if (Path(directory) / ".metadata").exists() else _Reader(directory)
        )
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.") and vars(module).get("TorchDistSaveShardedStrategy") is _Save:
                setattr(module, "TorchDistSaveShardedStrategy", RekindleSaveStrategy)  # noqa: B010  untyped modules


def _place(directory: str | os.PathLike[str]) -> tuple[str, int]:
    """Returns root and step of the checkpoint that Megatron keeps in a directory."""
    path = Path(os.path.abspath(directory))
    match = _STEP.fullmatch(path.name)
    if match is None:
        raise UsageError(
            f"{path} names no iteration: Rekindle takes Megatron's checkpoints under names such as iter_0001000"
        )
    return _where["root"] or str(path.parent), int(match[1])


class RekindleSaveStrategy(_Save):  # type: ignore[misc]  # Megatron's classes are unknown here
    """Saves the tensors and objects of a sharded state dict into memory."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        """Saves into memory. Returns a request in which nothing is left to do but what Megatron adds to its end."""
        root, step = _place(checkpoint_dir)
        by_key, _, _ = _torch._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        if root not in _writers:
            _writers[root] = RekindleWriter(root)
        planner = _torch.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
        )
        state = _torch.mcore_to_pyt_state_dict(by_key, False)
        save(state, checkpoint_id=str(step), storage_writer=_writers[root], planner=planner)
        return _async.AsyncRequest(None, (), [])


class _Reader(RekindleReader):
    """Reads the checkpoint of one directory of Megatron's."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        root, self._iteration = _place(directory)
        super().__init__(root)
        self.reset()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Goes back to the directory's step where Megatron names none."""
        super().reset(str(self._iteration) if checkpoint_id is None else checkpoint_id)
