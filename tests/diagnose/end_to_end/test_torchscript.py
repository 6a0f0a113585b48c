"""TorchScript, whole or in part, on either side: its ops are written down under the names of its weights."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


class Block(nn.Module):
    def __init__(self, factor: float = 0.5) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.factor = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8), factor

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out((query @ key.transpose(1, 2) * self.factor).softmax(-1) @ value)


class Model(nn.Module):
    def __init__(self, factor: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(10, 8), nn.ModuleList([Block(), Block(factor)])
        self.head = nn.Linear(8, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids)


def part(model: Model) -> nn.Module:
    model.blocks[1] = torch.jit.script(model.blocks[1])
    return model


def loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, IDS), file)
    file.seek(0)
    return torch.jit.load(file)


KINDS: dict[str, Callable[[Model], nn.Module]] = {
    "scripted": torch.jit.script,
    "loaded": loaded,
    "frozen": lambda model: torch.jit.freeze(torch.jit.script(model)),
    "wrapped": lambda model: Around(torch.jit.trace(model, IDS)),
    "part": part,
}


def made(kind: str, factor: float = 0.5) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own of TorchScript
        return KINDS[kind](Model(factor).eval())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "kind",
    ["loaded", "part", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("scripted", "frozen", "wrapped"))],
)
def test_f64_a_torchscript_candidate(kind: str) -> None:
    right = check(Model().eval(), candidate=made(kind), inputs={"ids": IDS})
    assert right.ok and right.coverage > 0.95
    if kind != "wrapped":  # the exporter goes through what was traced
        assert any("it is TorchScript" in item.reason for item in right.skipped)
    wrong = check(Model().eval(), candidate=made(kind, 0.6), inputs={"ids": IDS})
    assert not wrong.ok and wrong.first_divergence is not None
    assert wrong.first_divergence.site == "blocks.1/mul.0"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["scripted", pytest.param("frozen", marks=pytest.mark.slow)])
def test_f64_a_torchscript_baseline(kind: str) -> None:
    assert check(made(kind), candidate=Model().eval(), inputs={"ids": IDS}).ok
    wrong = check(made(kind), candidate=Model(0.6).eval(), inputs={"ids": IDS})
    assert not wrong.ok and wrong.first_divergence is not None
    assert "0.5 in the baseline, 0.6 in the candidate" in wrong.first_divergence.hints[0].text
