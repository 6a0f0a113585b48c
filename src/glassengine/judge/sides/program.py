"""A program interpreted node by node: a candidate's own export, or the baseline's after a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from glassengine.capture.observers.interpreter import run_program
from glassengine.judge.cases import Case
from glassengine.judge.end_to_end import results_of
from glassengine.judge.graphs.by_name import SitePair
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.protocol import Observed, Side
from glassengine.judge.step_inputs import Given, by_name, empty_caches
from glassengine.program.representation.program import Program


@dataclass
class ProgramSide(Side):
    """A program interpreted: the candidate's own export, or the baseline's after a pass.

    Args:
        program: With weights.
        pairs: Baseline node -> its counterpart in `program`.
        replay: Replays ops of the baseline on this side's values; None leaves the accumulated floor.
    """

    program: Program = field()
    pairs: Mapping[str, SitePair] = field()
    replay: Replay | None = field(default=None, kw_only=True)
    _values: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    _results: Mapping[str, torch.Tensor] = field(default_factory=dict, init=False)
    _caches: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    _wanted: frozenset[str] = field(default=frozenset(), init=False)

    def begin(self, case: Case) -> None:
        """Start with an empty cache."""
        self._values, self._caches = {}, {}
        self._wanted = self.observable()
        if self.replay is not None:
            self.replay.begin()

    def observable(self) -> frozenset[str]:
        """Return the nodes of `program` whose values are kept."""
        return frozenset(self.counterparts.values())

    def step(self, inputs: Given) -> None:
        """Interpret one step."""
        named = by_name(inputs)
        self._caches = self._caches or empty_caches(self.program, named)
        fed = {**named, **self._caches}
        self._values = {}
        outputs = self.run(fed)
        self.arranged.begin_step(fed)
        if self.replay is not None:
            made = ((ours, own) for ours, own in self.counterparts.items() if own in self._values)
            values = {ours: self.arranged(ours, self._values[own]) for ours, own in made}
            self.replay.begin_step(inputs, values, self._caches)
        self._caches = {past: outputs[present] for past, present in self.program.caches.items()}
        self._results = {name: outputs[name] for name in results_of(self.program)}

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return what the program returned."""
        return self._results

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one step, handing every computed node to `keep`; return the program's outputs by name."""
        return run_program(self.program, inputs, self.keep)

    def keep(self, node: torch.fx.Node, value: Any) -> None:
        """Take note of the value of a node of this side's program."""
        if node.name in self._wanted:
            self._values[node.name] = value

    def observed(self, node: str) -> list[Observed]:
        """Return the value of the op paired with `node`."""
        pair = self.pairs.get(node)
        if pair is None or pair.candidate.node not in self._values:
            return []
        return [Observed(self.arranged(node, self._values[pair.candidate.node]), pair.candidate.name, pair.method)]
