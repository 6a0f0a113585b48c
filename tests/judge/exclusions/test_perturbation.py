"""The lane of other values on graphs made by hand, and dead elements: no result reads them, whatever they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from glassengine.diagnose import check
from glassengine.judge.exclusions.masked import read_by_softmax
from glassengine.judge.exclusions.perturbation import (
    WHOLE,
    Followed,
    OtherValues,
    Source,
    _Lane,
    differing,
    differs,
    far_from,
    unread,
    unread_nodes,
)
from glassengine.judge.sides.protocol import float_nodes
from glassengine.numerics.judgement import Judgement
from glassengine.program import export_program, load_model

aten = torch.ops.aten


def test_the_lane_forgets_what_is_settled_and_knows_nothing_below_the_whole() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    first, second = graph.call_function(aten.neg.default, (x,)), graph.call_function(aten.abs.default, (x,))
    lane = OtherValues(lambda node, others: node.target(others[x]))  # type: ignore[operator]
    value = torch.tensor([1.0, -2.0])
    assert lane.below(first, value) is value, "it reads nothing else"
    lane.keep(x, torch.tensor([1.0, 2.0]), value)
    lane.keep(second, value.clone(), value)
    assert lane.perturbed.keys() == {x}, "the second is as it was"
    assert lane.below(second, value.abs()).tolist() == [1.0, 2.0]
    assert differs(lane.perturbed[x], value).tolist() == [False, True]
    lane.settle(x)
    assert not lane.perturbed
    lane.keep(x, WHOLE, value)
    assert lane.below(first, value) is WHOLE and bool(differs(lane.perturbed[x], value).all())


def test_a_node_that_cannot_be_computed_from_other_values_is_other_as_a_whole() -> None:
    class First(Source):
        kind, reason = "undefined casts", "planted"

        def marks(self, node: Node, value: Tensor, values: Any) -> Tensor | None:
            return torch.tensor([True, False]) if node.target is aten.abs.default else None

    graph = Graph()
    x = graph.placeholder("x")
    place = graph.call_function(aten.abs.default, (x,))
    picked = graph.call_function(aten.index_select.default, (x, 0, place))
    followed = Followed(First())
    given = torch.tensor([0, 1])
    env: dict[Node, tuple[Tensor, Tensor]] = dict.fromkeys((x, place, picked), (given, given))
    for node in (place, picked):
        followed.visit(node, env)
    found = followed.excluded(picked, env)
    assert found is not None and found.tolist() == [True, True]
    followed.settle(picked)
    assert followed.excluded(picked, env) is None


@pytest.mark.parametrize("given", [[0.0, 1.0, -3.0], [0, 5, -5], [True, False]])
def test_other_values_are_other_values(given: list[Any]) -> None:
    value = torch.tensor(given)
    assert bool((far_from(value) != value).all()) and far_from(value).dtype is value.dtype
    assert far_from((value, 3))[1] == 3


G = torch.Generator().manual_seed(3)
X = torch.randn(3, 5, 6, generator=G)


class First(nn.Module):
    """The last layer of the first row alone, or of all rows, of which the first is taken."""

    def __init__(self, *, is_whole: bool = False, also: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.is_whole, self.also = is_whole, also

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.one(x))
        rows = x if self.is_whole else x[:, :1]
        y = self.two(torch.sin(x + rows))
        found = y[:, 0]
        return found + y.mean(1) if self.also else found


class Chosen(nn.Module):
    """Two experts, of which the rows themselves choose one."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        second = torch.cos(x) * self.factor
        return torch.where(x[..., :1] < 100, torch.sin(x), second)


def checked(
    baseline: nn.Module, candidate: nn.Module, inputs: dict[str, Tensor], tmp_path: Path
) -> tuple[bool, list[str]]:
    torch.save(inputs, tmp_path / "inputs.pt")
    result = check(baseline.eval(), candidate=candidate.eval(), inputs=str(tmp_path / "inputs.pt"))
    return result.ok, [origin.site for origin in result.origins]


def test_rows_that_are_left_out_later_may_be_anything(tmp_path: Path) -> None:
    assert checked(First(), First(is_whole=True), {"x": X}, tmp_path) == (True, [])


