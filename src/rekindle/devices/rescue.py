"""Finds streams by which devices can still be read after a fault. All that this takes is made before.

A device may then be stuck in work that never ends, and a thread that stands in a call on it may hold a lock of the
driver's. Whatever needs that lock, or an idle device, may never return: new streams and page-locked memory, the end of
them and of events, the first use of a kernel.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import torch

from rekindle.devices.backend import QueueEvent, Stream
from rekindle.devices.bounce import prepare_bounce
from rekindle.devices.events import Event, keep_events
from rekindle.devices.table import device_of, require_backend
from rekindle.errors import RekindleError

__all__ = ["RescueStreams"]

log = logging.getLogger("rekindle")

_STREAMS = 8
"""Streams of each device that are tried. A device has few hardware queues, 8 with CUDA by default: a stream may share
one with work that is stuck, and then wait for that."""
_NBYTES = 4
"""Bytes that are copied on each."""
_ANSWER = 1.0
"""Seconds that a device gets to copy them. Unless it is stuck, it takes microseconds beside a running kernel. The rest
is for a host whose processors are all busy: of a device taken for stuck, what it does late doesn't count."""
_SECOND_ANSWER = 2.0
"""The same for a device that did not answer at first, and has been freed since."""
_REHEARSAL = 60.0
"""Seconds that a device gets for the rehearsal, before training: it may still be busy."""
_POLL = 5e-4


class RescueStreams:
    """Holds streams of the given devices, with a thread for each device. Costs nothing if there are none."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._probes = {device: _Probe(device) for device in devices}

    @property
    def devices(self) -> list[torch.device]:
        """Devices that can be asked."""
        return list(self._probes)

    def rehearse(self, tensors: Sequence[torch.Tensor]) -> None:
        """Does once what comes after a fault, so that nothing is done for the first time then.

        ``tensors`` are those that are to be read. Logs a warning when a device fails or doesn't answer.
        """
        for device, probe in self._probes.items():
            samples = {tensor.dtype: tensor for tensor in tensors if device_of(tensor) == device and _is_sample(tensor)}
            answer = probe.do(partial(probe.rehearse, list(samples.values())))
            if not _says_yes(answer, _REHEARSAL):
                error = answer.exception() if answer.done() else None
                why = f": {error}" if error is not None else ""
                log.warning(
                    "device %s could not be read in a rehearsal%s. If a rank fails, the state on it may not be "
                    "secured, and training goes back to the newest snapshot",
                    *(device, why),
                )

    def probe(self, timeout: float = _ANSWER) -> bool:
        """Returns True if all devices can be read, after a fault. Asks those that have not answered before."""
        if self._probes:
            keep_events()
        until = time.monotonic() + timeout
        asked = [self._probes[device] for device in self.silent]
        wait([probe.do(partial(probe.choose, until)) for probe in asked], max(0.0, until - time.monotonic()) + _POLL)
        return not self.silent

    @property
    def silent(self) -> list[torch.device]:
        """Devices that have not answered, or have not been asked."""
        return [device for device, probe in self._probes.items() if probe.chosen is None]

    def streams(self) -> dict[torch.device, Stream]:
        """Returns a stream of each device that has answered. Raises RekindleError if one doesn't."""
        if not self.probe(_SECOND_ANSWER):
            raise RekindleError(f"device {self.silent[0]} does not answer, so the state on it can't be read")
        return {device: probe.chosen for device, probe in self._probes.items() if probe.chosen is not None}

    def close(self) -> None:
        """Ends the threads. For the end of guarded training without a fault."""
        for probe in self._probes.values():
            probe.end()


class _Line(NamedTuple):
    """One way to a device."""

    stream: Stream
    place: torch.Tensor
    """Page-locked memory for what is copied."""
    event: QueueEvent


class _Probe:
    """Asks one device, in a thread that has entered it before."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._backend = require_backend(device)
        self._lines: list[_Line] = []
        self._source = torch.empty(0, device="cpu")
        """Memory of the device that is copied from."""
        self._strided: list[torch.Tensor] = []
        """Places of the rehearsal's copies: to free page-locked memory may wait for a device that is still copying."""
        self.chosen: Stream | None = None
        """First stream on which the device has answered after a fault."""
        self._todo: SimpleQueue[tuple[Future[bool], Callable[[], bool]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="rekindle-probe", daemon=True).start()

    def do(self, work: Callable[[], bool]) -> Future[bool]:
        """Has the thread do it after all that it was given before."""
        answer: Future[bool] = Future()
        self._todo.put((answer, work))
        return answer

    def end(self) -> None:
        """Ends the thread once it has done everything."""
        self._todo.put(None)

    def _run(self) -> None:
        while (task := self._todo.get()) is not None:
            answer, work = task
            try:
                self._backend.enter(self.device)
                answer.set_result(work())
            except Exception as error:
                answer.set_exception(error)

    def rehearse(self, samples: Sequence[torch.Tensor]) -> bool:
        """Makes the streams and uses each; copies what is not contiguous, of each type. False if that doesn't end."""
        backend = self._backend
        self._source = backend.allocate(self.device, _NBYTES)
        places = backend.pinned(_NBYTES * _STREAMS)
        for at in range(0, len(places), _NBYTES):
            stream = backend.new_stream(self.device)
            self._lines.append(_Line(stream, places[at : at + _NBYTES], stream.record_event()))
        prepare_bounce(self.device)
        self._strided = [self._copy_strided(sample) for sample in samples]
        self._ask()
        until = time.monotonic() + _REHEARSAL
        return all(Event(self.device, line.event).wait(until - time.monotonic()) for line in self._lines)

    def _copy_strided(self, sample: torch.Tensor) -> torch.Tensor:
        """Copies two elements that are not neighbours: a kernel puts them in order, and is loaded for it."""
        part = sample.detach().as_strided((2,), (2,), sample.storage_offset())
        place = self._backend.pinned(part.nbytes).view(part.dtype)
        with self._backend.on(self._lines[0].stream):
            self._backend.copy([place], [part])
        return place

    def _ask(self) -> None:
        """Queues a copy on each stream, and its event."""
        for line in self._lines:
            with self._backend.on(line.stream):
                self._backend.copy([line.place], [self._source])
            line.stream.record_event(line.event)

    def choose(self, until: float) -> bool:
        """Chooses the first stream that answers in time. Returns False if none does."""
        if time.monotonic() > until:  # nobody waits for the answer any more: the thread has stood in a call
            return False
        self._ask()
        while self.chosen is None:
            self.chosen = next((line.stream for line in self._lines if line.event.query()), None)
            if time.monotonic() > until:
                break
            time.sleep(_POLL)
        return self.chosen is not None


def _says_yes(answer: Future[bool], timeout: float) -> bool:
    """Returns False also if there is no answer in time, as the thread stands in a call, or if it has failed."""
    # Not by result(timeout): before Python 3.11 what that raises is no TimeoutError.
    return bool(wait([answer], timeout).done) and answer.exception() is None and answer.result()


def _is_sample(tensor: torch.Tensor) -> bool:
    """Returns True if there is memory for three elements from the tensor's first one on."""
    there = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return there > 2 and not (tensor.is_conj() or tensor.is_neg())
