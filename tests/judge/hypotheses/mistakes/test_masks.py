"""Masks in words."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from glassengine.diagnose import check


class Masked(nn.Module):
    """Scores with a mask that NumPy makes; a port may let a position see itself."""

    def __init__(self, diagonal: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.diagonal = nn.Linear(6, 8), nn.Linear(6, 8), diagonal

    def forward(self, x: Tensor) -> Tensor:
        other = torch.from_numpy(np.triu(np.ones((5, 5)), k=1).astype("uint8")) == 0
        mask = np.triu(np.ones((5, 5)), k=self.diagonal).astype("uint8")
        is_seen = torch.from_numpy(mask) == 0
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        return scores.masked_fill(~is_seen, -1e9).softmax(-1) + scores.masked_fill(~other, -1e9).softmax(-1)


def test_a_mask_of_whole_numbers_is_told_by_what_is_seen() -> None:
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    first = check(Masked(0).eval(), candidate=Masked(1).eval(), inputs={"x": x}).first_divergence
    assert first is not None
    assert (first.hints[0].kind, first.hints[0].text) == ("mask", "a position sees itself"), first.hints
