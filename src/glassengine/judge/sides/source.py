"""The first side of a check: the untouched model, or, of a stored program, the file as it is, node by node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from glassengine.backends.accuracy.calibration import kernels_of
from glassengine.judge.cases import Case, StepInputs
from glassengine.judge.replay.op import Replay
from glassengine.judge.replay.segment import SegmentReplay
from glassengine.judge.sides.sides import Level, ModuleSide, Observed, by_node
from glassengine.numerics.ops import Accumulation
from glassengine.program import LoadedModel, Program
from glassengine.program.export.export import named_inputs

RUNG = "source"
RUNTIME = "onnxruntime"
"""Back-end whose kernels run an ONNX file as it is (see `program.onnx.session`)."""


@dataclass
class SourceSide:
    """A stored program as it is: an ONNX file run without optimization, or the graph of a .pt2 file.

    Args:
        module: Gives the values of a step by op site.
        program: The baseline program.
        replay: Judges each op.
    """

    module: Any
    program: Program
    replay: Replay
    rung: str = RUNG
    guarantee: str = "judged op by op"
    logits: torch.Tensor | None = None
    level: Level = "op"

    def begin(self, case: Case) -> None:
        """Forget the values of an earlier case."""
        self._values: dict[str, torch.Tensor] = {}

    def step(self, inputs: StepInputs | Mapping[str, Any]) -> None:
        """Run the file once."""
        assert not isinstance(inputs, StepInputs)
        with torch.no_grad():
            found = self.module.values(inputs)
        sites = self.program.sites
        self._values = {site.node: found[site.name] for site in sites if site.kind == "op" and site.name in found}
        self.replay.begin_step(named_inputs(inputs), self._values)

    def observed(self, node: str) -> list[Observed]:
        """Return the value of `node`."""
        if node not in self._values:
            return []
        return [Observed(self._values[node], self.program.sites.by_node[node][0].name, "name")]

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return the results of the file."""
        return by_node(self, self.program)


def untouched(model: LoadedModel, program: Program) -> ModuleSide | SourceSide:
    """Return the side of the baseline itself."""
    if model.stored is None:
        return ModuleSide(model.module, program, replay=SegmentReplay(program), state=model.state)
    if program.onnx is not None:  # run by kernels of its own
        accumulation = Accumulation(kernels=kernels_of(RUNTIME))
        return SourceSide(
            model.module, program, Replay(program, compiled=True, wide_operands=True, accumulation=accumulation)
        )
    return SourceSide(model.module, program, Replay(program), guarantee="judged at ops kept as stored")
