"""Saves a checkpoint beside the training, and writes its tracker once it is on storage: ``CheckpointHelper``."""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rekindle.files.contents import of_bytes
from rekindle.files.saving import canonical_target_within, write_straight
from rekindle.provide.mindio_acp.background import background
from rekindle.provide.mindio_acp.checking import LONGEST_WATCH, register_checker
from rekindle.provide.mindio_acp.loading import load
from rekindle.provide.mindio_acp.paths import LONGEST
from rekindle.provide.mindio_acp.saving import save_at_once

__all__ = ["CheckpointHelper"]

log = logging.getLogger("rekindle")


class CheckpointHelper:
    """Saves in a thread, while the next step computes: ``wait_d2h_finished`` comes before each optimizer update.

    One per process: a second call returns the first one. Works on any device, and without one.
    """

    _made: CheckpointHelper | None = None
    _making = threading.Lock()

    def __new__(cls, rank: int) -> CheckpointHelper:
        with cls._making:
            if cls._made is None:
                cls._made = super().__new__(cls)
                cls._made._begin()
            return cls._made

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def _begin(self) -> None:
        self._stream: Any = None
        self._tracked: dict[str, int] = {}
        """Newest iteration that was written into each tracker file."""
        self._tracking = threading.Lock()

    def save_model_checkpoint(self, checkpoint_name: str | list[str], model: dict[str, Any]) -> None:
        """Saves ``model`` at one path, or at several. It must not change before ``wait_d2h_finished`` has returned."""
        paths = _checked(checkpoint_name)
        background.submit(lambda copied: save_at_once(model, paths))

    def save_optimizer_checkpoint(
        self, checkpoint_name: str | list[str], get_parameter_state_func: Callable[..., Any]
    ) -> None:
        """Saves what a function returns, which may gather it from other ranks; nothing if that is empty.

        A function with a parameter ``notify_callback`` is given a function to call once it has its copy. Raises
        ValueError for other parameters.
        """
        paths = _checked(checkpoint_name)
        parameters = list(inspect.signature(get_parameter_state_func).parameters)
        if parameters not in ([], ["notify_callback"]):
            raise ValueError(f"get_parameter_state_func takes {parameters}: must take nothing, or notify_callback")

        def gather_and_save(copied: Callable[[], None]) -> None:
            state = get_parameter_state_func(notify_callback=copied) if parameters else get_parameter_state_func()
            copied()
            if state:
                save_at_once(state, paths)

        background.submit(gather_and_save)

    def wait_d2h_finished(self) -> None:
        """Returns when the state may change: all saves have their copy, or have failed. Comes before an update."""
        background.wait_until_copied()

    def async_save_checkpoint(self, thread_func: Callable[[Any], object], kwargs: Any) -> None:
        """Calls ``thread_func(kwargs)`` in the thread. It has its copy at ``async_checkpoint_count``, or its end."""
        background.submit(lambda copied: thread_func(kwargs))

    def async_checkpoint_count(self) -> None:
        """Tells that the ``async_save_checkpoint`` that is being done has its copy."""
        background.copied()

    def get_checkpoint_copy_stream(self) -> Any:
        """Returns a stream of the current device beside those that train; None where no device has streams."""
        from rekindle.devices.table import current_devices, require_backend  # noqa: PLC0415  brings torch

        if self._stream is None and (devices := current_devices()):
            self._stream = require_backend(devices[0]).new_stream(devices[0])
        return self._stream

    def load_model_checkpoint(self, checkpoint_name: str, load_rank: int, process_group: Any = None) -> Any:
        """Loads a checkpoint onto the host. Of a process group, rank ``load_rank`` reads it and sends it to the others.

        Raises RuntimeError on all of them where it can't be loaded.
        """
        (path,) = _checked([checkpoint_name])
        if load_rank < 0:
            raise ValueError(f"load_rank is {load_rank}: must be 0 or more")
        if not process_group:
            return load(path, map_location="cpu")
        from torch import distributed  # noqa: PLC0415  only where there is a group

        found: list[Any] = [None, None]
        if self.rank == load_rank:
            try:
                found[0] = load(path, map_location="cpu")
            except Exception as error:  # the others wait for a word
                found[1] = str(error)
        distributed.broadcast_object_list(found, src=load_rank, group=process_group)
        if found[1] is not None:
            raise RuntimeError(f"rank {load_rank} could not load it: {found[1]}")
        return found[0]

    def async_write_tracker_file(
        self,
        iteration: int,
        iteration_dir: str,
        total_file_count: int,
        tracker_filename: str,
        callback: Callable[[int, int], object] | None = None,
    ) -> None:
        """Writes ``iteration`` into the tracker file once so many files of its directory are on storage, in a thread.

        ``callback(iteration, result)`` comes after that, with 0, or with what ``register_checker`` says when they
        aren't; the tracker stays as it was then. An iteration older than one that this process wrote is not written.
        Raises ValueError for arguments that make no sense.
        """
        directory, tracker = _checked([iteration_dir, tracker_filename])

        def done(result: int, step: int) -> None:
            if result == 0:
                self._track(tracker, step)
            else:
                why = f"iteration {step} is not on storage: {os.strerror(-result)}"
                log.error("%s: stays as it was: %s", tracker, why)
            if callback is not None:
                callback(step, result)

        if register_checker(done, {directory: total_file_count}, iteration, LONGEST_WATCH) is None:
            raise ValueError(f"{directory}: can't be watched for {total_file_count} files: see the log")

    def _track(self, tracker: str, iteration: int) -> None:
        target = canonical_target_within(tracker)
        with self._tracking:
            if iteration > self._tracked.get(target, -1):
                write_straight(target, of_bytes(str(iteration).encode()))
                self._tracked[target] = iteration


def _checked(given: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    paths = [os.fspath(path) for path in ([given] if isinstance(given, (str, os.PathLike)) else given)]
    for path in paths:
        if len(path) > LONGEST:
            raise ValueError(f"{path[:50]}...: has {len(path)} characters: at most {LONGEST}")
    return paths