def test_rows_that_are_read_may_not(tmp_path: Path) -> None:
    ok, sites = checked(First(also="mean"), First(is_whole=True, also="mean"), {"x": X}, tmp_path)
    assert not ok and sites


def test_what_these_numbers_do_not_choose_others_do(tmp_path: Path) -> None:
    ok, sites = checked(Chosen(), Chosen(1.5), {"x": X}, tmp_path)
    assert not ok and sites


class Parts(nn.Module):
    def forward(self, x: Tensor, at: Tensor) -> dict[str, Tensor]:
        a, b, c, d = torch.sin(x), torch.cos(x), torch.tan(x), torch.exp(x)
        return {
            "slice": a[:, :2] * 2,
            "gathered": b[at],
            "hidden": c * (x * 0),
            "chosen": torch.where(x > 0, d, 0.0),
        }


@pytest.mark.parametrize(
    ("op", "where", "is_unread"),
    [
        ("sin", (slice(None), 3), True),
        ("sin", (slice(None), 1), False),
        ("cos", (2,), False),
        ("cos", (1,), False),
        ("tan", (2,), False),
        ("exp", (2,), False),
    ],
)
def test_ops_that_count_as_reading(op: str, where: tuple[object, ...], is_unread: bool) -> None:
    inputs = {"x": X[0], "at": torch.tensor([0, 1, 3, 4])}
    program = export_program(load_model(Parts().eval()), inputs=[inputs])
    node = next(node for node in program.graph.nodes if f"aten.{op}." in str(node.target))
    mask = torch.zeros(5, 6, dtype=torch.bool)
    mask[where] = True
    assert unread(program, inputs, {node.name: mask}) == ({node.name} if is_unread else set())


class Heads(nn.Module):
    """Three heads, of which one is asked for."""

    def __init__(self, *, is_alone: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))
        self.is_alone = is_alone

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x)
        if self.is_alone:
            return self.heads[1](x[:, 1])
        parts = x.reshape(3, 5, 6).transpose(0, 1)
        made = [head(part) for head, part in zip(self.heads, (parts[2], parts[1], parts[0]), strict=True)]
        return made[1].transpose(0, 0)


def test_ops_that_nothing_reads_are_no_part_of_what_is_judged() -> None:
    program = export_program(load_model(Heads().eval()), inputs=[{"x": X}])
    dead = unread_nodes(program)
    assert sum("linear" in name for name in dead) in (0, 2)
    assert not dead & float_nodes(program, ("op",))


def right(_: Tensor) -> Judgement:
    return Judgement("rounding", 0.0, 0.0)


def where(candidate: Tensor, predicted: Tensor, *exempt: Tensor) -> list[bool] | None:
    found = differing(candidate, predicted, right, exempt)
    return None if found is None else found.where.tolist()


def test_only_what_differs_by_more_than_rounding_is_asked_about() -> None:
    predicted = torch.tensor([1.0, 2.0, torch.nan, 1e-9])
    assert where(torch.tensor([1.0 + 1e-7, 2.1, torch.nan, 0.0]), predicted.double()) == [False, True, False, False]
    assert where(torch.zeros(2), torch.zeros(3)) is None
    assert where(torch.tensor([0.0, 1.0]), torch.tensor([-torch.inf, 1.0])) == [True, False]
    assert where(torch.ones(3), torch.ones(3)) is None


def test_exempt_elements_are_not_asked_about_and_hide_no_others() -> None:
    candidate, predicted = torch.tensor([1.1, 2e30]), torch.tensor([1.0, 1e30])
    assert where(candidate, predicted) == [False, True]
    assert where(candidate, predicted, torch.tensor([False, True])) == [True, False]
    assert where(candidate, predicted, torch.tensor([False, True]), torch.tensor([True, False])) is None


class Scaled(nn.Module):
    """Scales rows, and returns the first, where these inputs hide by how much."""

    def __init__(self, first: float = 1.0, others: float = 1e7) -> None:
        super().__init__()
        self.first, self.others = first, others

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(5)[:, None]
        return torch.tanh((x * torch.where(rows == 0, self.first, self.others))[:, 0])


