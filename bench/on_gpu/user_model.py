"""Trains what a user does: a GPT in float32 with AdamW, whose forward pass is in bfloat16 on a device."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["GPT", "Shape", "UserJob", "fingerprint"]

_VOCABULARY = 50304
"""Tokens that a model knows, if it is wide enough: a CPU's narrow one would do nothing but tell them apart."""
_CLASSES = 512
"""Tokens that a batch draws from: what is predicted doesn't matter here."""


class Shape(NamedTuple):
    """The size of a job. The defaults of the experiments make 354 million parameters, 4.25 GB with AdamW's moments."""

    width: int
    layers: int
    batch: int
    tokens: int
    device: str


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.before(x)).view(batch, length, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    """Predicts each next token from those before it."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        vocabulary = min(_VOCABULARY, 50 * width)
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class UserJob:
    """The model, its optimizer and its steps."""

    def __init__(self, shape: Shape, ddp: bool = False) -> None:
        torch.manual_seed(1)
        self.shape = shape
        self.model = GPT(shape.width, shape.layers, shape.tokens).to(shape.device)
        self.train: nn.Module = nn.parallel.DistributedDataParallel(self.model) if ddp else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.state.items()}

    def work(self) -> None:
        """Forward and backward."""
        shape = self.shape
        tokens = torch.randint(_CLASSES, (shape.batch, shape.tokens + 1)).to(shape.device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=shape.device != "cpu"):
            found = self.train(tokens[:, :-1])
            loss = nn.functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()

    def update(self) -> float:
        """Change all of the state. Returns the seconds that hooks on the optimizer made the update wait."""
        began = time.perf_counter()
        started = [began]
        # Registered last, so it runs after all hooks that wait.
        handle = self.optimizer.register_step_pre_hook(lambda *_: started.append(time.perf_counter()))
        try:
            self.optimizer.step()
        finally:
            handle.remove()
        return started[-1] - began

    @property
    def nbytes(self) -> int:
        return 12 * sum(p.numel() for p in self.model.parameters())


def fingerprint(job: UserJob) -> str:
    """Returns sums of the bits of all parameters, and of all moments: two states that differ have different ones."""
    parameters = list(job.model.parameters())
    moments = [job.optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
    sums = [[t.detach().view(torch.int32).sum(dtype=torch.int64) for t in some] for some in (parameters, moments)]
    return " ".join(str(int(torch.stack(some).sum())) for some in sums)
