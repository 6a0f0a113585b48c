"""Tensors that a candidate has wrong are named at their place, in whatever arrangement it has them."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from glassengine.diagnose import check
from glassengine.results import Comparison

sys.path.insert(0, str(Path(__file__).parent))

from evidence_ports import Encoder, Layered, Recurrent, Residual, Scanned

NAMES = ["0", "1", "2", "3"]


def judged(baseline: nn.Module, candidate: nn.Module, tmp_path: Path, *shape: int) -> Comparison:
    torch.set_num_threads(1)
    path = tmp_path / "x.pt"
    torch.save({"x": torch.randn(*shape, generator=torch.Generator().manual_seed(1))}, path)
    return check(baseline.eval(), candidate=candidate.eval(), inputs=str(path))


def named(result: Comparison) -> list[str]:
    """Return where the candidate's program is wrong."""
    assert not result.ok
    return [origin.site for origin in result.origins if origin.rung == "candidate"]


def finest(result: Comparison) -> float:
    """Return the share that was judged op by op."""
    return len({p.site for p in result.pairs if p.rung == "candidate" and p.method != "region"})


def test_f9_a_port_with_channels_last_is_right(tmp_path: Path) -> None:
    result = judged(Residual(), Residual(channels_last=True), tmp_path, 2, 3, 10, 12)
    assert result.ok and result.verdict == "rounding", result.not_ok_because
    assert finest(result) >= 22, "blocks are judged one by one, not as one region up to the pooling"


@pytest.mark.parametrize("block", [0, 2])
def test_f9_a_missing_shortcut_with_channels_last_is_named_at_its_place(block: int, tmp_path: Path) -> None:
    result = judged(Residual(), Residual(channels_last=True, no_shortcut=block), tmp_path, 2, 3, 10, 12)
    assert named(result) == [f"./add.{block}"]


def test_f9_a_port_with_time_first_is_right(tmp_path: Path) -> None:
    result = judged(Encoder(), Encoder(time_first=True), tmp_path, 2, 9, 12)
    assert result.ok and result.verdict in ("identical", "rounding"), result.not_ok_because
    assert finest(result) >= 25


def test_f9_exchanged_sines_and_cosines_with_time_first_are_named_where_the_table_is_added(tmp_path: Path) -> None:
    assert named(judged(Encoder(), Encoder(time_first=True, exchanged=True), tmp_path, 2, 9, 12)) == ["./add.0"]


def test_f9_an_epsilon_with_time_first_is_named_at_its_norm(tmp_path: Path) -> None:
    found = named(judged(Encoder(), Encoder(time_first=True, epsilon=1e-2), tmp_path, 2, 9, 12))
    assert found == ["layers.1.norm/layer_norm.0"]


def test_f6_a_leading_dimension_is_no_mistake(tmp_path: Path) -> None:
    result = judged(Layered(NAMES), Layered(NAMES, leading=True), tmp_path, 2, 9, 12)
    assert result.ok and result.verdict in ("identical", "rounding"), result.not_ok_because


@pytest.mark.parametrize(
    ("seed", "leading"),
    [(0, False), (1, True), *(pytest.param(n, lead, marks=pytest.mark.slow) for n in (2, 3) for lead in (False, True))],
)
def test_f6_names_in_another_order_change_no_verdict(seed: int, leading: bool, tmp_path: Path) -> None:
    """The modules of a port are called by the names of others: `layers.0` is the third layer, say."""
    names = random.Random(seed).sample(NAMES, len(NAMES))
    right = judged(Layered(NAMES), Layered(names, leading=leading), tmp_path, 2, 9, 12)
    assert right.ok and not right.origins, right.not_ok_because
    assert not [pair for pair in right.pairs if pair.verdict not in ("identical", "rounding")]
    wrong = judged(Layered(NAMES), Layered(names, leading=leading, bias=0.1), tmp_path, 2, 9, 12)
    assert named(wrong) == ["./add.2"]


def test_f7_a_parallel_scan_is_right(tmp_path: Path) -> None:
    result = judged(Scanned(), Scanned(parallel=True), tmp_path, 2, 23, 6)
    assert result.ok and not result.origins, result.not_ok_because


@pytest.mark.parametrize("layer", [0, 1])
def test_f7_a_wrong_gate_beside_a_parallel_scan_is_named_in_its_layer(layer: int, tmp_path: Path) -> None:
    result = judged(Scanned(), Scanned(parallel=True, wrong_gate=layer), tmp_path, 2, 23, 6)
    assert named(result) == [f"./silu.{layer}"]


def test_f31_cells_one_by_one_are_one_region_of_a_recurrence(tmp_path: Path) -> None:
    result = judged(Recurrent(), Recurrent(by_hand=True), tmp_path, 2, 24, 6)
    assert result.ok and result.coverage == 1.0, result.not_ok_because


@pytest.mark.parametrize(
    ("mistake", "site"), [("gates", "lstm/getitem.0"), ("bias", "lstm/getitem.0"), ("head", "./tanh.0")]
)
def test_f31_a_mistake_in_or_below_cells_is_named_at_its_place(mistake: str, site: str, tmp_path: Path) -> None:
    assert named(judged(Recurrent(), Recurrent(by_hand=True, mistake=mistake), tmp_path, 2, 24, 6)) == [site]
