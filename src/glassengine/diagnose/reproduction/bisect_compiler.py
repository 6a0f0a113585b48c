"""Finds the part of a compiler that breaks a graph, and the smallest piece of the graph that it breaks.

The graph is cut down to the smallest piece that fails in the same way (see `cut_graph`); then, for Inductor, torch's
CompilerBisector switches off parts of the compiler on that piece until it works.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glassengine import starting
from glassengine.backends.protocol.backend import Backend
from glassengine.errors import GlassError, UsageError, logger
from glassengine.executable.graph import CapturedGraph, InputSpec, input_spec
from glassengine.judge.flat_graphs import compile_run, module_path
from glassengine.judge.pieces import NodeRecorder, Piece, clone, piece_of, smallest_failing
from glassengine.judge.replay.expected import expected_of, judged
from glassengine.program.representation.naming import source_line
from glassengine.progress import Progress, Work
from glassengine.results.recorded import Bisection, Failure, MinimalOp


@dataclass
class CompileTrials:
    """Compiles pieces and says how they fail.

    Args:
        backend: What compiles.
        kind: Of the graph that the pieces are of.
        weights: Placeholder -> its spec, for parameters and buffers.
    """

    backend: Backend
    kind: Any
    weights: dict[str, InputSpec] = field(default_factory=dict)
    count: int = 0

    def try_piece(self, piece: Piece) -> tuple[Failure | None, str]:
        """Return how a piece fails, and what is wrong in one line."""
        self.count += 1
        expected = expected_of(piece)
        specs = tuple(
            self.weights.get(name) or input_spec(tensor, name, "input") for name, tensor in piece.inputs.items()
        )
        outputs = tuple(f"output{index}" for index in range(len(piece.outputs)))
        graph = CapturedGraph(piece.module, specs, outputs, self.kind)
        with tempfile.TemporaryDirectory(prefix="glassengine-bisect-") as folder:
            try:
                run = compile_run("piece", graph, piece.arguments(), self.backend, Path(folder))
            except UsageError:
                raise
            except Exception as error:
                return "compile_error", _line(error)
            try:
                results = run(piece.arguments())
            except Exception as error:
                return "runtime_error", _line(error)
        for name, found in zip(piece.outputs, judged(expected, results), strict=True):
            if found.verdict == "wrong":
                size = (
                    f"{found.noise_ratio:.3g} times what rounding explains"
                    if found.noise_ratio is not None
                    else found.reason
                )
                return "accuracy", f"{name}: {size}"
        return None, ""


def bisect_graph(
    graph: CapturedGraph,
    arguments: Sequence[Any],
    backend: Backend,
    progress: Progress,
    snapshot: Path | None = None,
) -> tuple[Bisection, Piece | None]:
    """Find the smallest piece of a graph that a back-end breaks.

    Args:
        graph: The graph; every node has a value without data.
        arguments: Of one execution, in the order of its placeholders.
        backend: What compiles.
        progress: Called with an event when a stage begins.
        snapshot: Where the execution comes from: it is tried in another process first, and where that dies, so is
            every piece. None tries in this process only.

    Raises:
        UsageError: The graph fails without a compiler, too; or it cannot be taken to pieces.
    """
    values = recorded_values(graph, arguments)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    whole = piece_of(nodes, values)
    if whole is None:
        raise UsageError("the graph cannot be split", got="inner graphs, or results that are not tensors")
    progress(Work.COMPILING.says(f"compiling {len(nodes)} ops with {backend.name}"))
    trials = CompileTrials(backend, graph.kind, weights_of(graph))
    attempt = trials.try_piece
    is_compiled = backend.name != "eager"
    if snapshot is not None and is_compiled and try_elsewhere(snapshot, backend.name, whole)[0] == "crash":

        def attempt(piece: Piece) -> tuple[Failure | None, str]:
            trials.count += 1
            return try_elsewhere(snapshot, backend.name, piece)

    failure, message = attempt(whole)
    if failure is None:
        return Bisection(backend.name, None, "", len(nodes), trials.count), None

    def fails(piece: Piece) -> bool:
        found = attempt(piece)[0]
        progress(Work.BISECTING.says(f"{len(piece.ops)} ops: {found or 'work'}"))
        return found == failure

    piece = smallest_failing(graph.module.graph, values, fails) or whole
    _, message = attempt(piece)
    part = None
    if backend.name == "inductor" and failure != "crash":
        progress(Work.BISECTING.says("looking for the part of the compiler"))
        part = _part_of_compiler(piece)
    ops = tuple(MinimalOp(str(node.target), node.name, module_path(node), source_line(node)) for node in piece.ops)
    return Bisection(backend.name, failure, message, len(nodes), trials.count, ops, part), piece


def recorded_values(graph: CapturedGraph, arguments: Sequence[Any]) -> dict[str, Any]:
    """Run a graph in eager mode and return the value of every node, by name.

    Raises:
        UsageError: It fails.
    """
    recorder = NodeRecorder(graph.module)
    try:
        with torch.no_grad():
            recorder.run(*(clone(a) if isinstance(a, torch.Tensor) else a for a in arguments))
    except Exception as error:
        raise UsageError("the graph fails in eager mode, too", got=_line(error)) from error
    return recorder.values


def weights_of(graph: CapturedGraph) -> dict[str, InputSpec]:
    """Return the descriptions of the parameters and buffers of a graph, by placeholder."""
    placeholders = graph.module.graph.find_nodes(op="placeholder")
    return {
        node.name: spec
        for node, spec in zip(placeholders, graph.inputs, strict=True)
        if spec.kind in ("parameter", "buffer")
    }


def try_elsewhere(snapshot: Path, backend: str, piece: Piece) -> tuple[Failure | None, str]:
    """Try a piece of the graph of a snapshot in a process of its own, which may die of it."""
    request = {"snapshot": str(snapshot.resolve()), "backend": backend, "nodes": [node.name for node in piece.ops]}
    command = starting.python("glassengine.diagnose.snapshot_trial")
    done = starting.run(command, input=json.dumps(request), capture_output=True, text=True)
    if done.returncode < 0:
        return "crash", f"the process died of {signal.Signals(-done.returncode).name}"
    if done.returncode:
        logger.info("a trial in another process was not carried out: %s", done.stderr.strip().splitlines()[-1:])
        return None, ""
    failure, message = json.loads(done.stdout.strip().splitlines()[-1])
    return failure, message


def _part_of_compiler(piece: Piece) -> str | None:
    """Ask torch's bisector; None where it finds nothing, or cannot tell."""
    from torch._inductor.compiler_bisector import CompilerBisector

    expected = expected_of(piece)

    def works() -> bool:
        torch._dynamo.reset()
        try:
            with torch.no_grad(), torch._inductor.config.patch(compiler_settings()):
                results = torch.compile(piece.module, fullgraph=True, dynamic=False)(*piece.arguments())
        except Exception:
            return False
        return all(found.verdict != "wrong" for found in judged(expected, results))

    try:
        # It tells its progress on stdout, which is for results. It stays switched on until its frame is gone, which
        # errors that the compiler keeps would hold, had they been raised below it in the same thread.
        with contextlib.redirect_stdout(io.StringIO()), ThreadPoolExecutor(1) as thread:
            found = CompilerBisector.do_bisect(lambda: thread.submit(copy_context().run, works).result())
    except Exception as error:
        logger.info("torch's bisector gave up: %s", _line(error))
        return None
    if found is None:
        return None
    parts = [found.backend, found.subsystem]
    text = ", ".join(str(part) for part in parts if part)
    return f"{text}: {found.debug_info}" if found.debug_info and found.debug_info != found.subsystem else text


def compiler_settings() -> dict[str, Any]:
    """Return the settings of Inductor that are not its defaults, and those of the compiler flags; plain values only."""
    from glassengine.backends.inductor.settings import InductorCache, read_flags

    values = torch._inductor.config.get_config_copy() | read_flags().settings
    changed = InductorCache().parts()["options"].keys() | read_flags().settings.keys()
    return {name: values[name] for name in sorted(changed) if isinstance(values[name], (bool, int, float, str))}


def _line(error: BaseException) -> str:
    text = error.got if isinstance(error, GlassError) and error.got else f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
