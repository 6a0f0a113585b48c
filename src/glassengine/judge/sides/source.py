"""The first side of a check: the untouched model, or, of a stored program, the file as it is, node by node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from glassengine.backends.accuracy.calibration import kernels_of
from glassengine.judge.cases import Case, StepInputs
from glassengine.judge.replay.replay import Cut, Replay
from glassengine.judge.sides.arguments import Arguments
from glassengine.judge.sides.module import ModuleSide
from glassengine.judge.sides.protocol import RUNTIME, Guarantee, Observed, Place, Side
from glassengine.judge.step_inputs import Given
from glassengine.numerics.ops import Accumulation
from glassengine.program import LoadedModel, Program


@dataclass
class SourceSide(Side):
    """A stored program as it is: an ONNX file run without optimization, or the graph of a .pt2 file.

    Args:
        module: Gives the values of a step by op site.
        program: The baseline program, which is this side's own as well.
        replay: Judges each op.
    """

    module: Any
    program: Program = field(kw_only=True)
    replay: Replay = field(kw_only=True)
    place: Place = field(default=Place.SOURCE, kw_only=True)

    @cached_property
    def counterparts(self) -> Mapping[str, str]:
        """Every node is its own."""
        return {site.node: site.node for site in self.program.sites if site.kind == "op"}

    def chooser(self) -> ModuleSide:
        """Return a side of the same module, to be run without being judged."""
        return ModuleSide(self.module, self.program)

    def module_outputs(self) -> Mapping[str, torch.Tensor]:
        """Return nothing: a file knows no modules."""
        return {}

    def begin(self, case: Case) -> None:
        """Forget the values of an earlier case."""
        self._values: dict[str, torch.Tensor] = {}
        self._returned: Mapping[str, torch.Tensor] = {}

    def step(self, inputs: Given) -> None:
        """Run the file once."""
        assert not isinstance(inputs, StepInputs)
        with torch.no_grad():
            found = self.module.values(inputs)
            # Of an ONNX file as a user runs it: in a session of its own.
            self._returned = self.module.returned(inputs, found) if hasattr(self.module, "returned") else {}
        sites = self.program.sites
        self._values = {site.node: found[site.name] for site in sites if site.kind == "op" and site.name in found}
        self.replay.begin_step(inputs, self._values)

    def observed(self, node: str) -> list[Observed]:
        """Return the value of `node`."""
        if node not in self._values:
            return []
        return [Observed(self._values[node], self.program.sites.by_node[node][0].name, "name")]

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return the results of the file."""
        return {name: self._returned.get(name, one) for name, one in self.results_by_node(self.program).items()}


def untouched(model: LoadedModel, program: Program, arguments: Arguments | None = None) -> ModuleSide | SourceSide:
    """Return the side of the baseline itself.

    Args:
        model: The baseline.
        program: Its export, or the stored program.
        arguments: How inputs become arguments of a module's forward.
    """
    if model.stored is None:
        segments = Replay(program, cut=Cut.SEGMENT)
        return ModuleSide(model.module, program, replay=segments, state=model.state, arguments=arguments)
    if program.onnx is not None:  # run by kernels of its own
        accumulation = Accumulation(kernels=kernels_of(RUNTIME))
        replay = Replay(program, compiled=True, wide_operands="products", accumulation=accumulation)
        return SourceSide(model.module, program=program, replay=replay)
    return SourceSide(model.module, program=program, replay=Replay(program), guarantee=Guarantee.STORED_OPS)
