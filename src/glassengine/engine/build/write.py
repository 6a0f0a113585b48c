"""Write an engine into a directory: outputs added, compiled, with its weights, names and manifest."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch

from glassengine.backends.protocol.backend import LARGEST, TakingModels
from glassengine.backends.protocol.devices import DEVICE
from glassengine.backends.registry import choose_backend
from glassengine.engine.build.artifacts import ArtifactWriter
from glassengine.engine.build.describe import Settings, describe_engine
from glassengine.engine.build.plan import planned_outputs
from glassengine.engine.store import files
from glassengine.engine.store.manifest import write_manifest
from glassengine.executable.graph.graph import captured_program
from glassengine.executable.run.executable import compile_executable
from glassengine.program import LoadedModel, Program
from glassengine.program.listing.listing import stage_of
from glassengine.program.representation.outputs import add_outputs
from glassengine.program.representation.stored import save_program
from glassengine.progress import Progress, Work, silent

logger = logging.getLogger("glassengine")


def write_engine(
    program: Program,
    directory: Path,
    name: str,
    settings: Settings,
    model: LoadedModel | None,
    artifacts: ArtifactWriter | None = None,
    *,
    has_encoder: bool = False,
    progress: Progress = silent,
) -> None:
    """Compile a program and write everything that an engine consists of.

    Args:
        program: With weights.
        directory: Empty, or with the engine of an encoder in it.
        name: Of the engine.
        settings: What was asked for.
        model: Where configuration and tokenizer come from.
        artifacts: Where the stages of the build are written to.
        has_encoder: Whether the engine of an encoder lies in `directory`.
        progress: Called with an event when a stage begins.

    Raises:
        UsageError: An output that was asked for does not exist.
        BackendError: The back-end failed.
    """
    backend, _ = choose_backend(settings.backend)
    decided, added, left_out = planned_outputs(program, settings)
    for output, reason in left_out.items():
        logger.warning("output %s is left out: %s", output, reason)
    executed = add_outputs(program, decided.added) if decided.added else program
    length = settings.max_seq_len or 1
    sizes = {"batch": settings.max_batch_size, "cache": length, "sequence": length}
    largest = sizes if program.layout is not None else {}
    built = dataclasses.replace(executed, metadata={**executed.metadata, LARGEST: largest, DEVICE: settings.device})
    if artifacts is not None:
        artifacts.stage(stage_of(executed, "outputs"))
        artifacts.options(backend, built, _options(settings))
    (directory / files.MAIN).mkdir()
    progress(Work.COMPILING.says(f"compiling {name} with {backend.name}"))
    graph = captured_program(executed)

    def make(path: Path) -> None:
        if isinstance(backend, TakingModels) and model is not None:
            backend.build_model(model.module, path, settings.quantize, model.directory)
        else:
            backend.build(built, path)

    compile_executable(f"{name}/main", make, directory / files.MAIN, graph)
    if artifacts is not None:
        artifacts.network(backend, executed, directory / files.MAIN)
    progress(Work.WRITING.says(f"writing {name}"))
    # The executable of an ONNX file is that file again, with its weights.
    write_all = not (backend.keeps_weights(program) and (settings.reloadable or program.onnx is not None))
    has_tokenizer = _write_files(program, directory, model, settings, write_all=write_all)
    manifest = describe_engine(
        program,
        backend,
        directory,
        name=name,
        settings=settings,
        added=added,
        left_out=left_out,
        weights="all" if write_all else "constants",
        shares_weights=not backend.keeps_weights(executed),
        tokenizer=has_tokenizer,
        has_encoder=has_encoder,
    )
    write_manifest(manifest, directory)


def _options(settings: Settings) -> dict[str, Any]:
    """The options of a build that shape its executable."""
    names = ("max_batch_size", "max_seq_len", "byte_budget")
    return {"add_output": list(settings.add_output), **{name: getattr(settings, name) for name in names}}


def _write_files(
    program: Program, directory: Path, model: LoadedModel | None, settings: Settings, *, write_all: bool
) -> bool:
    """Write program, weights, configuration and tokenizer; return whether there is a tokenizer."""
    save_program(program, directory)
    exported = program.exported
    # Constants that tracing lifted out of the code are in no checkpoint.
    weights = {**(exported.state_dict if write_all else {}), **exported.constants}
    tensors = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    files.save_weights(tensors, directory / files.WEIGHTS)
    if model is None:
        return False
    return files.copy_model_files(model.module, model.directory, settings.model.get("revision"), directory)
