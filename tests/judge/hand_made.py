"""A small program and sides of it that were observed at given numbers: no model, no back-end, no export of a port."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.judge.cases import Case, Given, StepInputs, by_name, module_cases
from glassengine.judge.sides.protocol import Observed, Side
from glassengine.judge.verdict.conclude import findings_of
from glassengine.judge.verdict.run import run_cases
from glassengine.judge.verdict.score import Score
from glassengine.program import Program, export_program, load_model
from glassengine.results import Comparison, Policy

Edit = Callable[[Tensor], Tensor]


class Chain(nn.Module):
    """x -> sin -> mul -> exp -> add, which reads sin as well; tanh beside it is a result of its own."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wave = torch.sin(x)
        return torch.exp(wave * 0.5) + wave, torch.tanh(x)


OPS = ("sin", "mul", "exp", "add", "tanh")
INPUTS = {"x": torch.randn(8, 32, generator=torch.Generator().manual_seed(0))}


@functools.cache
def chain() -> Program:
    """Return the program of `Chain`."""
    return export_program(load_model(Chain()), inputs=[INPUTS])


def case(num_steps: int = 1) -> Case:
    """Return what it is run on."""
    return module_cases([INPUTS] * num_steps)[0]


@dataclass
class Numbers(Side):
    """The baseline's program with some values changed.

    Args:
        baseline: What computes everything else.
        edits: Node -> what is made of its value; what reads it reads that.
        dumped: Node -> what is observed in place of its value, which nobody reads.
        seen: Nodes that are observed; None for all.
    """

    baseline: Program
    edits: Mapping[str, Edit] = field(default_factory=dict)
    dumped: Mapping[str, Edit] = field(default_factory=dict)
    seen: Collection[str] | None = None
    _values: dict[str, Tensor] = field(default_factory=dict, init=False)
    _results: dict[str, Tensor] = field(default_factory=dict, init=False)

    def begin(self, case: Case) -> None:
        """Nothing outlives a case."""
        if self.replay is not None:
            self.replay.begin()

    def step(self, inputs: Given) -> None:
        """Compute one step."""
        assert not isinstance(inputs, StepInputs)
        named = by_name(inputs)
        values: dict[str, Any] = {port.node: named[port.name] for port in self.baseline.inputs}
        for node in self.baseline.graph.nodes:
            if node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: values[n.name])
                value = node.target(*args, **kwargs)
                values[node.name] = self.edits.get(node.name, lambda same: same)(value)
        self._results = {name: values[node] for name, node in self.baseline.output_nodes.items()}
        seen = OPS if self.seen is None else self.seen
        self._values = {name: self.dumped.get(name, lambda same: same)(values[name]) for name in seen}
        if self.replay is not None:
            self.replay.begin_step(inputs, self._values)

    def observed(self, node: str) -> list[Observed]:
        """Return the number that stands for `node`."""
        return [Observed(self._values[node], f"own {node}", "name")] if node in self._values else []

    def results(self) -> Mapping[str, Tensor]:
        """Return the results, as they were computed."""
        return self._results


def scored(program: Program, sides: Sequence[Side], num_steps: int = 1) -> list[Score]:
    """Return the scores of sides that ran the case."""
    scores = [Score(side, program) for side in sides]
    run_cases(program, [case(num_steps)], None, scores, coarsest=None, on_step=lambda *_: None)
    return scores


def concluded(program: Program, scores: Sequence[Score], **options: Any) -> Comparison:
    """Return what is concluded of scores."""
    told: dict[str, Any] = {"environment": {}, "severity": {}, **options}
    severity = told.pop("severity")
    policy = Policy(told.pop("fail_on", "wrong"), told.pop("min_coverage", 0.9))
    found = findings_of(
        program, scores, [], severity, baseline="a", candidate="b", min_coverage=policy.min_coverage, **told
    )
    return found.conclude(policy)
