"""Plugs checkpoints into Lightning: a ``CheckpointIO`` and a ``ModelCheckpoint``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from rekindle.errors import NotFoundError
from rekindle.files import load
from rekindle.provide.torch_nebula.catalog import Catalog
from rekindle.provide.torch_nebula.checkpoint import Checkpoint, settings_of
from rekindle.provide.torch_nebula.keeping import drop
from rekindle.provide.torch_nebula.settings import current_nebula, init

_package = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
"""The one of two names of one package that the program uses: their classes don't mix."""
callbacks: Any = importlib.import_module(f"{_package}.callbacks")
plugins: Any = importlib.import_module(f"{_package}.plugins.io")

__all__ = ["PARTITION", "NebulaCallback", "NebulaCheckpointIO"]

PARTITION = "checkpoint"
"""Name of the only partition of Lightning's checkpoints. The tag is the name of the file that Lightning asks for."""


class NebulaCheckpointIO(plugins.CheckpointIO):  # type: ignore[misc]
    """Saves what Lightning saves under the tag of its file's name, and loads it."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: dict[str, Any] | None = None) -> None:
        """Saves a checkpoint. Returns when it is in this node's memory.

        ``storage_options``: ``persist_path`` is another folder than that of ``init``; ``is_best`` lets the checkpoint
        go to storage at once.
        """
        options = storage_options or {}
        settings = settings_of(options.get("persist_path"))
        saving = Checkpoint(os.path.basename(path), 1, settings=settings)
        saving.save(PARTITION, checkpoint)
        if options.get("is_best"):
            Catalog(settings.root).let_newest_go()

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Loads a checkpoint by the name of its file, or else the file itself; onto the CPU, unless told otherwise."""
        onto = "cpu" if map_location is None else map_location
        root = current_nebula().root
        try:
            return load(f"{root}/{os.path.basename(path)}/{PARTITION}", onto, weights_only=bool(weights_only))
        except NotFoundError:
            return load(path, onto, weights_only=bool(weights_only))

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint from memory and from storage."""
        settings = current_nebula()
        catalog = Catalog(settings.root)
        found = catalog.found.get(os.path.basename(path))
        if found is not None and found.ours:
            drop(settings, catalog, found)

    def teardown(self) -> None:
        """Lets the newest checkpoint go to storage."""
        Catalog(current_nebula().root).let_newest_go()


class NebulaCallback(callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Lightning's ``ModelCheckpoint`` that calls ``init`` with ``config_params``."""

    def __init__(self, *args: Any, config_params: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        init(**(config_params or {}))
