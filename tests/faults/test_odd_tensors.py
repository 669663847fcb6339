"""Tensors of unusual kinds in a guarded state: what a fault, or a save, makes of them."""

from __future__ import annotations

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
    except RuntimeError as error:
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
