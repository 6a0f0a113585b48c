"""The lane of other values, on graphs made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from glassengine.judge.exclusions.perturbation import WHOLE, Followed, OtherValues, Source, far_from

aten = torch.ops.aten


def test_the_lane_forgets_what_is_settled_and_knows_nothing_below_the_whole() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    first, second = graph.call_function(aten.neg.default, (x,)), graph.call_function(aten.abs.default, (x,))
    lane = OtherValues(lambda node, others: node.target(others[x]))  # type: ignore[operator]
    value = torch.tensor([1.0, -2.0])
    assert lane.below(first, value) is value, "it reads nothing else"
    assert lane.keep(x, torch.tensor([1.0, 2.0]), value) and not lane.keep(second, value.clone(), value)
    assert lane.below(second, value.abs()).tolist() == [1.0, 2.0]
    found = lane.of(x, value)
    assert found is not None and found.tolist() == [False, True]
    lane.settle(x)
    assert lane.of(x, value) is None
    lane.keep(x, WHOLE, value)
    whole = lane.of(x, value)
    assert lane.below(first, value) is WHOLE and whole is not None and bool(whole.all())


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
    found = followed.of(picked, env)
    assert found is not None and found.tolist() == [True, True]
    followed.settle(picked)
    assert followed.of(picked, env) is None


@pytest.mark.parametrize("given", [[0.0, 1.0, -3.0], [0, 5, -5], [True, False]])
def test_other_values_are_other_values(given: list[Any]) -> None:
    value = torch.tensor(given)
    assert bool((far_from(value) != value).all()) and far_from(value).dtype is value.dtype
    assert far_from((value, 3))[1] == 3
