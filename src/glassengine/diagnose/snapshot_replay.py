"""`glass replay`: run the execution of a snapshot again, without the code that it came from.

Settings that change results (threads, precision of products, random states) are put back as they were recorded.

Op by op the graph in float64 is the reference, as the exported program is in `glass check`. The graph is compiled
twice: with the value of every op among its results, judged by reverse replay, and as it is, judged at its results.
"""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from glassengine import environment
from glassengine.backends.calibration import kernels_of
from glassengine.backends.protocol.backend import Backend, CompilingGraphs
from glassengine.backends.registry import choose_backend
from glassengine.blocks import agree
from glassengine.diagnose.reproduction.bisect_compiler import bisect_graph
from glassengine.diagnose.reproduction.files import require_free
from glassengine.diagnose.reproduction.reproduce import reproduce_bisection
from glassengine.errors import BackendError, CorruptError, UsageError, first_line, logger
from glassengine.executable.graph import CapturedGraph, InputSpec, input_spec
from glassengine.executable.snapshot.keeper import set_rng_states
from glassengine.executable.snapshot.nonfinite import find_origin, kinds_of
from glassengine.executable.snapshot.reader import Snapshot
from glassengine.judge.cases import Case, Given, StepInputs, module_cases
from glassengine.judge.flat_graphs import GraphRun, compile_run, program_of, with_values, without_numbers
from glassengine.judge.pieces import NodeRecorder, clone
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.protocol import Guarantee, Observed, Place, Side
from glassengine.judge.verdict.conclude import findings_of
from glassengine.judge.verdict.run import run_cases
from glassengine.judge.verdict.score import Score
from glassengine.numerics.float64 import Accumulation
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.program import OnnxGraph, Program, copied_graph
from glassengine.progress import Progress, Work, silent
from glassengine.recording.layout.tensors import bytes_of
from glassengine.results import Comparison, Policy, Skipped
from glassengine.results.recorded import Replayed, ReplayedOutput
from glassengine.stores.places import place

_PRECISIONS = ("highest", "high", "medium")
_MAX_THREADS = 4096


def replay(
    snapshot: str | Path,
    *,
    backend: str | None = None,
    compare: bool = False,
    first_nonfinite: bool = False,
    bisect: bool = False,
    reproduction: str | Path | None = None,
    progress: Progress = silent,
) -> Replayed:
    """Run the execution of a snapshot again; at most one of `compare`, `first_nonfinite` and `bisect`.

    Args:
        snapshot: Directory, or packed file.
        backend: What runs it; None for what ran it when it was recorded.
        compare: Judge every op by its float64 result on the same inputs, as `glass check` does. That is so without
            asking where `backend` is another one: no two have the same bits.
        first_nonfinite: Run node by node and say which op made the first NaN or infinity.
        bisect: Find the smallest piece of the graph that the back-end breaks, and the part of the compiler.
        reproduction: With `bisect`: directory for a test of that piece.
        progress: Called with an event when a stage begins.

    Raises:
        UsageError: The request cannot be carried out; the snapshot holds no graph or no values.
        CorruptError: The snapshot is damaged.
        BackendError: The back-end is missing, or cannot compile the graph.
    """
    if sum((compare, first_nonfinite, bisect)) > 1:
        raise UsageError(
            "a replay does one thing at a time", hint="one of --compare, --first-nonfinite and --bisect at a time"
        )
    if reproduction is not None:
        if not bisect:
            raise UsageError("only a bisection has something to reproduce", hint="--bisect --reproduction DIR")
        require_free(place(reproduction))
    found = Snapshot.open(snapshot)
    graph, arguments = captured_graph(found), found.arguments(device=device_of(found))
    recorded = str(found.meta.get("backend") or "")
    chosen, note = choose_backend(backend or recorded or None)
    notes = [*([note] if note else []), *_differences(found)]
    if not recorded and backend is None and not first_nonfinite:
        notes.append(f"the snapshot does not say what ran it; this is {chosen.name}: --backend NAME for another")
    facts: dict[str, Any] = {
        "snapshot": str(snapshot),
        "executable": found.name,
        "execution": found.execution,
        "reason": found.reason,
        "recorded_backend": recorded,
        "backend": "eager" if first_nonfinite else chosen.name,
    }
    with as_recorded(found):
        if first_nonfinite:
            origin = _first_nonfinite(graph, arguments, progress)
            was_there = found.reason == "nonfinite"
            if origin is None and was_there:
                notes.append("node by node the same graph gives finite values: the compiled code made the others")
            ok = origin is None and not was_there
            return Replayed(**facts, ok=ok, first_nonfinite=origin, notes=tuple(notes))
        if bisect:
            if graph.onnx is not None:
                raise UsageError(
                    "the graph of an ONNX file is not bisected",
                    got=found.name,
                    hint="glass replay --compare judges its ops; glass check --reproduction writes a node as a file",
                )
            bisection, piece = bisect_graph(graph, arguments, chosen, progress, found.path)
            if reproduction is not None and piece is not None:
                progress(Work.WRITING.says("writing a reproduction"))
                bisection = reproduce_bisection(place(reproduction), bisection, piece)
            return Replayed(**facts, ok=bisection.ok, bisection=bisection, notes=tuple(notes))
        if compare or (recorded and chosen.name != recorded):
            comparison = judge_snapshot(found, graph, arguments, chosen, progress)
            return Replayed(**facts, ok=comparison.ok, comparison=comparison, notes=tuple(notes))
        outputs, error = _run_again(found, graph, arguments, chosen, progress)
    if found.outputs is None and error is None:
        notes.append("no outputs were recorded, so there is nothing to compare with; --compare judges every op")
    ok = error is None and all(output.same_bits is not False for output in outputs)
    return Replayed(**facts, ok=ok, outputs=outputs, error=error, notes=tuple(notes))


