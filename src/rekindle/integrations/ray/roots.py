"""Gives a run's checkpoints a root below the directory in which Ray Train keeps the run."""

from __future__ import annotations

import importlib
import logging

from rekindle.errors import UsageError
from rekindle.integrations.ray.surroundings import is_local, warn_of_cluster

__all__ = ["root", "root_below"]

log = logging.getLogger("rekindle")

_UNNAMED = "ray_train_run-"
"""Beginning of the names that Ray gives, by the date, to runs that have none."""
_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}
"""Begins the text of a root, by the type of pyarrow's file system."""


def root() -> str:
    """Returns the root for this run's checkpoints: ``rekindle`` in the directory that Ray Train keeps of the run.

    To be called in the train function, on any worker: ``RunConfig(storage_path=, name=)`` name the directory, which all
    nodes reach. Ray removes checkpoints that were reported to it, and nothing below this root.

    Raises UsageError where Ray keeps the run in local mode, or on a file system of a kind that Rekindle can't open.
    """
    warn_of_cluster()
    context = importlib.import_module("ray.train").get_context()
    if is_local(context):
        raise UsageError("Ray Train keeps no directory of a run in local mode: give Checkpointer a directory or a URL")
    if context.get_experiment_name().startswith(_UNNAMED) and context.get_world_rank() == 0:
        log.warning(
            "this run has no name: workers that Ray starts again go on, but a script that is started again begins "
            "anew. Give RunConfig(name=...)"
        )
    storage = context.get_storage()
    return root_below(storage.storage_filesystem.type_name, storage.experiment_fs_path)


def root_below(kind: str, path: str) -> str:
    """Returns the root below ``path`` on a file system of pyarrow's, of type ``kind``. Raises UsageError."""
    if kind not in _SCHEMES:
        raise UsageError(
            f"Ray keeps this run on a file system of type {kind!r}, which Rekindle can't open: give Checkpointer a "
            "directory that all nodes share, or a URL"
        )
    return f"{_SCHEMES[kind]}{path}/rekindle"
