"""Origins at the same place of layers that are alike are told as one."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from glassengine.diagnose import check
from glassengine.judge.verdict.repeated import place_of, with_proofs
from glassengine.report import terminal_check
from glassengine.results import Comparison, Divergence, Hint


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


def test_a_mistake_of_one_layer_has_no_group(tmp_path: Path) -> None:
    candidate = copy.deepcopy(Stack([0.01] * 4))
    candidate.layers[2].slope = 0.2  # type: ignore[assignment]
    result = checked(Stack([0.01] * 4), candidate, tmp_path)
    first = result.first_divergence
    assert first is not None and (first.group, first.also_at, first.where) == (None, (), None) and first.leads


def test_f36_one_line_of_a_loop_is_one_mistake(tmp_path: Path) -> None:
    result = checked(Loop(0.01), Loop(0.2), tmp_path)
    assert result.first_divergence is not None and result.first_divergence.where == "in every layer (3)"


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


def divergence(rung: str, node: str, *hints: Hint, step: int = 0) -> Divergence:
    return Divergence(
        rung=rung, step=step, site=node, node=node, candidate_site=node, source=None, verdict="wrong",
        noise_ratio=9.0, bound_ratio=None, introduced=1.0, inherited=0.0, hints=hints,
    )  # fmt: skip


def test_a_proof_of_the_module_around_explains_what_is_paired_wrongly() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.relu, (x,))
    b = graph.call_function(torch.tanh, (a,))
    apart = graph.call_function(torch.abs, (x,))
    program: Any = SimpleNamespace(graph=graph)
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
