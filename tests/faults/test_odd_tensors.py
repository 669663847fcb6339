"""Tensors of unusual kinds in a guarded state: what a fault, or a save, makes of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

import rekindle
from tests.fork_server import context

_Work = Callable[[Path, Path], None]


def _process(work: _Work, root: Path, memory: Path, log: Path) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    try:
        work(root, memory)
    except Exception as error:
        logging.exception("the process failed")
        os._exit(3 if str(error) == "a fault" else 1)
    os._exit(0)


def play(work: _Work, root: Path, memory: Path) -> tuple[int | None, str]:
    """Exit code of a process that does ``work``, 3 after "a fault", and what it logged."""
    log = root.with_suffix(".log")
    process = context.Process(target=_process, args=(work, root, memory, log))
    process.start()
    process.join(120)
    if process.is_alive():
        process.kill()
        raise AssertionError(log.read_text())
    return process.exitcode, log.read_text()


# -- several views of one memory ------------------------------------------------------------------------------------


def _views() -> rekindle.Values:
    base = torch.zeros(6, 4, 2)
    return rekindle.Values(
        base=base, turned=base.permute(2, 0, 1), flat=base.view(-1), wide=base.view(3, 16), mirrored=base.view(24, 2).T
    )


def _fail_between_snapshots(root: Path, memory: Path) -> None:
    values = _views()
    layer = torch.nn.Linear(4, 6)
    layer.requires_grad_(False)
    layer.turned = torch.nn.Parameter(layer.weight.detach().t(), requires_grad=False)
    state = {"values": values, "layer": layer}
    ckpt = rekindle.Checkpointer(root, state, memory=memory, snapshot_every=10**9, rng=False)
    ckpt.restore()
    with ckpt.guard():
        for step in range(1, 4):
            values.base.copy_(torch.arange(48).view(6, 4, 2) + step)
            layer.weight.copy_(torch.arange(24).view(6, 4) - step)
            ckpt.step(step)
        raise RuntimeError("a fault")


def test_views_of_one_memory_keep_their_own_order_in_a_gasp(root: Path, memory: Path) -> None:
    code, log = play(_fail_between_snapshots, root, memory)
    assert code == 3 and "step 3 secured in memory" in log, log
    found = rekindle.Values(base=None, turned=None, flat=None, wide=None, mirrored=None)
    layer = torch.nn.Linear(4, 6)
    layer.requires_grad_(False)
    layer.turned = torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)
    with rekindle.Checkpointer(root, {"values": found, "layer": layer}, rng=False) as ckpt:
        assert ckpt.restore() == 3
    expected = torch.arange(48.0).view(6, 4, 2) + 3
    assert torch.equal(found.base, expected)
    assert torch.equal(found.turned, expected.permute(2, 0, 1))
    assert torch.equal(found.flat, expected.view(-1)) and torch.equal(found.wide, expected.view(3, 16))
    assert torch.equal(found.mirrored, expected.view(24, 2).T)
    weight = torch.arange(24.0).view(6, 4) - 3
    assert torch.equal(layer.weight, weight) and torch.equal(layer.turned, weight.t())


# -- tensors of inference mode --------------------------------------------------------------------------------------


def _infer(root: Path, memory: Path) -> None:
    """Three steps with a snapshot of each, and one that is only noted before the fault."""
    with torch.inference_mode():
        values = rekindle.Values(mean=torch.zeros(1 << 19), few=torch.zeros(5))
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    state = {"values": values, "layer": layer, "optimizer": optimizer}
    ckpt = rekindle.Checkpointer(root, state, memory=memory, snapshot_every=4, overlap=True, strict=True, rng=False)
    ckpt.restore()
    with ckpt.guard():
        for step in range(1, 6):
            optimizer.step()
            with torch.inference_mode():
                values.mean += 1
                values.few += 1
            if step < 4:
                ckpt.save(step, wait="memory")
            else:
                ckpt.step(step)
        raise RuntimeError("a fault")


def test_a_large_tensor_of_inference_mode_is_saved_in_a_guard(root: Path, memory: Path) -> None:
    """Torch doesn't count what is written to it, so that a step which has no snapshot can't be secured later."""
    code, log = play(_infer, root, memory)
    assert code == 3 and "values.mean may have been changed since the end of step 5" in log, log
    with torch.inference_mode():
        values = rekindle.Values(mean=torch.zeros(1 << 19), few=torch.zeros(5))
    layer = torch.nn.Linear(4, 4)
    state = {"values": values, "layer": layer, "optimizer": torch.optim.SGD(layer.parameters(), lr=0.1)}
    with rekindle.Checkpointer(root, state, rng=False) as ckpt:
        assert ckpt.restore() == 4
    assert torch.equal(values.mean, torch.full((1 << 19,), 4.0)) and torch.equal(values.few, torch.full((5,), 4.0))


def test_a_module_of_inference_mode_is_saved_without_an_optimizer(root: Path, memory: Path) -> None:
    with torch.inference_mode():
        layer = torch.nn.Linear(4, 4)
    with rekindle.Checkpointer(root, {"layer": layer}, strict=True) as ckpt:
        ckpt.restore()
        ckpt.save(1, wait="memory")
        assert ckpt.metrics.failed == 0
