"""Ports that write an activation out are right in every dtype, and wrong where they write another one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from glassengine.diagnose.check_model import check

Activation = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, act: Activation) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 8)
        self.act = act

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        out: Tensor = self.head(hidden + self.down(self.act(4 * self.up(self.norm(hidden)))))
        return out


def _tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _erf_by_hand(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2.0)))


def _tanh_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _silu_by_hand(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


RIGHT: list[tuple[Activation, Activation]] = [
    (F.gelu, _erf_by_hand),
    (_tanh, _tanh_by_hand),
    (_tanh_by_hand, _tanh),
    (F.silu, _silu_by_hand),
]
WRONG: list[tuple[Activation, Activation]] = [
    (F.gelu, lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2.2)))),
    (F.gelu, lambda x: x * torch.sigmoid(1.702 * x)),
    (_tanh, lambda x: 0.5 * x * (1 + torch.tanh(0.7 * (x + 0.044715 * x**3)))),
    (F.silu, lambda x: x / (1 + torch.exp(-1.1 * x))),
]


@pytest.fixture
def inputs(tmp_path: Path) -> str:
    path = tmp_path / "ids.safetensors"
    save_file({"ids": torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))}, path)
    return str(path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("ours", "theirs"), RIGHT)
def test_ops_written_out_are_right(ours: Activation, theirs: Activation, dtype: str, inputs: str) -> None:
    found = check(Net(ours).eval(), candidate=Net(theirs).eval(), dtype=dtype, inputs=inputs)
    assert found.verdict in ("identical", "rounding"), found.first_divergence


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("ours", "theirs"), WRONG)
def test_another_activation_is_wrong(ours: Activation, theirs: Activation, dtype: str, inputs: str) -> None:
    found = check(Net(ours).eval(), candidate=Net(theirs).eval(), dtype=dtype, inputs=inputs)
    assert not found.ok and found.first_divergence is not None
    assert found.first_divergence.node.startswith(("gelu", "silu")), found.first_divergence