def test_a_mistake_beside_large_elements_that_nothing_reads_is_one(tmp_path: Path) -> None:
    inputs = {"x": X + 30}
    assert checked(Scaled(), Scaled(others=2e7), inputs, tmp_path) == (True, [])
    ok, sites = checked(Scaled(), Scaled(first=1.01, others=2e7), inputs, tmp_path)
    assert not ok and sites


class Shares(nn.Module):
    """Shares of scores, of which the hidden ones are minus infinity, or zero by mistake."""

    def __init__(self, lowest: float = -torch.inf) -> None:
        super().__init__()
        self.lowest = lowest

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        hidden = torch.arange(6) >= length[:, None]
        return (torch.sin(x).masked_fill(hidden, self.lowest) / 2).softmax(-1)


def test_what_a_softmax_takes_for_a_score_is_read(tmp_path: Path) -> None:
    inputs = {"x": X[:, 0].contiguous(), "length": torch.tensor([6, 3, 5])}
    ok, sites = checked(Shares(), Shares(0.0), inputs, tmp_path)
    assert not ok and any("masked_fill" in site or "div" in site for site in sites)


class Seeing(nn.Module):
    """Attention by hand, with a mask that is given."""

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        least = torch.finfo(x.dtype).min
        scores = torch.matmul(x, torch.sin(x).transpose(1, 2)) + torch.where(hidden, least, 0.0)[:, None]
        return torch.matmul(scores.softmax(-1), x)


def test_f73_a_softmax_does_not_read_the_scores_that_a_mask_hides() -> None:
    hidden = torch.zeros(X.shape[:2], dtype=torch.bool)
    hidden[:, :2] = True
    inputs = {"x": X, "hidden": hidden}
    program = export_program(load_model(Seeing().eval()), inputs=[inputs])
    node = next(node for node in program.graph.nodes if "aten.matmul" in str(node.target))
    scores = read_by_softmax(program.graph)[1]
    of_hidden = hidden[:, None].expand(-1, X.shape[1], -1)
    assert unread(program, inputs, {node.name: of_hidden}, scores) == {node.name}
    assert unread(program, inputs, {node.name: of_hidden}) == set()
    assert unread(program, inputs, {node.name: of_hidden}, scores, {node.name}) == set()
    assert unread(program, inputs, {node.name: torch.ones_like(of_hidden)}, scores) == set()


class TwoShares(nn.Module):
    """Two tensors of scores, which one op takes apart."""

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        one, other = torch.sin(x).unbind(-1)
        return (one + other).masked_fill(hidden, -torch.inf).softmax(-1)


def test_scores_that_are_taken_apart_are_followed_in_each_part() -> None:
    hidden = torch.tensor([[True, False, False, False], [True, True, False, False]])
    inputs = {"x": torch.randn(2, 4, 2), "hidden": hidden}
    program = export_program(load_model(TwoShares().eval()), inputs=[inputs])
    node = next(node for node in program.graph.nodes if "aten.sin" in str(node.target))
    mask = hidden[..., None].expand(-1, -1, 2).clone()
    assert unread(program, inputs, {node.name: mask}, read_by_softmax(program.graph)[1]) == {node.name}


is_read_by = _Lane.is_read_by


class Layers(nn.Module):
    """Layers that add to a stream, of which the first or the last number is returned."""

    def __init__(self, *, is_read: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.is_read = is_read

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.sin(layer(x))
        return x[0] if self.is_read else x[1]


@pytest.mark.parametrize("is_read", [True, False])
def test_elements_that_cover_those_of_a_later_layer_follow_them(is_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"x": X[0]}
    program = export_program(load_model(Layers(is_read=is_read).eval()), inputs=[inputs])
    nodes = [node for node in program.graph.nodes if "aten.sin." in str(node.target)]
    marked = {node.name: torch.zeros(5, 6, dtype=torch.bool) for node in nodes}
    for mask in marked.values():
        mask[0] = True
    followed: list[int] = []
    monkeypatch.setattr(_Lane, "is_read_by", lambda lane, *args: followed.append(1) or is_read_by(lane, *args))
    assert unread(program, inputs, marked) == (set() if is_read else set(marked))
    in_turn = len(followed)
    followed.clear()
    assert [unread(program, inputs, {name: mask}) for name, mask in marked.items()] == [
        set() if is_read else {name} for name in marked
    ]
    if is_read:
        assert in_turn < len(followed), "one lane at a time"
