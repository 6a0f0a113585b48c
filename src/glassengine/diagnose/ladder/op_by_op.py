"""The level op-by-op: nodes of the program, each compiled and run by itself by the back-end.

A whole program of them costs one compilation per distinct node: without `--all-levels` only what the engine got wrong
is compiled alone, with its neighbors: is the op itself miscompiled, or only together with others?
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Interpreter, Node

from glassengine.backends.registry import choose_graph_backend
from glassengine.errors import UsageError
from glassengine.frontends.eager_debug import OpRunner, op_runner
from glassengine.judge.graphs.by_name import SitePair
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.program import ProgramSide
from glassengine.judge.sides.protocol import Guarantee, Place
from glassengine.judge.verdict.score import Score
from glassengine.numerics.float64 import FLOAT32_SUMS, Accumulation
from glassengine.program.representation.naming import of_any_layout, op_name
from glassengine.program.representation.program import Program
from glassengine.results import FLAGGED, Hint, worst


@dataclass
class OpByOpSide(ProgramSide):
    """The program, with the nodes of `alone` (None: all) compiled one by one by `runner`; only these are observed."""

    runner: OpRunner = field(kw_only=True)
    alone: frozenset[str] | None = field(kw_only=True)

    def observable(self) -> frozenset[str]:
        """Return the nodes that are compiled alone and have a counterpart."""
        known = super().observable()
        return known if self.alone is None else known & self.alone

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Interpret one step; see `ProgramSide.run`."""
        by_node = {port.node: inputs[port.name] for port in self.program.inputs} | self.program.weights()
        graph = self.program.graph
        with torch.no_grad():
            values = _Alone(self).run(
                *(by_node.get(node.name) for node in graph.find_nodes(op="placeholder")), enable_io_processing=False
            )
        by_output = {
            spec.arg.name: value
            for spec, value in zip(self.program.exported.graph_signature.output_specs, values, strict=True)
        }
        return {name: by_output[node] for name, node in self.program.output_nodes.items()}


class _Alone(Interpreter):
    def __init__(self, side: OpByOpSide) -> None:
        super().__init__(side.program.exported.graph_module)
        self._side = side

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(of_any_layout(target), args, kwargs)

    def run_node(self, n: Node) -> Any:
        side = self._side
        is_alone = side.alone is None or n.name in side.alone
        if n.op != "call_function" or not is_alone or not isinstance(n.target, torch._ops.OpOverload):
            value = super().run_node(n)
        else:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            value = side.runner.run(n.target, args, kwargs, n.meta)
        if n.op == "call_function":
            side.keep(n, value)
        return value


def op_by_op(
    baseline: Program,
    program: Program,
    pairs: Mapping[str, SitePair],
    backend: str | None,
    *,
    around: Iterable[str] | None = None,
    accumulation: Accumulation = FLOAT32_SUMS,
) -> OpByOpSide:
    """Return the side.

    Args:
        baseline: The baseline program, which judges.
        program: What is run: the baseline's own, after its passes.
        pairs: Baseline node -> pair.
        backend: What compiles; None takes the default one.
        around: Baseline nodes to compile alone, with what feeds them and what they feed; None compiles all.
        accumulation: How the back-end sums products.

    Raises:
        UsageError: The back-end builds whole engines only, or the program is an ONNX graph.
        BackendError: It cannot be used here.
    """
    if program.onnx is not None:
        raise UsageError("an ONNX file is run node by node already")
    runner = op_runner(type(choose_graph_backend(backend)))
    alone = None
    if around is not None:
        nodes = [program.node(pairs[name].candidate.node) for name in around if name in pairs]
        alone = frozenset(near.name for node in nodes for near in (node, *node.all_input_nodes, *node.users))
    dtype: torch.dtype | None = getattr(torch, str(program.metadata.get("dtype")), None)
    replay = Replay(baseline, compiled=True, dtype=dtype, accumulation=accumulation)
    guarantee = Guarantee.EVERY_OP if around is None else Guarantee.NEAR_THE_ERROR
    return OpByOpSide(
        program, pairs, place=Place.OP_BY_OP, guarantee=guarantee, replay=replay, runner=runner, alone=alone
    )


def explain(engine: Score, alone: Score) -> None:
    """Say of each op that the engine got wrong whether it is wrong when it is compiled alone."""
    verdicts: dict[str, str] = {}
    for pair in alone.pairs:
        verdicts[pair.site] = worst([verdicts.get(pair.site, "identical"), pair.verdict])  # type: ignore[list-item]
    for node, found in engine.divergences.items():
        verdict = verdicts.get(alone.program.sites.by_node[node][0].name)
        if verdict is None:
            continue
        op = op_name(alone.program.node(node))
        hint = Hint(
            "other", f"{op} compiled alone is right: it takes its neighbors to go wrong", 0.9, evidence="fusion"
        )
        if verdict in FLAGGED:
            hint = Hint("other", f"{op} compiled alone is {verdict} as well", 0.9, evidence="kernel")
        engine.divergences[node] = dataclasses.replace(found, hints=(hint, *found.hints))
