"""Introduced against inherited, on a small graph with a skip connection and a cache."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import fx, nn

from glassengine.diagnose import check
from glassengine.judge.site_pairs import place_of
from glassengine.judge.verdict.origins import OriginTracker, with_proofs
from glassengine.report import terminal_check
from glassengine.results import Comparison, Divergence, Hint


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


def visit(follow: OriginTracker, nodes: dict[str, fx.Node], verdicts: dict[str, Any]) -> dict[str, bool]:
    follow.begin_step()
    return {name: follow.visit(nodes[name], verdicts.get(name)).inherited for name in "abcde"}


def test_everything_after_the_origin_is_inherited() -> None:
    follow = tracker()
    found = visit(follow, graph(), {"a": "rounding", "b": "wrong", "c": "wrong", "d": "wrong", "e": "identical"})
    assert list(follow.origins) == ["b"]
    assert found == {"a": False, "b": False, "c": True, "d": True, "e": False}


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
    assert list(follow.origins) == ["b"] and follow.origins["b"] == "wrong"


def test_the_cache_carries_blame_into_the_next_step() -> None:
    nodes = graph()
    program = SimpleNamespace(
        inputs=(SimpleNamespace(name="past", node="x"),), caches={"past": "present"}, output_nodes={"present": "c"}
    )
    follow = tracker(program)
    visit(follow, nodes, {"a": "rounding", "b": "rounding", "c": "wrong", "d": "wrong"})
    found = visit(follow, nodes, {"a": "wrong", "b": "wrong", "c": "wrong", "d": "wrong"})
    assert list(follow.origins) == ["c"] and found["a"]


def test_what_replay_found_clean_is_no_origin_however_long_the_way_from_one() -> None:
    follow, nodes = tracker(), graph()
    follow.begin_step()
    follow.visit(nodes["a"], "wrong", introduced=True)
    follow.visit(nodes["b"], "rounding", introduced=False)
    found = follow.visit(nodes["c"], "wrong", introduced=False)
    assert found.inherited and found.verdict == "wrong" and list(follow.origins) == ["a"]


def test_without_an_origin_above_the_rounding_of_many_ops_is_no_mistake() -> None:
    follow, nodes = tracker(), graph()
    follow.begin_step()
    found = follow.visit(nodes["a"], "suspicious", introduced=False)
    assert found.verdict == "rounding" and not found.inherited
    found = follow.visit(nodes["b"], "wrong", introduced=False)
    assert found.verdict == "suspicious" and found.reason and "no op makes an error" in found.reason
    assert not follow.origins


def test_below_a_tie_only_replay_counts() -> None:
    follow, nodes = tracker(), graph()
    follow.begin_step()
    follow.visit(nodes["a"], "rounding", introduced=False, tied=True)
    assert follow.visit(nodes["b"], "wrong", introduced=False).verdict == "rounding"
    assert follow.visit(nodes["c"], "wrong").verdict == "rounding"
    assert follow.visit(nodes["d"], "wrong", introduced=True).verdict == "wrong"
    assert list(follow.origins) == ["d"]


def test_padding_that_differs_counts_where_nobody_can_leave_it_out() -> None:
    follow, nodes = tracker(), graph()
    follow.begin_step()
    follow.visit(nodes["a"], "identical", introduced=False, padding_differs=True)
    assert follow.visit(nodes["e"], "wrong", introduced=False, masked=False).verdict == "rounding"
    follow.visit(nodes["b"], "identical", introduced=False)
    assert follow.visit(nodes["c"], "wrong", masked=False).verdict == "wrong"


def test_what_is_not_finite_comes_from_whatever_origin_is_above() -> None:
    """Padding that is left out of the verdict hides the way."""
    follow, nodes = tracker(), graph()
    follow.begin_step()
    follow.visit(nodes["a"], "wrong", introduced=True)
    follow.visit(nodes["b"], "identical", introduced=False)
    assert follow.visit(nodes["c"], "wrong", is_broken=True).inherited
    assert list(follow.origins) == ["a"]


class Layer(nn.Module):
    def __init__(self, slope: float) -> None:
        super().__init__()
        self.linear, self.slope = nn.Linear(8, 8), slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.leaky_relu(self.linear(x), self.slope)


class Stack(nn.Module):
    def __init__(self, slopes: list[float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(slope) for slope in slopes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Loop(nn.Module):
    """The same without modules: one line, run several times."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(3):
            x = x * (number + 1) - nn.functional.leaky_relu(x, self.slope)
        return x


