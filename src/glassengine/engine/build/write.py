"""Writes an engine into a directory: outputs added, compiled, with its weights, names and manifest."""

from __future__ import annotations

import dataclasses
import logging
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glassengine import environment
from glassengine.backends.protocol.backend import LARGEST, Backend, TakingModels
from glassengine.backends.protocol.io import DEVICE
from glassengine.backends.registry import choose_backend
from glassengine.engine.build.artifacts import ArtifactWriter
from glassengine.engine.build.plan import BuildSettings, planned_outputs
from glassengine.engine.store import files
from glassengine.engine.store.files import list_files
from glassengine.engine.store.manifest import Manifest, TensorEntry, instruction_flags, write_manifest
from glassengine.executable.graph.graph import captured_program
from glassengine.executable.run.executable import compile_executable
from glassengine.program import LoadedModel, Program
from glassengine.program.listing.listing import stage_of
from glassengine.program.representation.outputs import add_outputs
from glassengine.program.representation.program import FIXED_INPUTS, GRAPH_LEVEL, SMALLEST
from glassengine.program.representation.stored import save_program
from glassengine.progress import Progress, Work, silent

logger = logging.getLogger("glassengine")


@dataclass(frozen=True)
class Made:
    """Parts of an engine that exist before it is built.

    Attributes:
        compiled: Puts into a directory what the back-end has made already.
        weights: File of weights of an engine of the same program and back-end.
    """

    compiled: Callable[[Path], None] | None = None
    weights: Path | None = None


NOTHING = Made()


def write_engine(
    program: Program,
    directory: Path,
    name: str,
    settings: BuildSettings,
    model: LoadedModel | None,
    artifacts: ArtifactWriter | None = None,
    *,
    has_encoder: bool = False,
    made: Made = NOTHING,
    progress: Progress = silent,
) -> None:
    """Compile a program and write everything that an engine consists of.

    `directory` is empty, or holds the engine of an encoder.

    Raises:
        UsageError: An output that was asked for does not exist.
        BackendError: The back-end failed.
    """
    backend, _ = choose_backend(settings.backend)
    decided, added, left_out = planned_outputs(program, settings)
    for output, reason in left_out.items():
        logger.warning("output %s is left out: %s", output, reason)
    executed = add_outputs(program, decided.added) if decided.added else program
    built = for_compiler(executed, settings)
    if artifacts is not None:
        artifacts.stage(stage_of(executed, "outputs"))
        artifacts.options(backend, built, _options(settings))
    (directory / files.MAIN).mkdir()
    progress(Work.COMPILING.says(f"compiling {name} with {backend.name}"))
    graph = captured_program(executed)

    def make(path: Path) -> None:
        if made.compiled is not None:
            made.compiled(path)
        elif isinstance(backend, TakingModels) and model is not None:
            backend.build_model(model.module, path, settings.quantize, model.directory)
        else:
            backend.build(built, path)

    compile_executable(f"{name}/main", make, directory / files.MAIN, graph)
    if artifacts is not None:
        artifacts.network(backend, executed, directory / files.MAIN)
    progress(Work.WRITING.says(f"writing {name}"))
    # The executable of an ONNX file is that file again, with its weights.
    write_all = not (backend.keeps_weights(program) and (settings.reloadable or program.onnx is not None))
    save_program(program, directory)
    # Constants that tracing lifted out of the code are in no checkpoint.
    weights = {**(program.exported.state_dict if write_all else {}), **program.exported.constants}
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    files.save_weights(tensors, directory / files.WEIGHTS, same=made.weights)
    write_description(
        program,
        backend,
        directory,
        name,
        settings,
        model,
        added_outputs=added,
        left_out=left_out,
        weights="all" if write_all else "constants",
        shares_weights=not backend.keeps_weights(executed),
        has_encoder=has_encoder,
    )


def for_compiler(program: Program, settings: BuildSettings) -> Program:
    """Return a program with what a back-end asks of a build."""
    length = settings.max_seq_len or 1
    sizes = {"batch": settings.max_batch_size, "cache": length, "sequence": length}
    largest = sizes if program.layout is not None else {}
    return dataclasses.replace(program, metadata={**program.metadata, LARGEST: largest, DEVICE: settings.device})


