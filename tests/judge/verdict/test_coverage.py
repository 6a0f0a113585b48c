"""Coverage counts how finely was judged: one region of many ops is not a hundred percent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.results import MOST_OPS, Comparison

_STEPS = 16


class Long(nn.Module):
    """A chain of ops."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(_STEPS):
            x = x * 1.25 + 0.5
        return x


class Opaque(nn.Module):
    """The same from one step to the next, computed in a way of its own from the first to the last."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return _Chain.apply(x, self.factor)


class Wrong(Opaque):
    factor = 1.25


@torch.library.custom_op("glasstest::chain", mutates_args=())
def chain(x: Tensor, factor: float) -> Tensor:
    for step in range(_STEPS):
        x = x * 1.25 + 0.5 * (factor if step == 3 else 1.0)
    return x


@chain.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


class _Chain:
    apply = staticmethod(chain)


def checked(tmp_path: Path, candidate: nn.Module) -> Comparison:
    torch.save({"x": torch.rand(4, 8, generator=torch.Generator().manual_seed(0))}, tmp_path / "x.pt")
    return glass.check(Long(), candidate=candidate, inputs=str(tmp_path / "x.pt"))


def test_f4_a_region_of_many_ops_is_named_and_counted_for_itself(tmp_path: Path) -> None:
    result = checked(tmp_path, Opaque())
    found = result.granularity[0]
    assert found.level == "candidate" and found.num_sites == 2 * _STEPS
    assert found.largest_region == 2 * _STEPS > MOST_OPS
    assert found.largest_region_end == "./add.15"
    assert found.in_large_regions == pytest.approx(1.0) and found.op_by_op == 0
    # It ends in the result, which agrees.
    assert result.ok and result.coverage == pytest.approx(1.0)


def test_f4_where_the_results_do_not_agree_a_large_region_counts_for_nothing(tmp_path: Path) -> None:
    result = checked(tmp_path, Wrong())
    assert not result.ok and result.standing == "results differ"
    assert result.coverage == 0.0


def test_op_by_op_is_all_of_it_where_both_are_written_alike(tmp_path: Path) -> None:
    found = checked(tmp_path, Long()).granularity[0]
    assert (found.op_by_op, found.in_regions, found.in_large_regions, found.results_only) == (1.0, 0.0, 0.0, 0.0)


class Shifted(nn.Module):
    """A mask that is made of positions, by many ops, and hides scores."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            return torch.nn.functional.scaled_dot_product_attention(x * 0.5, x, x, is_causal=True)
        places = torch.arange(x.shape[-2]) + 0
        for by in range(_STEPS):
            places = places + by
        return torch.nn.functional.scaled_dot_product_attention(x, x * 0.5, x, places[None] <= places[:, None])


def test_ops_that_make_a_mask_are_no_part_of_a_large_region(tmp_path: Path) -> None:
    torch.save({"x": torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))}, tmp_path / "x.pt")
    result = glass.check(Shifted(by_hand=True), candidate=Shifted(by_hand=False), inputs=str(tmp_path / "x.pt"))
    fine = result.granularity[0]
    assert result.ok and fine.in_large_regions == 0.0 and fine.in_regions > 0.0 and fine.largest_region <= 2, fine
