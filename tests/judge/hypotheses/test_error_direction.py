"""In half precision a number of the candidate's own shows by its direction that it made an error, never a right one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glassengine.diagnose import check
from glassengine.results import Comparison

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def written(q: Tensor, k: Tensor, v: Tensor, factor: float) -> Tensor:
    return (q @ k.mT * factor).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.products = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        for weight in self.parameters():
            weight.data *= 0.3

    def forward(self, x: Tensor) -> Tensor:
        heads = (product(x).view(*x.shape[:2], 4, 16).transpose(1, 2) for product in self.products)
        return self.attend(*heads).transpose(1, 2).reshape(x.shape)


def checked(attend: Attend, folder: Path) -> Comparison:
    torch.set_num_threads(1)
    x = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    torch.save({"x": x}, folder / "x.pt")
    baseline, port = (Attention(how).bfloat16().eval() for how in (F.scaled_dot_product_attention, attend))
    return check(baseline, candidate=port, inputs=str(folder / "x.pt"))


def test_a_scale_that_moves_no_result_by_a_unit_is_wrong(tmp_path: Path) -> None:
    result = checked(lambda q, k, v: written(q, k, v, 1 / math.sqrt(64)), tmp_path)
    first = result.first_divergence
    assert not result.ok and first is not None and first.verdict == "wrong"
    assert first.hints[0].kind == "scale" and first.hints[0].change is not None
    assert first.hints[0].change.candidate == 0.125
    assert 2 < (first.noise_ratio or 0) < 10  # by its size it is only suspicious


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v: written(q, k, v, 16**-0.5),
        pytest.param(lambda q, k, v: written(q * 0.5, k * 0.5, v, 1.0), marks=pytest.mark.slow),
        pytest.param(lambda q, k, v: written(q * 0.125, k, v, 2.0), marks=pytest.mark.slow),
        pytest.param(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.25), marks=pytest.mark.slow),
    ],
)
def test_a_scale_that_is_written_elsewhere_is_right(attend: Attend, tmp_path: Path) -> None:
    assert checked(attend, tmp_path).verdict in ("identical", "rounding")
