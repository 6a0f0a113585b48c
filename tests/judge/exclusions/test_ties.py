"""Whether a choice that a candidate made is a legal one: ops that choose, on values made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from glassengine.judge.exclusions.ties import tied_choices
from glassengine.numerics.judgement import unit_roundoff

aten = torch.ops.aten
U = unit_roundoff(torch.float32)
CLOSE, APART = 1 + U, 1 + 99 * U


def tied(target: Any, *args: Any, chosen: Any, settled: Tensor | None = None, **kwargs: Any) -> list[Any] | None:
    """Return where another choice than the exact one is legal, for the first result but values."""
    graph = Graph()
    nodes = [graph.placeholder(f"x{i}") if isinstance(arg, Tensor) else arg for i, arg in enumerate(args)]
    op = graph.call_function(target, tuple(nodes), kwargs)
    values = [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
    made = target(*values, **kwargs)
    exact = made[1] if isinstance(made, (tuple, list)) else made
    known = {} if settled is None else {"x0": settled.double()}
    found = tied_choices(op, tuple(values), exact, torch.tensor(chosen), U, known)
    return None if found is None else found.tolist()


@pytest.mark.parametrize(("second", "is_legal"), [(CLOSE, True), (APART, False)])
def test_the_other_of_two_close_values_may_be_the_largest(second: float, is_legal: bool) -> None:
    x = torch.tensor([1.0, second, 0.0], dtype=torch.float64)
    assert tied(aten.argmax.default, x, 0, chosen=0) is is_legal
    assert tied(aten.argmax.default, x, 0, chosen=2) is False, "planted: a value that is far below"
    assert tied(aten.argmax.default, x, 0, chosen=7) is None, "planted: there is no such place"
    assert tied(aten.argmax.default, x, 0, chosen=0, settled=x) is False, "rounding has no part in these values"


@pytest.mark.parametrize(("limit", "is_legal"), [(CLOSE, True), (APART, False)])
def test_a_comparison_may_come_out_otherwise_beside_its_limit(limit: float, is_legal: bool) -> None:
    found = tied(aten.gt.Scalar, torch.tensor([1.0, 5.0]), limit, chosen=[True, False])
    assert found == [is_legal, False]


def test_the_largest_in_any_order_are_the_same_ones() -> None:
    x = torch.tensor([3.0, 1.0, 2.0])
    assert tied(aten.topk.default, x, 2, 0, True, False, chosen=[2, 0]) == [True, True]
    assert tied(aten.topk.default, x, 2, 0, True, True, chosen=[2, 0]) == [False, False]
    assert tied(aten.topk.default, x, 2, 0, True, False, chosen=[0, 1]) != [True, True], "planted: another one"
    assert tied(aten.topk.default, x, 2, 0, True, False, chosen=[0, 0]) != [True, True], "planted: one of them twice"


def test_equal_values_change_places_unless_the_sort_is_stable() -> None:
    x = torch.tensor([4, 4, 1])
    assert tied(aten.sort.default, x, 0, True, chosen=[1, 0, 2]) == [True, True, True]
    assert tied(aten.sort.stable, x, stable=True, dim=0, descending=True, chosen=[1, 0, 2]) is None
    assert tied(aten.sort.default, x, 0, True, chosen=[0, 2, 1]) == [False] * 3, "planted: not in order"


def test_a_pool_takes_either_of_two_equal_values_of_its_plane() -> None:
    x = torch.tensor([[[[1.0, 1.0], [0.0, 0.5]]], [[[1.0, 0.0], [0.0, 0.0]]]])
    legal = tied(aten.max_pool2d_with_indices.default, x, [2, 2], chosen=[[[[1]]], [[[0]]]])
    assert legal == [[[[True]]], [[[True]]]]
    wrong = tied(aten.max_pool2d_with_indices.default, x, [2, 2], chosen=[[[[3]]], [[[0]]]])
    assert wrong is not None and wrong[0] == [[[False]]]


def test_other_ops_choose_nothing() -> None:
    assert tied(aten.neg.default, torch.ones(2), chosen=[1.0, 1.0]) is None
