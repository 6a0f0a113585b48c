"""Mistakes in a model of equal layers: an op is compared with that of its own layer, and the wrong line is named."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glassengine.diagnose import check


class Layer(nn.Module):
    """Attention without a softmax."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.query, self.key, self.value, self.merge = (nn.Linear(12, 12, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part(x).view(2, 7, 3, 4) for part in (self.query, self.key, self.value))
        query = F.elu(query) + 1
        key = key if self.mistake == "keys" else F.elu(key) + 1
        kept = torch.einsum("nshd,nshv->nhdv", key, value)
        total = torch.einsum("nlhd,nhd->nlh", query, key.sum(dim=1)) + 1e-6
        mixed = torch.einsum("nlhd,nhdv->nlhv", query, kept) / total[..., None]
        merged = self.merge(mixed.reshape(2, 7, 12))
        if self.mistake == "no norm":
            return x + merged
        return x + self.norm(merged)


class Net(nn.Module):
    """Three layers, of which the second is read once more at the end."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mistake = mistake
        self.layers = nn.ModuleList([Layer(mistake) for _ in range(3)])
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self.layers:
            made.append(layer(made[-1]))
        skipped = made[1] if self.mistake == "another layer" else made[2]
        if self.mistake == "zero":
            skipped = skipped * 0
        if self.mistake == "turned":
            skipped = skipped.flip(1)
        return self.head(torch.cat([made[3], skipped], -1))


def line_of(text: str) -> int:
    lines, start = inspect.getsourcelines(sys.modules[__name__])
    return max(start, 1) + next(place for place, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("mistake", "site", "text", "line"),
    [
        ("keys", "layers.0/add.1", "elu and add are missing", ""),
        ("another layer", "./cat.0", "layers.0/add.3 instead of layers.1/add.3", "skipped = made[1] if"),
        ("zero", "./cat.0", "is multiplied by 0", "skipped = skipped * 0"),
        ("turned", "./cat.0", "", "skipped = skipped.flip(1)"),
        ("no norm", "layers.0.norm/layer_norm.0", "layer_norm is missing", "return x + merged"),
    ],
)
def test_a_mistake_is_named_in_its_layer_with_its_line(mistake: str, site: str, text: str, line: str) -> None:
    base, port = Net(), Net(mistake)
    port.load_state_dict(base.state_dict())
    torch.manual_seed(1)
    found: Any = check(base.eval(), candidate=port.eval(), inputs={"x": torch.randn(2, 7, 12)})
    first = found.first_divergence
    assert not found.ok and first.site == site and text in first.hints[0].text, (first.site, first.hints)
    if line and mistake != "another layer":
        assert f":{line_of(line)}:" in first.candidate_source
