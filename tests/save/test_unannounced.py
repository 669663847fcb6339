"""Updates on the host that nobody announces: what they tear is never offered, and what is offered is right."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rekindle
from rekindle.errors import RekindleError
from rekindle.format.receipt import checksum
from rekindle.memory.job_dir import JobDir, memory_base
from rekindle.save.plan import Unit
from rekindle.save.witness import Witness
from tests.save.overlapped import snapshot_of, wait_for_memory

_SAID = "without an announcement"


class Run:
    """Eight parameters of 1 MiB whose every element is the number of updates, and an optimizer that may do nothing."""

    def __init__(self, root: Path, memory: Path, **options: Any) -> None:
        self.model = torch.nn.ParameterList(torch.zeros(1 << 18) for _ in range(8))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, maximize=True)
        state = {"model": self.model, "optimizer": self.optimizer}
        self.ckpt = rekindle.Checkpointer(
            root, state, persist_every=10**9, **{"snapshot_every": 1, "overlap": True, **options}
        )
        self.job = JobDir.of(root, memory_base(memory))
        self.ckpt.restore()
        wait_for_memory(self.ckpt)
        self.done = 0

    def write(self) -> None:
        """Updates the parameters past hooks and version counters."""
        for parameter in self.model:
            parameter.data.add_(1)

    def step(self) -> None:
        self.done += 1
        self.ckpt.step(self.done)

    def copy_late(self) -> threading.Event:
        """Has the copy of the next snapshot begin only once the event is set, or its update comes."""
        go = threading.Event()
        self.ckpt._saver.live.writer._behind.submit(go.wait)
        return go

    def right(self, step: int) -> bool:
        """True if memory has the step, all of it."""
        receipt = snapshot_of(self.job, step)
        if not receipt.exists():
            return False
        for name, tensor in load_file(receipt.with_suffix(".safetensors")).items():
            if name.startswith("model."):
                assert torch.equal(tensor, torch.full_like(tensor, step)), (name, step, tensor.unique())
        return True


def test_a_loop_that_never_announces_is_copied_inside_of_step_and_that_is_said_once(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(root, memory)
    for n in range(1, 6):
        run.write()
        run.step()
        assert run.ckpt.metrics.committed_in_step and run.right(n)
        assert caplog.text.count(_SAID) == (n > 1)
    assert "model.0" in caplog.text and run.ckpt.metrics.failed == 0
    run.ckpt.close()


def test_updates_before_their_hook_tear_one_snapshot_which_is_not_offered(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(root, memory)
    run.write()
    run.optimizer.step()
    go = run.copy_late()
    run.step()
    run.write()
    run.optimizer.step()  # there are no gradients: it changes nothing, and announces what has been
    go.set()
    run.ckpt._saver.conclude()
    assert not run.right(1) and run.ckpt.metrics.failed == 1 and "changed between ckpt.step(1)" in caplog.text
    for n in range(2, 6):
        run.step()
        run.write()
        run.optimizer.step()
        assert run.right(n)
    assert caplog.text.count(_SAID) == 1 and run.ckpt.metrics.failed == 1
    run.ckpt.close()


def test_a_step_without_an_update_is_copied_inside_of_step_and_nothing_is_said(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a gradient scaler skips one. The next one that is announced is copied beside training."""
    run = Run(root, memory)
    for parameter in run.model:
        parameter.grad = torch.ones_like(parameter)
    for n, announced in enumerate([True, True, False, False, True, True], 1):
        if announced:
            run.optimizer.step()
        run.step()
        assert run.ckpt.metrics.committed_in_step != announced, n
    assert _SAID not in caplog.text and run.ckpt.metrics.failed == 0
    run.ckpt.close()


def test_a_save_of_a_step_that_was_told_counts_as_announced_as_that_one(root: Path, memory: Path) -> None:
    run = Run(root, memory, snapshot_every=10)
    run.optimizer.step()
    run.step()
    run.ckpt.save(1)
    assert not run.ckpt.metrics.committed_in_step
    run.ckpt.close()


def test_what_was_announced_before_a_restore_counts_for_nothing(root: Path, memory: Path) -> None:
    run = Run(root, memory)
    run.optimizer.step()
    run.ckpt.restore()
    run.step()
    assert run.ckpt.metrics.committed_in_step
    run.ckpt.close()


# -- the live state -------------------------------------------------------------------------------------------------


def half_written(run: Run) -> None:
    for parameter in list(run.model)[:4]:
        parameter.data.add_(1)


def counted(run: Run) -> None:
    with torch.no_grad():
        run.model[3].add_(1)


@pytest.mark.parametrize("write", [half_written, counted, None])
def test_the_live_state_is_secured_only_as_it_was_at_the_step(
    root: Path, memory: Path, write: Callable[[Run], None] | None
) -> None:
    """Nothing is announced. What torch counts, and what a look shows, keeps half an update from being secured."""
    run = Run(root, memory, snapshot_every=10**6)
    with run.ckpt.guard(watchdog=False, notices=()):
        run.write()
        run.step()
        stamp = run.ckpt._session.shard_id(1, persist=False)
        if write is None:
            run.ckpt._saver.gasp(stamp, whole=True)
        else:
            write(run)
            with pytest.raises(RekindleError, match=r"model\.[03] has been changed since the end of step 1"):
                run.ckpt._saver.gasp(stamp, whole=True)
        assert run.right(1) == (write is None)
    run.ckpt.close()


# -- compiled steps -------------------------------------------------------------------------------------------------


