"""The state is restored bit for bit also where training itself doesn't repeat its bits: DDP on more than two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rekindle
from tests.faults.harness import digest_state
from tests.parallel.launch import on_ranks


def build() -> tuple[dict[str, Any], Any]:
    """Layers are used in another order than they were made in, so that DDP's buckets are other ones from step 2 on."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    class Crossed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(61, 61) for _ in range(6))

        def forward(self, x: Any) -> Any:
            for number in (3, 0, 5, 1, 4, 2):
                x = torch.tanh(self.layers[number](x))
            return x

    torch.manual_seed(0)
    model = Crossed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, wrapped


def train(state: dict[str, Any], model: Any, steps: int = 3) -> str:
    import torch

    for _ in range(steps):
        state["optimizer"].zero_grad()
        model(torch.randn(7, 61)).square().mean().backward()
        state["optimizer"].step()
        state["scheduler"].step()
    return digest_state(state)


def saving(rank: int, world: int, place: Path, memory: Path) -> dict[str, Any]:
    import torch

    state, model = build()
    torch.manual_seed(rank)
    ckpt = rekindle.Checkpointer(place / "run", state, memory=memory)
    saved = train(state, model)
    ckpt.save(3, wait="durable")
    plain = {name: entry.state_dict() for name, entry in state.items()}
    torch.save((plain, torch.get_rng_state()), place / f"plain-{rank}.pt")
    return {"saved": saved, "unbroken": train(state, model)}


def resuming(rank: int, world: int, place: Path, memory: Path) -> dict[str, Any]:
    import torch

    state, model = build()
    ckpt = rekindle.Checkpointer(place / "run", state, memory=memory)
    assert ckpt.restore() == 3
    found = {"restored": digest_state(state), "resumed": train(state, model)}
    state, model = build()
    plain, generator = torch.load(place / f"plain-{rank}.pt")
    for name, entry in state.items():
        entry.load_state_dict(plain[name])
    torch.set_rng_state(generator)
    return found | {"with torch alone": train(state, model)}


def test_ddp_on_four_ranks_gets_the_bits_of_its_state_back(tmp_path: Path, memory: Path) -> None:
    """What is trained from there need not have the bits of the unbroken run; it has those that torch alone gives."""
    before = on_ranks(4, saving, tmp_path, memory)
    after = on_ranks(4, resuming, tmp_path, memory)
    for rank in range(4):
        assert after[rank]["restored"] == before[rank]["saved"]
        assert after[rank]["resumed"] == after[rank]["with torch alone"]