def _options(settings: BuildSettings) -> dict[str, Any]:
    """The options of a build that shape its executable."""
    names = ("max_batch_size", "max_seq_len", "byte_budget")
    return {"add_output": list(settings.add_output), **{name: getattr(settings, name) for name in names}}


def write_description(
    program: Program,
    backend: Backend,
    directory: Path,
    name: str,
    settings: BuildSettings,
    model: LoadedModel | None,
    **facts: Any,
) -> None:
    """Write configuration and tokenizer of the model, and the manifest of all that lies in `directory` by then.

    `facts` are the fields of `Manifest` that nothing else tells.
    """
    tokenizer = False
    if model is not None:
        revision = settings.model.get("revision")
        tokenizer = files.copy_model_files(model.module, model.directory, revision, directory)
    is_causal_lm = program.layout is not None
    versions = environment.versions()
    manifest = Manifest(
        name=name,
        glassengine=str(versions["glassengine"]),
        backend=backend.name,
        kv=backend.capabilities.kv,
        portable=backend.capabilities.portable,
        requires={package: version for package in ("torch", backend.name) if (version := versions.get(package))},
        versions=versions,
        machine=platform.machine(),
        cpu=environment.cpu_name(),
        cpu_flags=instruction_flags(),
        kind=program.kind,
        dtype=str(program.metadata.get("dtype")),
        graph_level=GRAPH_LEVEL,
        max_batch_size=settings.max_batch_size if is_causal_lm else None,
        max_seq_len=settings.max_seq_len if is_causal_lm else None,
        vocab_size=_vocab_size(program),
        kv_layout=program.layout.layers if program.layout is not None else (),
        caches=program.caches,
        inputs=tuple(TensorEntry(port.name, port.node, port.dtype, port.shape) for port in program.inputs),
        outputs=_results(program),
        ranges={} if is_causal_lm else _ranges(program),
        fixed_inputs=dict(program.metadata.get(FIXED_INPUTS, {})),
        passes=tuple(settings.passes),
        model=dict(settings.model),
        tokenizer=tokenizer,
        files=list_files(directory),
        command_line=tuple(environment.without_secrets(sys.argv)),
        git=environment.git_revision(Path.cwd()),
        notes=settings.notes,
        device=settings.device,
        quantize=settings.quantize or "",
        **facts,
    )
    write_manifest(manifest, directory)


def _vocab_size(program: Program) -> int | None:
    if program.layout is None:
        return None
    size = program.sites.by_node[program.output_nodes["logits"]][0].shape[-1]
    return size if isinstance(size, int) else None


def _results(program: Program) -> tuple[TensorEntry, ...]:
    entries = []
    for name, node in program.output_nodes.items():
        value = program.node(node).meta["val"]
        sites = program.sites.by_node.get(node)
        shape = sites[0].shape if sites else tuple(s if isinstance(s, int) else str(s) for s in value.shape)
        entries.append(TensorEntry(name, node, str(value.dtype).removeprefix("torch."), shape))
    return tuple(entries)


def _ranges(program: Program) -> dict[str, tuple[int, int | None]]:
    """Ranges of the dynamic sizes of a plain module."""
    # The tracer knows more symbols: values that the graph reads from tensors, which may have no bounds at all.
    sizes = {size for port in program.inputs for size in port.shape if isinstance(size, str)}
    limit = sys.maxsize // 2
    smallest = program.metadata.get(SMALLEST, {})
    ranges = {}
    for symbol, bounds in program.exported.range_constraints.items():
        if str(symbol) in sizes:
            upper = bounds.upper
            lower = smallest.get(str(symbol), int(bounds.lower))
            ranges[str(symbol)] = (lower, int(upper) if upper.is_finite and upper < limit else None)
    return ranges


def about_build(model: LoadedModel, backend: Backend, passes: Sequence[str]) -> dict[str, Any]:
    """What the manifest of the artifacts says of a build before it has begun."""
    return {
        "model": model.spec,
        "fingerprint": model.metadata.get("fingerprint"),
        "kind": model.kind,
        "dtype": model.dtype,
        "backend": backend.name,
        "passes": list(passes),
    }
