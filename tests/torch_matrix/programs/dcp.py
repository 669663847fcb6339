"""Saves by DCP through Rekindle's writer and by DCP's own, dies, and reads both: two ranks, a model under FSDP2."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from rekindle.integrations.dcp import RekindleReader, RekindleWriter

HERE = Path(sys.argv[1])


def build(seed: int) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # before torch 2.6
        from torch.distributed._composable.fsdp import fully_shard
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def compare(found: torch.nn.Module, number: int, state: dict) -> None:
    assert state["number"] == number, state["number"]
    for name, tensor in build(number).state_dict().items():
        assert torch.equal(found.state_dict()[name].full_tensor(), tensor.full_tensor()), name


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    writer = RekindleWriter(HERE / "root")
    if not (HERE / f"killed-0-{rank}").exists():
        dcp.save({"model": build(1).state_dict(), "number": 1}, checkpoint_id="step-1", storage_writer=writer)
        second = {"model": build(2).state_dict(), "number": 2}
        dcp.async_save(second, checkpoint_id="step-2", storage_writer=writer).result()
        dcp.save(second, storage_writer=dcp.FileSystemWriter(str(HERE / "stock")))
        dist.barrier()
        (HERE / f"killed-0-{rank}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    for reader in (RekindleReader(HERE / "root"), dcp.FileSystemReader(str(HERE / "stock"))):
        model = build(7)
        state = {"model": model.state_dict(), "number": 0}
        dcp.load(state, storage_reader=reader)
        model.load_state_dict(state["model"])
        compare(model, 2, state)
    dcp.save({"model": build(3).state_dict(), "number": 3}, storage_writer=writer)
    writer.close()
    whole = {name: tensor.full_tensor() for name, tensor in build(3).state_dict().items()}
    if rank == 0:
        torch.save(whole, HERE / "whole.pt")
    dist.destroy_process_group()


main()
