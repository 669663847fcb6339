"""The model that ``recovery_job.py`` trains, a small transformer on random tokens, and checkpoints of torch's own."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["TorchCheckpoints", "digest", "make", "train_step"]

_CONTEXT, _BATCH = 128, 8


class _Model(nn.Module):
    """Predicts each next token from those before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(_CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.1, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.blocks(x, mask, is_causal=True))


def make(width: int) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """Returns the model, the module that trains it on all ranks, and its optimizer."""
    model = _Model(width)
    return model, nn.parallel.DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(train: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.randint(256, (_BATCH, _CONTEXT + 1))
    loss = nn.functional.cross_entropy(train(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


class TorchCheckpoints:
    """``torch.save`` by each rank every few steps. The last two are kept: one rank may be ahead of another."""

    def __init__(self, root: Path, state: dict[str, Any], every: int = 1) -> None:
        self._root, self._state, self._every = root, state, every
        self._name = f"rank-{dist.get_rank()}.pt"
        root.mkdir(parents=True, exist_ok=True)

    def restore(self) -> int:
        """Load the newest step that all ranks have. Returns it; 0 for none."""
        own = sorted(int(path.name.split("-")[1]) for path in self._root.glob(f"step-*-{self._name}"))
        newest = torch.tensor(own[-1] if own else 0)
        dist.all_reduce(newest, op=dist.ReduceOp.MIN)
        step = int(newest)
        if step:
            found = torch.load(self._path(step), weights_only=True)
            for name, part in self._state.items():
                part.load_state_dict(found[name])
            torch.set_rng_state(found["rng"])
        return step

    def step(self, step: int) -> None:
        if step % self._every:
            return
        content = {name: part.state_dict() for name, part in self._state.items()} | {"rng": torch.get_rng_state()}
        path = self._path(step)
        torch.save(content, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        self._path(step - 2 * self._every).unlink(missing_ok=True)

    def close(self) -> None:
        """Does nothing: all is written when ``step`` returns."""

    def _path(self, step: int) -> Path:
        return self._root / f"step-{step}-{self._name}"


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Returns a hash of weights, of the optimizer's state and of the random generator, each bit of them."""
    found = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16)
    for parameter in model.parameters():
        for tensor in (parameter.detach(), *optimizer.state[parameter].values()):
            found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()