def checked(baseline: nn.Module, candidate: nn.Module, tmp_path: Path) -> Comparison:
    torch.save({"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    return check(baseline.eval(), candidate=candidate.eval(), inputs=str(tmp_path / "x.pt"))


def screen(result: Comparison) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as captured:
        console.print(terminal_check.check(result))
    return captured.get()


def test_f36_one_mistake_in_every_layer_is_told_once(tmp_path: Path) -> None:
    result = checked(Stack([0.01] * 4), Stack([0.2] * 4), tmp_path)
    first = result.first_divergence
    assert first is not None and first.site == "layers.0/leaky_relu.0"
    assert first.group == "layers.*/leaky_relu.0" and first.num_alike == 4
    assert first.also_at == tuple(f"layers.{n}/leaky_relu.0" for n in (1, 2, 3))
    assert first.to_dict()["also_at"] == list(first.also_at)
    shown = screen(result)
    assert "in every layer (4): layers.*/leaky_relu.0" in shown and "  also " not in shown
    assert "0.2 in the candidate" in shown


def test_f36_in_some_layers(tmp_path: Path) -> None:
    result = checked(Stack([0.01] * 4), Stack([0.01, 0.2, 0.01, 0.2]), tmp_path)
    assert result.first_divergence is not None and result.first_divergence.where == "in 2 of 4 layers"


class Normed(nn.Module):
    """Batch norm, batch norm, layer norm: one place by its name."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(8, eps), nn.BatchNorm1d(8, eps), nn.LayerNorm(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_layers_of_another_op_are_not_counted(tmp_path: Path) -> None:
    result = checked(Normed(1e-5), Normed(1e-2), tmp_path)
    assert result.first_divergence is not None and result.first_divergence.where == "in every layer (2)"


def test_a_mistake_of_one_layer_has_no_group(tmp_path: Path) -> None:
    candidate = copy.deepcopy(Stack([0.01] * 4))
    candidate.layers[2].slope = 0.2  # type: ignore[assignment]
    result = checked(Stack([0.01] * 4), candidate, tmp_path)
    first = result.first_divergence
    assert first is not None and (first.group, first.also_at, first.where) == (None, (), None) and first.leads


def test_f36_one_line_of_a_loop_is_one_mistake(tmp_path: Path) -> None:
    result = checked(Loop(0.01), Loop(0.2), tmp_path)
    assert result.first_divergence is not None and result.first_divergence.where == "in every place (3)"


@pytest.mark.parametrize(
    ("site", "place"),
    [
        ("model.layers.11.mlp/mul.0", "model.layers.*.mlp/mul.0"),
        ("h.3.attn.1@2/add.1", "h.*.attn.*@*/add.1"),
        ("conv2d.w1x1/add.0", "conv2d.w1x1/add.0"),
        ("blocks.0.norm", "blocks.*.norm"),
    ],
)
def test_numbers_in_paths_are_places_alike(site: str, place: str) -> None:
    assert place_of(site, None) == place


def divergence(level: str, node: str, *hints: Hint, step: int = 0) -> Divergence:
    return Divergence(
        level=level, step=step, site=node, node=node, candidate_site=node, source=None, verdict="wrong",
        noise_ratio=9.0, bound_ratio=None, introduced=1.0, inherited=0.0, hints=hints,
    )  # fmt: skip


def test_a_proof_of_the_module_around_explains_what_is_paired_wrongly() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.relu, (x,))
    b = graph.call_function(torch.tanh, (a,))
    apart = graph.call_function(torch.abs, (x,))
    program: Any = SimpleNamespace(nodes={node.name: node for node in graph.nodes})
    proof, guess = Hint("swapped", "exchanged", 0.96, proven=True), Hint("other", "ops differ", 0.5)
    origins = [divergence("candidate", a.name, guess), divergence("candidate, untouched", b.name, proof)]
    assert with_proofs(origins, program)[0].hints == (proof, guess)
    for other in (
        divergence("candidate, untouched", apart.name, proof),  # not made of it
        divergence("engine", b.name, proof),  # another run
        divergence("candidate, untouched", b.name, proof, step=1),
        divergence("candidate, untouched", b.name, guess),
    ):
        assert with_proofs([origins[0], other], program) == [origins[0], other]
