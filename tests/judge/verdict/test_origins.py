"""Introduced against inherited, on a small graph with a skip connection and a cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from glassengine.judge.verdict.origins import OriginTracker


def graph() -> dict[str, fx.Node]:
    """a -> b -> c -> d, and a -> d; split of a feeds e."""
    g = fx.Graph()
    x = g.placeholder("x")
    a = g.call_function(torch.neg, (x,), name="a")
    b = g.call_function(torch.neg, (a,), name="b")
    c = g.call_function(torch.neg, (b,), name="c")
    g.call_function(torch.add, (c, a), name="d")
    s = g.call_function(torch.split, (a, 2), name="s")
    g.call_function(torch.neg, (s,), name="e")
    return {node.name: node for node in g.nodes}


def tracker(program: Any = None) -> OriginTracker:
    return OriginTracker(program or SimpleNamespace(inputs=(), caches={}, output_nodes={}))


def visit(follow: OriginTracker, nodes: dict[str, fx.Node], verdicts: dict[str, Any], step: int = 0) -> dict[str, bool]:
    follow.begin_step()
    return {name: follow.visit(nodes[name], step, verdicts.get(name)).inherited for name in "abcde"}


def test_everything_after_the_origin_is_inherited() -> None:
    follow = tracker()
    found = visit(follow, graph(), {"a": "rounding", "b": "wrong", "c": "wrong", "d": "wrong", "e": "identical"})
    assert list(follow.origins) == ["b"]
    assert found == {"a": False, "b": False, "c": True, "d": True, "e": False}
    assert follow.origins["b"].num_inherited == 2


def test_two_independent_mistakes_are_two_origins() -> None:
    follow = tracker()
    visit(follow, graph(), {"a": "rounding", "b": "wrong", "c": "wrong", "d": "wrong", "e": "wrong"})
    assert list(follow.origins) == ["b", "e"]


def test_a_tensor_that_was_not_observed_passes_blame_on_and_a_clean_one_stops_it() -> None:
    follow = tracker()
    found = visit(follow, graph(), {"a": "wrong", "c": "wrong", "d": "wrong"})
    assert list(follow.origins) == ["a"] and found["c"] and found["d"]
    follow = tracker()
    visit(follow, graph(), {"a": "rounding", "b": "wrong", "c": "rounding", "d": "wrong"})
    assert list(follow.origins) == ["b", "d"]


def test_blame_passes_through_nodes_that_are_no_tensors() -> None:
    follow = tracker()
    found = visit(follow, graph(), {"a": "wrong", "b": "wrong", "c": "wrong", "d": "wrong", "e": "wrong"})
    assert list(follow.origins) == ["a"] and found["e"]


def test_an_origin_has_the_worst_verdict_of_its_chain() -> None:
    follow = tracker()
    visit(follow, graph(), {"a": "rounding", "b": "suspicious", "c": "wrong", "d": "wrong"})
    assert list(follow.origins) == ["b"] and follow.origins["b"].verdict == "wrong"


def test_the_cache_carries_blame_into_the_next_step() -> None:
    nodes = graph()
    program = SimpleNamespace(
        inputs=(SimpleNamespace(name="past", node="x"),), caches={"past": "present"}, output_nodes={"present": "c"}
    )
    follow = tracker(program)
    visit(follow, nodes, {"a": "rounding", "b": "rounding", "c": "wrong", "d": "wrong"})
    found = visit(follow, nodes, {"a": "wrong", "b": "wrong", "c": "wrong", "d": "wrong"}, step=1)
    assert list(follow.origins) == ["c"] and found["a"]


def test_what_replay_found_clean_is_no_origin_however_long_the_way_from_one() -> None:
    follow, nodes = tracker(), graph()
    follow.begin_step()
    follow.visit(nodes["a"], 0, "wrong", introduced=True)
    follow.visit(nodes["b"], 0, "rounding", introduced=False)
    found = follow.visit(nodes["c"], 0, "wrong", introduced=False)
    assert found.inherited and found.verdict == "wrong" and list(follow.origins) == ["a"]


def test_without_an_origin_above_the_rounding_of_many_ops_is_no_mistake() -> None:
    follow, nodes = tracker(), graph()
    follow.begin_step()
    found = follow.visit(nodes["a"], 0, "suspicious", introduced=False)
    assert found.verdict == "rounding" and not found.inherited
    found = follow.visit(nodes["b"], 0, "wrong", introduced=False)
    assert found.verdict == "suspicious" and found.reason and "no op introduced" in found.reason
    assert not follow.origins


def test_below_a_tie_only_replay_counts() -> None:
    follow, nodes = tracker(), graph()
    follow.begin_step()
    follow.visit(nodes["a"], 0, "rounding", introduced=False, tied=True)
    assert follow.visit(nodes["b"], 0, "wrong", introduced=False).verdict == "rounding"
    assert follow.visit(nodes["c"], 0, "wrong").verdict == "rounding"
    assert follow.visit(nodes["d"], 0, "wrong", introduced=True).verdict == "wrong"
    assert list(follow.origins) == ["d"]


def test_padding_that_differs_counts_where_nobody_can_leave_it_out() -> None:
    follow, nodes = tracker(), graph()
    follow.begin_step()
    follow.visit(nodes["a"], 0, "identical", introduced=False, padding_differs=True)
    assert follow.visit(nodes["e"], 0, "wrong", introduced=False, masked=False).verdict == "rounding"
    follow.visit(nodes["b"], 0, "identical", introduced=False)
    assert follow.visit(nodes["c"], 0, "wrong", masked=False).verdict == "wrong"


def test_what_is_not_finite_comes_from_whatever_origin_is_above() -> None:
    """Padding that is left out of the verdict hides the way."""
    follow, nodes = tracker(), graph()
    follow.begin_step()
    follow.visit(nodes["a"], 0, "wrong", introduced=True)
    follow.visit(nodes["b"], 0, "identical", introduced=False)
    assert follow.visit(nodes["c"], 0, "wrong", is_broken=True).inherited
    assert list(follow.origins) == ["a"]
