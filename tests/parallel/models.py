"""One small model that all kinds of parallelism can cut up, and the data that it is trained with.

Its sizes make parts uneven on 2, 3 and 4 ranks, and some of them empty; one parameter is frozen, one is tied, and there
are a scalar buffer of whole numbers and one of one dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["BATCH", "Model", "batch", "param_groups", "stage", "unit_of"]

BATCH = 12
"""Sequences of a step, over all ranks; 1 to 4 ranks share them equally."""
_LENGTH, _WORDS, _WIDTH, _HIDDEN, _HEADS = 5, 7, 24, 18, 12


class Block(nn.Module):
    """Attention, then an MLP. Works on a part of its heads and hidden units just as well."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.before = nn.LayerNorm(_WIDTH)
        self.q, self.k, self.v = (nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.after = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, _HIDDEN), nn.Linear(_HIDDEN, _WIDTH)
        self.mix, self.again = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(2))
        if tied:
            self.again.weight = self.mix.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            of(y).unflatten(-1, (-1, _WIDTH // _HEADS)).transpose(1, 2)
            for y in [self.before(x)]
            for of in (self.q, self.k, self.v)
        ]
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        x = x + self.down(torch.tanh(self.up(self.after(x))))
        return x + self.again(torch.tanh(self.mix(x)))


class Model(nn.Module):
    """Words in, a score of each possible next word out. As a stage of a pipeline it lacks what is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(_WORDS, _WIDTH)
        self.place: nn.Parameter | None = nn.Parameter(torch.randn(1, _LENGTH, _WIDTH))
        self.anchor: nn.Module | None = nn.Linear(_WIDTH, _HIDDEN + 1).requires_grad_(False)
        self.blocks = nn.ModuleDict({"0": Block(tied=True), "1": Block(tied=False)})
        self.norm: nn.Module | None = nn.LayerNorm(_WIDTH)
        self.head: nn.Module | None = nn.Linear(_WIDTH, _WORDS)
        self.gain: nn.Parameter | None = nn.Parameter(torch.ones(1))
        self.register_buffer("passes", torch.tensor(0))
        self.register_buffer("scale", torch.rand(_WORDS) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.embed is not None and self.place is not None and self.anchor is not None:
            x = self.embed(x) + self.place
            x = x + self.anchor(x).mean(-1, keepdim=True)
        for block in self.blocks.values():
            x = block(x)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x)) * self.scale * self.gain
        return x


def stage(model: Model, number: int) -> Model:
    """Stage 0 or 1 of a pipeline of two: ``model`` without the other one's parts. Names stay those of the whole."""
    if number == 0:
        model.norm = model.head = model.gain = None
        del model.blocks["1"]
    else:
        model.embed = model.place = model.anchor = None
        del model.blocks["0"]
    return model


def unit_of(name: str) -> int:
    """Which of the optimizer's two groups a parameter belongs to. Flattened units must not be torn apart."""
    return int(".1." in f".{name}")


def param_groups(model: nn.Module, wrong: bool = False) -> list[dict[str, Any]]:
    """Two groups with settings of their own. ``wrong`` ones are there to be replaced by a restore."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    first, second = ([p for name, p in named if unit_of(name) == number] for number in (0, 1))
    factor = 7.0 if wrong else 1.0
    return [
        {"params": first, "lr": 1e-3 * factor, "weight_decay": 0.1 * factor},
        {"params": second, "lr": 3e-3 * factor, "betas": (0.8 / factor, 0.95)},
    ]


def batch(step: int, part: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and next words of one of ``parts`` equal parts of a step's data: shapes (BATCH / parts, 5)."""
    words = torch.randint(_WORDS, (BATCH, _LENGTH + 1), generator=torch.Generator().manual_seed(1000 + step))
    mine = words.chunk(parts)[part]
    return mine[:, :-1], mine[:, 1:]