def _run_again(
    snapshot: Snapshot, graph: CapturedGraph, arguments: Sequence[Any], backend: Backend, progress: Progress
) -> tuple[tuple[ReplayedOutput, ...], str | None]:
    progress(Work.COMPILING.says(f"compiling with {backend.name}"))
    with tempfile.TemporaryDirectory(prefix="glassengine-replay-") as folder:
        run = _compiled(snapshot, graph, arguments, backend, Path(folder))
        given = [clone(value) if isinstance(value, torch.Tensor) else value for value in arguments]
        set_random_states(snapshot)
        progress(Work.RUNNING.says("running"))
        try:
            results = run(given)
        except Exception as error:
            if isinstance(error, BackendError) and error.got:
                return (), error.got
            return (), f"{type(error).__name__}: {error}"
    # What the graph wrote to comes last, under the name of the input.
    written = {entry.name: value for entry, value in zip(snapshot.inputs, given, strict=True) if entry.is_mutated}
    named = dict(zip(snapshot.output_names, results, strict=False)) | written
    recorded = {entry.name: entry for entry in snapshot.outputs or ()}
    outputs = []
    for name, value in named.items():
        is_known = name in recorded and recorded[name].left_out is None
        outputs.append(_output(name, value, snapshot.output(name) if is_known else None, is_known))
    return tuple(outputs), None


def _compiled(
    snapshot: Snapshot, graph: CapturedGraph, arguments: Sequence[Any], backend: Backend, folder: Path
) -> GraphRun:
    """Compile as it was; where what is left of its symbolic sizes is too little for that, for the sizes it ran with."""
    try:
        return compile_run(snapshot.name, graph, arguments, backend, folder, keep=True)
    except BackendError:
        if all(entry.is_tensor for entry in snapshot.inputs):
            raise
        fixed, kept = without_numbers(graph, arguments)
        logger.warning("compiled for the sizes of this execution only: bits may differ")
        run = compile_run(snapshot.name, fixed, kept, backend, folder)
        return lambda values: run([value for value in values if isinstance(value, torch.Tensor)])


def _output(name: str, value: Any, recorded: Any, is_known: bool) -> ReplayedOutput:
    if not isinstance(value, torch.Tensor):
        same = value == recorded if is_known else None
        return ReplayedOutput(name, type(value).__name__, (), same, None if same is None else int(not same), None, "")
    kinds = kinds_of(value) if value.is_floating_point() or value.is_complex() else None
    nonfinite = str(kinds) if kinds is not None and any(kinds) else ""
    dtype = str(value.dtype).removeprefix("torch.")
    same, number, largest = None, None, None
    if is_known:
        same, number, largest = _difference(value, recorded)
    return ReplayedOutput(name, dtype, tuple(value.shape), same, number, largest, nonfinite)


def _difference(value: torch.Tensor, recorded: Any) -> tuple[bool, int, float | None]:
    """Return whether two tensors have the same bits, how many elements differ, and the largest difference."""
    if not isinstance(recorded, torch.Tensor) or value.shape != recorded.shape or value.dtype != recorded.dtype:
        return False, value.numel(), None
    value = value.detach().cpu()
    if bytes(bytes_of(value)) == bytes(bytes_of(recorded.detach())):
        return True, 0, 0.0
    differs = ~agree(value, recorded)
    error = (value.double() - recorded.double()).abs() if not value.is_complex() else (value - recorded).abs()
    finite = error[error.isfinite()]
    return False, int(differs.sum()), float(finite.max()) if finite.numel() else None