class Simple(torch.optim.Optimizer):
    """Torch's compiler takes its step() whole; those of torch's own optimizers have breaks."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=group["lr"])


def compiled_run(root: Path) -> tuple[rekindle.Checkpointer, Simple]:
    model = torch.nn.Linear(64, 64)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = Simple(model.parameters(), {"lr": 1.0})
    ckpt = rekindle.Checkpointer(
        root, {"model": model, "optimizer": optimizer}, snapshot_every=1, persist_every=10**9, overlap=True
    )
    ckpt.restore()
    return ckpt, optimizer


def test_a_step_that_is_compiled_whole_is_announced_by_updating(root: Path, memory: Path) -> None:
    ckpt, optimizer = compiled_run(root)
    step = torch.compile(lambda: optimizer.step(), fullgraph=True, backend="eager")
    weight = optimizer.param_groups[0]["params"][0]
    for n in range(1, 4):
        before = weight.detach().clone()
        with ckpt.updating():
            step()
        assert torch.allclose(weight, before + 1)
        ckpt.step(n)
    with pytest.raises(torch._dynamo.exc.Unsupported):  # outside of it the update would be unannounced
        step()
    assert ckpt.metrics.failed == 0
    ckpt.close()


def test_a_compiled_step_with_breaks_goes_on_calling_the_hook(root: Path, memory: Path) -> None:
    ckpt, optimizer = compiled_run(root)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for n, wrap in enumerate([nullcontext, ckpt.updating, nullcontext, nullcontext], 1):
        wrapped: AbstractContextManager[None] = wrap()
        seen = ckpt._fence.steps
        with wrapped:
            step()
        assert ckpt._fence.steps > seen
        ckpt.step(n)
    ckpt.close()


# -- looks ----------------------------------------------------------------------------------------------------------


def unit_of(tensor: torch.Tensor, offset: int = 0, nbytes: int | None = None) -> Unit:
    nbytes = tensor.nbytes - offset if nbytes is None else nbytes
    return Unit(tensor, tensor.data_ptr() + offset, 0, nbytes, 0, tensor, offset, tensor.is_contiguous())


@pytest.mark.parametrize("whole", [False, True])
def test_a_look_finds_what_was_written_to(whole: bool) -> None:
    """More tensors than the kernel takes in one call, of all kinds."""
    tensors = [torch.zeros(n % 9 + 1, dtype=torch.float64) for n in range(2500)]
    tensors += [torch.zeros(1 << 16), torch.zeros(3, dtype=torch.bool), torch.zeros(64, 64).t()]
    units = [unit_of(tensor) for tensor in tensors]
    witness = Witness(units)
    before = witness.look(0, whole=whole)
    for number in (0, 1023, 1024, 2499, 2501):
        tensors[number].fill_(1)
    tensors[2500][-1] = 1
    tensors[2502][0, 0] = 1
    found = witness.look(1, whole=whole).differing(before)
    numbers = {id(unit): number for number, unit in enumerate(units)}
    assert [numbers[id(unit)] for unit in found] == [0, 1023, 1024, 2499, 2500, 2501, 2502]
    assert not witness.look(2, whole=whole).differing(witness.look(1, whole=whole))


@pytest.mark.parametrize("exact", [False, True])
def test_a_copy_that_is_not_what_was_seen_is_torn(exact: bool) -> None:
    """Of all kinds: small, in several places, transposed, conjugated, larger than what has one checksum."""
    tensors = [torch.full((n % 9 + 1,), 3.0, dtype=torch.float64) for n in range(1100)]
    tensors += [
        torch.ones(1 << 16),
        torch.ones(64, 64).t(),
        torch.full((8,), 2 + 1j).conj(),
        torch.ones(2100, 2100).t(),
    ]
    at, units = 0, []
    for number, tensor in enumerate(tensors):
        units.append(Unit(tensor, tensor.data_ptr(), at, tensor.nbytes, number, tensor, 0, tensor.is_contiguous()))
        at += tensor.nbytes + 64
    shard = torch.zeros(at, dtype=torch.uint8)
    for unit in units:
        unit.view(shard.numpy(), 0).copy_(unit.source.resolve_conj())
    witness = Witness(units)
    look = witness.look(0, whole=exact)

    def torn() -> list[int]:
        data = [memoryview(shard.numpy())[unit.start : unit.start + unit.nbytes] for unit in units]
        found = witness.torn(look, shard.data_ptr(), [checksum(part) for part in data], exact=exact)
        return sorted(unit.block for unit in found)

    assert torn() == []
    for number, place in ((0, 0), (1023, 2), (1024, 4), (1099, 0), (1100, 1 << 15), (1101, 0), (1103, 0)):
        units[number].view(shard.numpy(), 0).view(-1)[place] = 7
    assert torn() == [0, 1023, 1024, 1099, 1100, 1101, 1103]
    units[2].view(shard.numpy(), 0)[2] = 7  # of 24 bytes, of which a look takes 16
    assert torn() == [0, *([2] if exact else []), 1023, 1024, 1099, 1100, 1101, 1103]


def test_a_look_at_memory_that_has_gone_is_refused() -> None:
    buffer = mmap.mmap(-1, 1 << 16)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    witness = Witness([unit_of(torch.zeros(8)), unit_of(tensor)])
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(address, 1 << 16, 0) == 0
    try:
        with pytest.raises(RekindleError, match="freed or resized"):
            witness.look(0, whole=False)
    finally:
        libc.mprotect(address, 1 << 16, mmap.PROT_READ | mmap.PROT_WRITE)


def test_a_witness_that_is_forgotten_leaves_no_file_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    witness = Witness([unit_of(torch.zeros(8))])
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del witness
    assert len(os.listdir("/proc/self/fd")) == before
