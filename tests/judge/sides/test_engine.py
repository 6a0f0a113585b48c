"""An engine of a port is judged as the port is: by regions where it has other ops, and by float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.results import Comparison
from glassengine.testing import models


class Block(nn.Module):
    """A norm and an activation, each in the ops that torch has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def normed(self, h: Tensor) -> Tensor:
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)

    def act(self, h: Tensor) -> Tensor:
        return torch.nn.functional.gelu(h * 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.normed(self.up(x))))


class OtherNorm(Block):
    """The norm in other ops, which have no counterparts one by one."""

    terms = 64

    def normed(self, h: Tensor) -> Tensor:
        return h / torch.sqrt(h.pow(2).sum(-1, keepdim=True) / self.terms + 1e-5)


class WrongNorm(OtherNorm):
    terms = 63


class ByHand(Block):
    """The activation written out: rounded after each op, it cancels where it is small."""

    root = 0.5**0.5

    def act(self, h: Tensor) -> Tensor:
        h = h * 4
        return 0.5 * h * (1 + torch.erf(h * self.root))


class WronglyByHand(ByHand):
    root = 0.72


def checked(tmp_path: Path, port: type[Block], dtype: str) -> Comparison:
    floating: torch.dtype = getattr(torch, dtype)
    baseline, candidate = models.drawn(Block).to(floating), models.drawn(Block).to(floating)
    candidate.load_state_dict(baseline.state_dict())
    candidate.__class__ = port
    inputs = {"x": torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).to(floating)}
    torch.save(inputs, tmp_path / "x.pt")
    glass.build(candidate, tmp_path / "engine", backend="eager", inputs=inputs, dtype=dtype)
    return glass.check(baseline, candidate=tmp_path / "engine", inputs=str(tmp_path / "x.pt"), dtype=dtype)


def test_regions_of_an_engine_are_credited(tmp_path: Path) -> None:
    found = checked(tmp_path, OtherNorm, "float32")
    assert found.ok and found.verdict == "rounding" and found.coverage == 1.0
    assert {pair.site for pair in found.pairs if pair.method == "region" and pair.level == "engine"} == {"./rsqrt.0"}
    engine = next(one for one in found.granularity if one.level == "engine")
    assert engine.in_regions > 0 and engine.results_only == 0


def test_extra_tensors_of_an_engine_are_listed(tmp_path: Path) -> None:
    found = checked(tmp_path, OtherNorm, "float32")
    alone = {item.site for item in found.skipped if item.side == "candidate"}
    assert {"./sqrt.0", "./sum.0"} <= alone and found.counts["unmatched_candidate"] == len(alone)


def test_a_mistake_in_a_region_of_an_engine_is_found(tmp_path: Path) -> None:
    found = checked(tmp_path, WrongNorm, "float32")
    first = found.first_divergence
    assert not found.ok and first is not None and first.site in ("./mean.0", "./mul.0")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_engine_that_writes_an_activation_out_is_right(tmp_path: Path, dtype: str) -> None:
    found = checked(tmp_path, ByHand, dtype)
    assert found.ok and found.verdict == "rounding", found.not_ok_because


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_writes_it_out_wrongly_is_not(tmp_path: Path, dtype: str) -> None:
    found = checked(tmp_path, WronglyByHand, dtype)
    assert not found.ok and found.first_divergence is not None and found.first_divergence.site == "./gelu.0"
