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
    return [origin.site for origin in result.origins if origin.level == "candidate"]


def finest(result: Comparison) -> float:
    """Return the share that was judged op by op."""
    return len({p.site for p in result.pairs if p.level == "candidate" and p.method != "region"})


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
    result = judged(Scanned(), Scanned(parallel=True), tmp_path, 2, 11, 6)
    assert result.ok and not result.origins, result.not_ok_because


@pytest.mark.parametrize("layer", [0, 1])
def test_f7_a_wrong_gate_beside_a_parallel_scan_is_named_in_its_layer(layer: int, tmp_path: Path) -> None:
    result = judged(Scanned(), Scanned(parallel=True, wrong_gate=layer), tmp_path, 2, 11, 6)
    assert named(result) == [f"./silu.{layer}"]


def test_f31_cells_one_by_one_are_one_region_of_a_recurrence(tmp_path: Path) -> None:
    result = judged(Recurrent(), Recurrent(by_hand=True), tmp_path, 2, 12, 6)
    assert result.ok and result.coverage == 1.0, result.not_ok_because


@pytest.mark.parametrize(
    ("mistake", "site"),
    [
        ("gates", "lstm/getitem.0"),
        *(pytest.param(*of, marks=pytest.mark.slow) for of in (("bias", "lstm/getitem.0"), ("head", "./tanh.0"))),
    ],
)
def test_f31_a_mistake_in_or_below_cells_is_named_at_its_place(mistake: str, site: str, tmp_path: Path) -> None:
    assert named(judged(Recurrent(), Recurrent(by_hand=True, mistake=mistake), tmp_path, 2, 12, 6)) == [site]


class Embedded(nn.Module):
    """Words, kinds of which all are zero, and positions; a port has no kinds."""

    def __init__(self, *, has_kinds: bool = True, first: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.positions = nn.Embedding(20, 8), nn.Embedding(12, 8)
        self.kinds = nn.Embedding(1, 8) if has_kinds else None
        if self.kinds is not None:
            self.kinds.weight.data.zero_()
        self.norm, self.first = nn.LayerNorm(8), first

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        if self.kinds is not None:
            x = x + self.kinds(torch.zeros_like(ids))
        return self.norm(x + self.positions(torch.arange(self.first, self.first + ids.shape[1])))


def compared(candidate: nn.Module, tmp_path: Path) -> Comparison:
    torch.save({"ids": torch.randint(20, (2, 7), generator=torch.Generator().manual_seed(1))}, tmp_path / "ids.pt")
    return check(Embedded().eval(), candidate=candidate.eval(), inputs=str(tmp_path / "ids.pt"))


def test_zeros_are_no_counterpart_of_whatever_is_added_next(tmp_path: Path) -> None:
    assert compared(Embedded(has_kinds=False), tmp_path).ok
    (site,) = named(compared(Embedded(has_kinds=False, first=1), tmp_path))
    assert site in ("./arange.0", "positions/embedding.0", "./add.1")


class Counted(nn.Module):
    """A mean by edges: sums, and how many there are, of which the shape is taken from the values."""

    def __init__(self, *, is_matrix: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.is_matrix, self.factor = is_matrix, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        source, target = torch.tensor([[0, 1, 2, 3, 4, 4], [1, 2, 3, 4, 0, 1]])
        if self.is_matrix:
            links = x.new_zeros(5, 5)
            links[target, source] = 1
            x = torch.relu(links @ self.first(x) * self.factor)
            return self.second(links @ x / links.sum(1, keepdim=True))
        y = self.first(x)[source]
        x = torch.relu(y.new_zeros(5, 8).index_add(0, target, y))
        sums = x.new_zeros(5, 8).index_add(0, target, x[source])
        return self.second(sums / x.new_zeros(5).index_add(0, target, x.new_ones(6))[:, None])


def test_ops_that_read_the_shape_alone_are_no_evidence(tmp_path: Path) -> None:
    right = judged(Counted(), Counted(is_matrix=True), tmp_path, 5, 6)
    assert right.ok and right.granularity[0].largest_region <= 4, right.granularity
    assert named(judged(Counted(), Counted(is_matrix=True, factor=1.1), tmp_path, 5, 6))
