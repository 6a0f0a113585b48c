"""Mistakes that hide behind masks, ties, padding, routers, sorted tokens, memory that nothing wrote, casts and limits.

Each entry is a baseline, a right port of it that is written otherwise, and wrong ports. All take x [2, 8, 8] and ids
[2, 8] with 0 for padding, and weights `w` drawn once. Shape legend: B 2, S 8 tokens, D 8, E 4 experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LEAST = torch.finfo(torch.float32).min
HERE = torch.arange(8)
Port = Callable[[Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Entry:
    """One kind of mistake."""

    name: str
    baseline: Port
    right: tuple[Port, ...]
    wrong: tuple[Port, ...]


class Written(nn.Module):
    """A function as a module, with the weights that all of them share."""

    def __init__(self, function: Port) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(7)
        shapes = {"q": (8, 8), "k": (8, 8), "v": (8, 8), "gate": (4, 8), "experts": (4, 8, 8), "table": (16, 8)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=drawn)))
        self.function = function

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.function(self, x, ids)


def inputs() -> dict[str, Tensor]:
    ids = torch.tensor([[3, 5, 5, 9, 2, 7, 9, 4], [6, 3, 3, 8, 2, 0, 0, 0]])
    return {"x": torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(5)), "ids": ids}


def attended(w: Any, x: Tensor, masked: Callable[[Tensor], Tensor]) -> Tensor:
    scores = (x @ w.q) @ (x @ w.k).transpose(1, 2) / 8
    return masked(scores).softmax(-1) @ (x @ w.v)
