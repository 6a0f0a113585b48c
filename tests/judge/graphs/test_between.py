"""Walks of a graph: nearest nodes first, each once, to a depth, within a region, and through views."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from glassengine.judge.graphs.between import down, readers_of, up, walk
from glassengine.program.representation.naming import op_name


def made(x: Tensor) -> tuple[Tensor]:
    y = x.sin()
    return (y.reshape(-1).exp() + y.reshape(-1) * y.reshape(-1),)


def nodes() -> dict[str, Node]:
    return {node.name: node for node in make_fx(made)(torch.ones(2, 3)).graph.nodes}


def names(found: object) -> list[str]:
    return [op_name(node) for node in found]  # type: ignore[attr-defined]


def test_up_is_nearest_first_and_each_once() -> None:
    graph = nodes()
    assert names(up(graph["add"])) == ["exp", "mul", "view", "view", "view", "sin", "input"]
    assert names(up(graph["add"], 1)) == ["exp", "mul"]
    assert names(up(graph["add"], 0)) == []


def test_down_stays_within_a_region() -> None:
    graph = nodes()
    inside = {graph[name] for name in ("sin", "exp", "add")} | {one for name, one in graph.items() if "view" in name}
    assert names(down([graph["sin"]], inside)) == ["view", "view", "view", "exp", "add"]
    assert names(down([graph["sin"]], depth=1)) == ["view", "view", "view"]


def test_the_start_of_a_walk_is_not_found_again() -> None:
    graph = nodes()
    assert graph["sin"] not in walk([graph["sin"]], lambda one: [*one.users, *one.all_input_nodes])


def test_readers_are_found_behind_views() -> None:
    graph = nodes()
    assert sorted(names(readers_of(graph["sin"]))) == ["exp", "mul"]
    assert names(readers_of(graph["sin"], lambda one: False)) == ["view", "view", "view"]
