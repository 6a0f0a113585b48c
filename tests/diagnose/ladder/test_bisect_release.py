"""Bisection by outputs: the op is found with few builds, as many as were announced, though looking cures the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.backends import registry
from glassengine.backends.eager import EagerBackend
from glassengine.diagnose.ladder.bisect_release import bisect, most_builds
from glassengine.errors import UsageError
from glassengine.program import export_program, load_inputs, load_model
from glassengine.program.representation.program import Program, copied_graph, rebuilt
from glassengine.progress import Event, Work
from glassengine.testing import models


class Branches(nn.Module):
    """Six blocks of two branches each."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.right = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for left, right in zip(self.left, self.right, strict=True):
            x = x + torch.tanh(left(x)) * torch.sigmoid(right(x))
        return x


class Shy(EagerBackend):
    """Planted: the sigmoid of the fourth block is wrong, unless more than five debug outputs are looked at."""

    name = "planted"

    def build(self, program: Program, directory: Path) -> None:
        if sum(name.startswith("dbg.") for name in program.output_nodes) <= 5:
            graph = copied_graph(program.exported.graph)
            node = next(n for n in graph.nodes if n.name == "sigmoid_3")
            node.target = torch.ops.aten.tanh.default
            specs = program.exported.graph_signature.output_specs
            program = program.replace(rebuilt(program.exported, graph, specs))
        super().build(program, directory)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    find = registry.find_backend
    monkeypatch.setattr(registry, "find_backend", lambda name: Shy() if name == "planted" else find(name))
    monkeypatch.setattr("glassengine.engine.run.engine.find_backend", registry.find_backend)


@pytest.fixture
def inputs(tmp_path: Path) -> str:
    torch.save({"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    return str(tmp_path / "x.pt")


def test_errors_hidden_by_debug_outputs_are_found_by_bisection(planted: None, inputs: str) -> None:
    hidden = glass.check(models.drawn(Branches), backend="planted", inputs=inputs)
    found = hidden.first_divergence
    assert found is not None and found.level == "release", "seen with all outputs, the engine is right"
    said: list[Event] = []
    result = glass.check(
        models.drawn(Branches), backend="planted", inputs=inputs, bisect_outputs=True, progress=said.append
    )
    found = result.first_divergence
    assert found is not None and (found.level, found.site) == ("bisection", "./sigmoid.3")
    (announced,) = [event.text for event in said if event.text.startswith("bisecting")]
    builds = [event.text for event in said if event.text.startswith("building with outputs")]
    assert announced == f"bisecting among 35 ops: at most {most_builds(35)} builds"
    assert len(builds) <= most_builds(35) == 5
    assert found.hints[0].text == f"{len(builds)} builds: everything that feeds this op is right"


def test_a_release_engine_that_is_right_is_built_once(inputs: str) -> None:
    said: list[Event] = []
    options = {"backend": "eager", "inputs": inputs, "bisect_outputs": True, "progress": said.append}
    result = glass.check(models.drawn(Branches), **options)  # type: ignore[arg-type]
    assert [level.name for level in result.levels] == ["program", "release"]
    assert not any(event.work is Work.BISECTING for event in said)
    # Only results were looked at, so that nobody takes it for a check of every op.
    assert not result.ok and result.too_little
    assert glass.check(models.drawn(Branches), min_coverage=0, **options).ok  # type: ignore[arg-type]


def test_a_model_as_candidate_is_not_bisected(inputs: str) -> None:
    with pytest.raises(UsageError, match="for engines"):
        glass.check(models.drawn(Branches), candidate=models.drawn(Branches), inputs=inputs, bisect_outputs=True)


def test_every_op_is_found_with_no_more_builds_than_announced(inputs: str) -> None:
    program = export_program(load_model(models.drawn(Branches)), inputs=load_inputs(inputs))
    nodes = [node.name for node in program.graph.nodes if node.op == "call_function"]
    below: dict[str, set[str]] = {}
    for node in reversed(program.graph.nodes):
        below[node.name] = {node.name}.union(*(below[user.name] for user in node.users))
    last = next(iter(program.output_nodes.values()))
    for guilty in nodes:

        def observe(asked: Any, guilty: str = guilty) -> tuple[list[str], bool]:
            return [node for node in asked if node in below[guilty]], True

        found = bisect(program, nodes, last, observe)
        assert found.num_builds <= most_builds(len(nodes))
        assert (found.first_wrong or last) == guilty and found.suspects == (guilty,)
