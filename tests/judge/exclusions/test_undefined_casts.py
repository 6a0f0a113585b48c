"""What a cast of an infinity yields is nobody's mistake; all that does not depend on it is compared as ever."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from glassengine.capture.observers import run_program
from glassengine.diagnose import check
from glassengine.judge.exclusions.perturbation import Followed
from glassengine.judge.exclusions.undefined_casts import UndefinedCasts
from glassengine.program.export.export import export_module


class Buckets(nn.Module):
    """Relative positions as T5 has them: small distances as they are, the logarithm of large ones."""

    def forward(self, distance: torch.Tensor) -> dict[str, torch.Tensor]:
        large = 2 + torch.log(distance.float() / 2).to(torch.int64)
        capped = torch.minimum(large, torch.full_like(large, 3))
        return {"capped": capped, "bucket": torch.where(distance < 2, distance, capped)}


def undefined(module: nn.Module, **inputs: torch.Tensor) -> dict[str, list[Any]]:
    """Return the elements that do not count by the op of their node."""
    program = export_module(module, inputs)
    known = {program.node(port.node): (inputs[port.name],) * 2 for port in program.inputs}
    casts = Followed(UndefinedCasts())
    masks: dict[str, torch.Tensor | None] = {}

    def observe(node: torch.fx.Node, value: Any) -> None:
        known[node] = (value, value)
        casts.visit(node, known)
        if isinstance(value, torch.Tensor):
            masks[node.name] = casts.of(node, known)

    run_program(program, inputs, observe)
    sites = {site.node: site.name.rpartition("/")[2] for site in program.sites if site.kind == "op"}
    found = {name: masks.get(node) for node, name in sites.items()}
    return {name: mask.tolist() for name, mask in found.items() if mask is not None}


def test_discarded_undefined_casts_leave_no_trace() -> None:
    found = undefined(Buckets(), distance=torch.tensor([0, 1, 2, 40]))
    first = [True, False, False, False]
    after = ("_to_copy.1", "add.0", "minimum.0")
    before = ("_to_copy.0", "div.0", "log.0")
    assert found == dict.fromkeys([*before, *after], first)


class Read(nn.Module):
    """Logarithms that are cast, one of which is read by somebody else too."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        scale = torch.log(torch.tensor(4.0))
        cast, read = (x / 2).log() / scale, (x * 3).log()
        return [cast.to(torch.int64), torch.ceil(cast).to(torch.int64), read.to(torch.int64), read.sum()]


def test_what_is_made_for_the_cast_alone_does_not_count_and_what_others_read_does() -> None:
    found = undefined(Read(), x=torch.tensor([0.0, 5.0]))
    assert set(found) == {"div.0", "log.1", "div.1", "ceil.0", "_to_copy.0", "_to_copy.1", "_to_copy.2"}
    assert all(mask == [True, False] for mask in found.values())


class Halves(nn.Module):
    """Of each place one cast is undefined, and never both."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x * 2
        return [x.log().to(torch.int64), (1 - x).log().to(torch.int64)]


def test_values_that_a_cast_can_hold_count() -> None:
    found = undefined(Halves(), x=torch.tensor([0.0, 0.25]))
    assert "mul.0" not in found
    assert found["log.0"] == [True, False]


def test_nothing_is_undefined_without_an_infinity() -> None:
    assert undefined(Buckets(), distance=torch.tensor([1, 2, 3])) == {}


class Casts(nn.Module):
    def forward(self, x: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
        whole = x.to(torch.int32)
        return [whole.sum(), table[whole.clamp(0, 3).long()], x.argsort(), x.isinf().to(torch.int64)]


def test_numbers_too_large_and_nan_are_undefined_and_orders_are_not() -> None:
    x = torch.tensor([1.0, float("nan"), 3e9, -2.0, 2147483000.0])
    found = undefined(Casts(), x=x, table=torch.arange(8.0).reshape(4, 2) + 1)
    cast = [False, True, True, False, False]
    assert found["_to_copy.0"] == cast
    assert found["sum.0"] is True
    assert [any(row) for row in found["index.0"]] == cast
    assert not any("argsort" in name or "sort" in name or "isinf" in name for name in found)


class Positions(nn.Module):
    """Relative positions in buckets of a table, written in one way or another."""

    def __init__(self, *, clamps: bool = False, far: float = 16.0) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(1)))
        self.clamps, self.far = clamps, far

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        size = distance.float().clamp(min=1) if self.clamps else distance.float()
        large = 2 + (torch.log(size / 2) / math.log(self.far / 2) * 2).to(torch.int64)
        return self.table[torch.where(distance < 2, distance, large.clamp(max=3))]


@pytest.mark.parametrize("clamps", [(False, True), (True, False)])
def test_a_logarithm_that_is_kept_from_zero_is_no_mistake(clamps: tuple[bool, bool], tmp_path: Path) -> None:
    torch.save({"distance": torch.arange(12).reshape(3, 4)}, tmp_path / "x.pt")
    ours, theirs = (Positions(clamps=one).eval() for one in clamps)
    found = check(ours, candidate=theirs, inputs=str(tmp_path / "x.pt"))
    assert found.ok and found.coverage == 1.0
    listed = {item.site for item in found.skipped if "a cast to integers" in item.reason}
    assert "./log.0" in listed
    wrong = Positions(clamps=clamps[1], far=64.0).eval()
    assert not check(ours, candidate=wrong, inputs=str(tmp_path / "x.pt")).ok
