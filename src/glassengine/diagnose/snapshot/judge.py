"""The execution of a snapshot judged op by op: what a back-end makes of its graph, and what was recorded.

The graph in float64 is the reference, as the exported program is in `glass check`. The graph is compiled twice: with
the value of every op among its results, judged by reverse replay, and as it is, judged at its results.
"""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from glassengine import environment
from glassengine.backends.calibration import kernels_of
from glassengine.backends.protocol.backend import Backend, CompilingGraphs
from glassengine.executable.graph import CapturedGraph, input_spec
from glassengine.executable.snapshot.reader import Snapshot
from glassengine.judge.cases import Case, Given, StepInputs, module_cases
from glassengine.judge.graphs.cut import NodeRecorder, clone
from glassengine.judge.graphs.flat import with_values
from glassengine.judge.graphs.run import GraphRun, compile_run, program_of, without_numbers
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.protocol import Guarantee, Observed, Place, Side
from glassengine.judge.verdict.conclude import findings_of
from glassengine.judge.verdict.run import run_cases
from glassengine.judge.verdict.score import Score
from glassengine.numerics.float64 import Accumulation
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.program import Program, copied_graph
from glassengine.progress import Progress, Work
from glassengine.results import Comparison, Policy, Skipped


@dataclass
class _GraphSide(Side):
    """A compiled graph, or results that were recorded, as a side of a check.

    Attributes:
        baseline: The reference.
        run: Gives the values of `nodes`, in order.
        nodes: Of the reference.
    """

    baseline: Program
    run: Callable[[], Sequence[Any]]
    nodes: Sequence[str]
    replay: Replay | None = field(default=None, kw_only=True)
    _values: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    def begin(self, case: Case) -> None:
        """Nothing outlives a case."""

    def step(self, inputs: Given) -> None:
        """Run the graph."""
        assert not isinstance(inputs, StepInputs)
        values = dict(zip(self.nodes, self.run(), strict=True))
        self._values = {node: value for node, value in values.items() if isinstance(value, torch.Tensor)}
        if self.replay is not None:
            self.replay.begin_step(inputs, self._values)

    def observed(self, node: str) -> list[Observed]:
        """Return the value of `node`."""
        if node not in self._values:
            return []
        return [Observed(self._values[node], self.baseline.sites.by_node[node][0].name, "name+fingerprint")]

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return the results of the graph."""
        return self.results_by_node(self.baseline)


def judge_snapshot(
    snapshot: Snapshot,
    graph: CapturedGraph,
    arguments: Sequence[Any],
    backend: Backend,
    progress: Progress,
) -> Comparison:
    """Judge what `backend` makes of a snapshot's graph, and the outputs that were recorded.

    Args:
        snapshot: Where the recorded outputs are.
        graph: Its graph.
        arguments: Its inputs, in order.
        backend: What compiles.
        progress: Called with an event when a stage begins.

    Raises:
        UsageError: The graph cannot be judged: it writes in place.
        BackendError: The back-end failed.
    """
    graph, arguments = without_numbers(graph, arguments)
    graph, arguments, is_random = _without_draws(graph, arguments)
    program = program_of(graph, arguments)
    placeholders = [node.name for node in program.graph.find_nodes(op="placeholder")]
    ports = {port.node: port.name for port in program.inputs}
    given = {ports[node]: value for node, value in zip(placeholders, arguments, strict=True) if node in ports}
    results = list(program.output_nodes.values())
    ops = [node.name for node in program.graph.nodes if is_tensor_node(node)]
    if not isinstance(backend, CompilingGraphs):
        # Converters decompose ops of several results, and lose the name of one that is a result of the graph.
        parts = {node.name for node in program.graph.nodes if node.target is operator.getitem}
        ops = [name for name in ops if name not in parts or name in results]
    judged = {name for name in results if name in ops}

    def run_of(run: GraphRun) -> Callable[[], Sequence[Any]]:
        return lambda: run([clone(a) if isinstance(a, torch.Tensor) else a for a in arguments])

    accumulation = Accumulation(kernels=kernels_of(backend.name))
    sides = []
    skipped = []
    if is_random and snapshot.meta.get("backend") != "eager":
        skipped.append(
            Skipped("*", "baseline", "what was recorded was drawn by another generator", level=Place.RECORDED)
        )
    elif snapshot.outputs is not None:
        values = _recorded(snapshot, program)
        kept = [node for node in values if node in judged]
        options: dict[str, Any] = {"place": Place.RECORDED, "guarantee": Guarantee.RESULTS}
        sides.append(_GraphSide(program, lambda: [values[n] for n in kept], kept, **options))
    with tempfile.TemporaryDirectory(prefix="glassengine-replay-") as folder:
        asked = ((Place.ENGINE, ops), (Place.RELEASE, [name for name in dict.fromkeys(results) if name in judged]))
        for level, nodes in asked:
            progress(Work.COMPILING.says(f"compiling with {backend.name}, {len(nodes)} results"))
            observable = _returning(graph, program, nodes)
            directory = Path(folder, level)
            directory.mkdir()
            run = compile_run(f"{snapshot.name}/{level}", observable, arguments, backend, directory)
            replay, guarantee = None, Guarantee.RESULTS
            if level is Place.ENGINE:
                guarantee = Guarantee.EVERY_OP
                wide = backend.capabilities.wide_operands
                replay = Replay(
                    program, compiled=backend.name != "eager", wide_operands=wide, accumulation=accumulation
                )
            sides.append(_GraphSide(program, run_of(run), nodes, place=level, guarantee=guarantee, replay=replay))
        progress(Work.JUDGING.says(f"judging {len(ops)} ops"))
        scores = [Score(side, program) for side in sides]
        # The model chooses the tokens of a generation; there are none here.
        run_cases(
            program,
            module_cases([given]),
            None,
            scores,
            coarsest=None,
            accumulation=accumulation,
            on_step=lambda *_: None,
        )
    found = findings_of(
        program,
        scores,
        skipped,
        {},
        baseline=f"{snapshot.name} in float64",
        candidate=backend.name,
        min_coverage=0.0,
        environment=environment.describe(),
    )
    return found.conclude(Policy(min_coverage=0.0))


def _without_draws(graph: CapturedGraph, arguments: Sequence[Any]) -> tuple[CapturedGraph, list[Any], bool]:
    """Return a graph that takes its random values as inputs, its inputs, and whether it has any.

    They are drawn once, in eager mode, by the generators as they are; every side and the reference then have the same.
    """
    draws = [node for node in graph.module.graph.nodes if node.op == "call_function" and traits_of(node).is_random]
    if not draws:
        return graph, list(arguments), False
    recorder = NodeRecorder(graph.module)
    with torch.no_grad():
        recorder.run(*(clone(a) if isinstance(a, torch.Tensor) else a for a in arguments))
    copy = copied_graph(graph.module.graph)
    by_name = {node.name: node for node in copy.nodes}
    *_, last = copy.find_nodes(op="placeholder")
    specs, given = list(graph.inputs), list(arguments)
    for draw in draws:
        drawn = by_name[draw.name]
        parts = [drawn] if isinstance(recorder.values[draw.name], torch.Tensor) else list(drawn.users)
        for part in parts:
            value = recorder.values[part.name]
            with copy.inserting_after(last):
                last = copy.placeholder(f"drawn_{part.name}")
            specs.append(input_spec(value, last.name, "input"))
            given.append(value)
            part.replace_all_uses_with(last)
            copy.erase_node(part)
        if drawn not in parts:
            copy.erase_node(drawn)
    module = GraphModule(graph.module, copy)
    with_values(module, given)
    return replace(graph, module=module, inputs=tuple(specs)), given, True


def _returning(graph: CapturedGraph, program: Program, nodes: Sequence[str]) -> CapturedGraph:
    """Return the graph with the values of `nodes` as its results."""
    copy = copied_graph(program.graph)
    by_name = {node.name: node for node in copy.nodes}
    copy.output_node().args = (tuple(by_name[name] for name in nodes),)
    module = GraphModule(program.exported.graph_module, copy)
    return replace(graph, module=module, output_names=tuple(nodes))


def _recorded(snapshot: Snapshot, program: Program) -> dict[str, torch.Tensor]:
    """Return the recorded outputs by node."""
    kept = {entry.name for entry in snapshot.outputs or () if entry.is_tensor and entry.left_out is None}
    return {node: snapshot.output(name) for name, node in program.output_nodes.items() if name in kept}
