"""Saves Lightning's checkpoints through the memory store: a plugin for users of ``ModelCheckpoint``.

Lightning itself is imported by its user: its class of plugins exists under two names, of which a program uses one.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from contextlib import suppress
from typing import Any

from rekindle.common.timeouts import check_timeout, in_background
from rekindle.errors import NotFoundError, UnsupportedValueError, UsageError
from rekindle.faults.imports import note_save
from rekindle.files import flush, load, save
from rekindle.files.forgetting import forget, wait_for_writers
from rekindle.integrations.versions import warn_if_untested

__all__ = ["RekindleCheckpointIO"]

_PACKAGES = ("lightning.fabric", "lightning_fabric")
"""The two names of one package. Their classes don't mix."""
_TESTED = ("2.6", "2.6")
"""First and last series of lightning that the tests have run with."""

Path = str | os.PathLike[str]


class RekindleCheckpointIO:
    """Plugin of a ``Trainer``: ``Trainer(plugins=[RekindleCheckpointIO()])``.

    A checkpoint is in this node's memory when the save returns. The agent carries it to its path, where it is an
    ordinary file of Lightning. ``trainer.fit`` returns when it is there.
    """

    def __init__(self, *, timeout: float = 600.0) -> None:
        """``timeout``: seconds for which the end of ``trainer.fit`` waits for storage, before it raises."""
        self._timeout = check_timeout(timeout)
        self._saved: set[str] = set()
        self._io = _lightning_io(type(self))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None) -> None:
        """Saves a checkpoint. Lightning calls it on rank 0. Raises UnsupportedValueError for ``storage_options``."""
        if storage_options is not None:
            raise UnsupportedValueError("storage_options: RekindleCheckpointIO has none: leave them out")
        save(checkpoint, path, placeholder=True)
        self._saved.add(os.fspath(path))
        note_save()

    def load_checkpoint(self, path: Path, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        """Loads a checkpoint, from memory if it is there. Unless ``weights_only`` is False, no code runs."""
        return load(path, map_location, weights_only is not False)

    def remove_checkpoint(self, path: Path) -> None:
        """Removes a checkpoint from memory and from its path. Does not wait for an upload that is under way."""
        self._saved.discard(os.fspath(path))
        under_way = forget(path)
        self._io.remove_checkpoint(path)
        if under_way:  # its file comes to be after all
            in_background(lambda: self._remove_late(path), "rekindle-lightning-remove")

    def _remove_late(self, path: Path) -> None:
        with wait_for_writers(path) as newer:
            if not newer:
                self._io.remove_checkpoint(path)

    def teardown(self) -> None:
        """Waits until all checkpoints are on storage. After an error it doesn't: a restart may be waiting.

        Raises NotDurableError if one is not in time. Memory keeps it, and its upload goes on.
        """
        saved, self._saved = self._saved, set()
        if sys.exc_info()[0] is not None:
            return
        until = time.monotonic() + self._timeout
        for path in sorted(saved):
            with suppress(NotFoundError):  # removed since, by somebody else
                flush(path, timeout=max(0.0, until - time.monotonic()))


def _lightning_io(plugin: type) -> Any:
    """Makes Lightning take a class for one of its ``CheckpointIO``, and returns the plugin that it uses by itself.

    Raises UsageError where there is no Lightning.
    """
    names = [name for name in _PACKAGES if name in sys.modules] or list(_PACKAGES)
    found: Any = None
    for name in names:
        with suppress(ModuleNotFoundError):
            io = importlib.import_module(f"{name}.plugins.io")
            io.CheckpointIO.register(plugin)
            if found is None:
                found = io.TorchCheckpointIO()
                warn_if_untested("lightning" if name == "lightning.fabric" else "lightning-fabric", *_TESTED)
    if found is None:
        raise UsageError("RekindleCheckpointIO is a plugin of Lightning, which is not installed: pip install lightning")
    return found
