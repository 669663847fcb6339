"""A guarded job on the fake device, whose device can be held up at any point of its queue."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import rekindle
from rekindle.devices import events
from rekindle.faults.guard import Guard
from rekindle.format.receipt import Receipt, read_file
from rekindle.memory.fault import Fault
from rekindle.memory.job_dir import JobDir, memory_base
from tests.devices.fake import DEVICE, FakeBackend
from tests.devices.training import Training


class Job:
    """One rank. ``step`` queues a step; ``fault`` has another thread secure the state, as an agent's word would."""

    def __init__(
        self, device: FakeBackend, root: Path, memory: Path, training: Training | None = None, **options: Any
    ) -> None:
        self.device, self.dir = device, JobDir.of(root, memory_base(memory))
        self.training = training or Training(device)
        self.values = rekindle.Values(count=0)
        state = {**self.training.state, "values": self.values}
        options = {"snapshot_every": 10**9, "persist_every": 10**9, "strict": True, **options}
        self.ckpt = rekindle.Checkpointer(root, state, **options)
        self.ckpt.restore()
        self.done = 0
        self._over = False
        self._threads: list[threading.Thread] = []

    def train(self, steps: int, updates: int = 1) -> threading.Thread:
        """Queue steps in a thread of their own, which may have to wait for the device."""

        def work() -> None:
            self.device.enter(DEVICE)
            for _ in range(steps):
                if not self._over:
                    self.step(updates=updates)

        self._threads.append(threading.Thread(target=work, name="trainer", daemon=True))
        self._threads[-1].start()
        return self._threads[-1]

    @contextmanager
    def guarded(self, **options: Any) -> Iterator[Guard]:
        """Leaves without a word, as a rank does that another thread ends."""
        guard = self.ckpt.guard(watchdog=False, notices=(), **options)
        guard.__enter__()
        try:
            yield guard
            assert events._kept is not None or not self.device.faulty, "events are kept after a fault"
        finally:
            self._over, self.device.lost = True, ""
            self.device.unstick()
            guard._gate.release()
            for thread in self._threads:
                thread.join(60)
            self.device.settle()
            guard._undo.close()
            self.ckpt._let_go(None)

    def step(self, hold: threading.Event | None = None, updates: int = 1) -> threading.Event | None:
        """Queue the next step, of so many updates. With ``hold`` the device waits for it before the first of them."""
        for number in range(updates):
            self.training.forward()
            if hold is not None and not number:
                self.device.current_stream(DEVICE).queue(lambda: self.device.wait_on_device(hold))
            self.training.optimizer.step()
        self.end(updates)
        return hold

    def end(self, updates: int = 1) -> None:
        self.done += updates
        self.values.count = self.done
        self.ckpt.step(self.done)

    def fault(
        self, guard: Guard, cause: str = "signal", what: str = "rank 1 was killed by SIGKILL"
    ) -> threading.Thread:
        fault = Fault(cause, 0, guard._generation, self.done, what)
        self.device.faulty = True
        assert guard._take_up(fault)
        thread = threading.Thread(target=guard._act, args=(fault,), name="gasp", daemon=True)
        thread.start()
        return thread

    def in_memory(self) -> list[int]:
        """Steps of which memory has this rank's state."""
        return sorted(stamp.step for stamp, _ in self.dir.snapshots.shard_ids())

    def check(self, step: int) -> None:
        """Memory has ``step``: tensors of the device, counters of the host, values; all of that step and no other."""
        found = {stamp.step: path for stamp, path in self.dir.snapshots.shard_ids()}
        assert step in found, sorted(found)
        check_shard(found[step], self.training, step)


def check_shard(receipt: Path, training: Training, step: int) -> None:
    expected = {**training.expected(step), "step": float(step)}
    seen = set()
    for name, tensor in load_file(receipt.with_suffix(".safetensors")).items():
        kind = name if name in expected else name.rpartition(".")[2]
        if kind in expected:
            seen.add(kind)
            assert torch.equal(tensor, torch.full_like(tensor, expected[kind])), (name, step, tensor.unique())
    assert seen == set(expected)
    assert step in Receipt.decode(read_file(receipt), receipt).values