def _first_nonfinite(graph: CapturedGraph, arguments: Sequence[Any], progress: Progress) -> dict[str, Any] | None:
    progress(Work.RUNNING.says("running node by node"))
    given = [clone(value) if isinstance(value, torch.Tensor) else value for value in arguments]
    written = [spec.name for spec in graph.inputs if spec.is_mutated]
    try:
        finding = find_origin(graph, given, [*graph.output_names, *written])
    except Exception as error:
        raise UsageError(
            "the graph cannot be run node by node",
            got=f"{type(error).__name__}: {first_line(error)}",
            hint="glass replay SNAPSHOT runs it as it was run",
        ) from error
    return None if finding.origin is None else asdict(finding.origin)


def _differences(snapshot: Snapshot) -> list[str]:
    """Say what is other than it was when the snapshot was taken and may change bits."""
    then = snapshot.meta.get("environment")
    if not isinstance(then, dict):
        return []
    now = environment.describe()
    notes = []
    for label, key in (("torch", ("versions", "torch")), ("processor", ("cpu",))):
        old, new = (_looked_up(facts, key) for facts in (then, now))
        if old is not None and old != new:
            notes.append(f"{label}: {new} here, {old} when it was recorded: bits may differ")
    flags = "GLASS_CC_FLAGS"
    old, new = (_looked_up(facts, ("variables", flags)) for facts in (then, now))
    if old != new:
        notes.append(f"{flags}: {new or 'unset'} here, {old or 'unset'} when it was recorded: set it likewise")
    return notes


def _looked_up(facts: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        facts = facts.get(key) if isinstance(facts, dict) else None
    return facts if isinstance(facts, (str, type(None))) else str(pytree.tree_map(str, facts))


def captured_graph(snapshot: Snapshot) -> CapturedGraph:
    """Return the graph of a snapshot as it was captured; the tensors that it held itself are buffers.

    Raises:
        UsageError: It has no graph.
        CorruptError: It is damaged.
    """
    specs = tuple(
        InputSpec(
            entry.name,
            "buffer" if entry.kind == "constant" else entry.kind,  # type: ignore[arg-type]
            entry.dtype,
            entry.shape,
            entry.stride,
            entry.device,
            entry.requires_grad,
            entry.is_mutated,
        )
        for entry in snapshot.inputs
    )
    kind: Any = snapshot.kind
    translated = snapshot.onnx
    onnx = None
    if translated is not None:
        onnx = OnnxGraph(translated.file, {node.name: name for name, node in translated.values.items()})
    return CapturedGraph(snapshot.graph.graph_module, specs, snapshot.output_names, kind, onnx=onnx)


@contextmanager
def as_recorded(snapshot: Snapshot) -> Iterator[None]:
    """Put the settings of the recorded process into effect, and this one's back in the end."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    settings = snapshot.meta.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    threads, precision = settings.get("num_threads"), settings.get("float32_matmul_precision")
    state = torch.get_rng_state()
    try:
        if type(threads) is int and 0 < threads <= _MAX_THREADS:
            torch.set_num_threads(threads)
        if precision in _PRECISIONS:
            torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(settings.get("deterministic_algorithms") is True)
        set_random_states(snapshot)
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.use_deterministic_algorithms(before[2])
        torch.set_rng_state(state)


def device_of(snapshot: Snapshot) -> str:
    """Return the accelerator that it ran on if this machine has it, else the CPU."""
    used = {entry.device for entry in snapshot.inputs if entry.is_tensor} - {"cpu"}
    here = torch.accelerator.current_accelerator()
    found = next(iter(sorted(used)), "cpu")
    return found if here is not None and found.partition(":")[0] == here.type else "cpu"


def set_random_states(snapshot: Snapshot) -> None:
    """Put the generators of the devices that are here into the recorded state."""
    here = torch.accelerator.current_accelerator()
    known = {"cpu"} if here is None else {"cpu", here.type}
    states = {name: state for name, state in snapshot.rng_states.items() if name.partition(":")[0] in known}
    try:
        set_rng_states(states)
    except (RuntimeError, TypeError) as error:
        raise CorruptError("the random states of the snapshot cannot be used", got=str(error)) from error


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
    sides, skipped = [], []
    if is_random and snapshot.meta.get("backend") != "eager":
        skipped.append(
            Skipped("*", "baseline", "what was recorded was drawn by another generator", level=Place.RECORDED)
        )
    elif snapshot.outputs is not None:
        known = {entry.name for entry in snapshot.outputs if entry.is_tensor and entry.left_out is None}
        values = {node: snapshot.output(name) for name, node in program.output_nodes.items() if name in known}
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
