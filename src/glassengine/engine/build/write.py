"""Writes an engine, or the part of each rank, into a directory: compiled, with weights, names and manifest."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from glassengine import environment
from glassengine.backends.protocol.backend import BATCH_INVARIANT, LARGEST, Backend, TakingModels
from glassengine.backends.protocol.io import DEVICE
from glassengine.backends.registry import choose_backend
from glassengine.engine import files
from glassengine.engine.build.artifacts import ArtifactWriter
from glassengine.engine.build.plan import BuildSettings, planned_outputs
from glassengine.engine.files import list_files
from glassengine.engine.manifest import AddedOutput, CutWeight, Manifest, TensorEntry, instruction_flags, write_manifest
from glassengine.engine.run.member import part_of, placeholder_group
from glassengine.errors import UsageError, logger
from glassengine.executable.graph import captured_program
from glassengine.executable.run.executable import compile_executable
from glassengine.program import LoadedModel, Program
from glassengine.program.parallel.placements import Mesh
from glassengine.program.parallel.plan import ShardPlan, plan_ranks
from glassengine.program.parallel.rewrite import program_of, weight_placements
from glassengine.program.parallel.stages import cut_stages, require_layers
from glassengine.program.representation.kept_logits import SIZE, with_kept_logits
from glassengine.program.representation.listing import stage_of
from glassengine.program.representation.outputs import add_outputs
from glassengine.program.representation.program import (
    FIXED_INPUTS,
    GRAPH_LEVEL,
    SMALLEST,
    Port,
    copied_graph,
    rebuilt,
    without_dead_weights,
)
from glassengine.program.representation.stored import save_program
from glassengine.progress import Progress, Work, silent


@dataclass(frozen=True)
class BuiltParts:
    """Parts of an engine that exist before it is built.

    Attributes:
        compiled: Puts into a directory what the back-end has made already.
        weights: File of weights of an engine of the same program and back-end.
    """

    compiled: Callable[[Path], None] | None = None
    weights: Path | None = None


NO_PARTS = BuiltParts()


def write_engine(
    program: Program,
    directory: Path,
    name: str,
    settings: BuildSettings,
    model: LoadedModel | None,
    artifacts: ArtifactWriter | None = None,
    *,
    has_encoder: bool = False,
    made: BuiltParts = NO_PARTS,
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
    graph = captured_program(built)

    def make(path: Path) -> None:
        if made.compiled is not None:
            made.compiled(path)
        elif isinstance(backend, TakingModels) and model is not None:
            backend.build_model(model.module, path, settings.quantize, model.directory)
        else:
            backend.build(built, path)

    compile_executable(f"{name}/main", make, directory / files.MAIN, graph)
    if artifacts is not None:
        artifacts.network(backend, built, directory / files.MAIN)
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
        built.inputs,
        added_outputs=added,
        left_out=left_out,
        weights="all" if write_all else "constants",
        shares_weights=not backend.keeps_weights(executed),
        has_encoder=has_encoder,
    )


def for_compiler(program: Program, settings: BuildSettings) -> Program:
    """Return a program as a back-end is given it: with what it asks of a build, and with the input `KEPT`."""
    # What is proven of the rows of a batch-invariant engine is proven of prompts with all their logits.
    has_all = settings.all_logits or settings.batch_invariant or program.onnx is not None
    if program.layout is not None and not has_all:
        program = with_kept_logits(program)
    length = settings.max_seq_len or 1
    sizes = {"batch": settings.max_batch_size, "cache": length, "sequence": length, SIZE: length}
    largest = sizes if program.layout is not None else {}
    asked = {LARGEST: largest, DEVICE: settings.device, BATCH_INVARIANT: settings.batch_invariant}
    return replace(program, metadata={**program.metadata, **asked})


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
    inputs: Sequence[Port],
    **facts: Any,
) -> None:
    """Write configuration and tokenizer of the model, and the manifest of all that lies in `directory` by then.

    `inputs` are those of the executable, `facts` the fields of `Manifest` that nothing else tells.
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
        inputs=tuple(TensorEntry(port.name, port.node, port.dtype, port.shape) for port in inputs),
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


def mesh_for(tensor: int, pipeline: int) -> Mesh | None:
    """Return the ranks that are asked for; None for one process.

    Raises:
        UsageError: A number is not at least 1.
    """
    for flag, number in (("--tensor-parallel", tensor), ("--pipeline-parallel", pipeline)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UsageError(f"invalid {flag}", got=str(number), expected="at least 1 rank")
    return None if tensor * pipeline == 1 else Mesh(tensor, pipeline)


def check_mesh(mesh: Mesh, model: LoadedModel, backend: Backend, unlike: Sequence[tuple[str, Any]]) -> None:
    """Refuse what cannot be shared among ranks, before anything is exported.

    `unlike` has (flag, value) of what engines of several ranks do not have.

    Raises:
        UsageError: Says why.
    """
    alone = "build it for one process: leave out --tensor-parallel and --pipeline-parallel"
    if not model.generation.decodes_tokens or model.generation.has_encoder or model.stored is not None:
        what = "only decoder-only language models can be shared among ranks"
        raise UsageError(what, got=model.spec, hint=alone)
    for flag, value in unlike:
        if value:
            raise UsageError(f"{flag} is not possible for an engine of several ranks", got=str(value), hint=alone)
    if mesh.tensor > 1 and not backend.capabilities.collectives:
        raise UsageError(
            f"back-end {backend.name!r} has no collectives",
            got=f"--tensor-parallel {mesh.tensor}",
            expected="a back-end that runs those of torch: inductor or eager",
            hint="--backend inductor; or stages of whole layers, which every back-end runs: --pipeline-parallel",
        )
    heads = _heads(model)
    if mesh.tensor > 1 and heads is not None and heads % mesh.tensor:
        fitting = [number for number in range(2, heads + 1) if heads % number == 0]
        raise UsageError(
            f"{heads} attention heads cannot be shared by {mesh.tensor} ranks",
            got=f"--tensor-parallel {mesh.tensor}",
            expected=f"a divisor of {heads}",
            hint=f"--tensor-parallel {min(fitting, key=lambda number: abs(number - mesh.tensor), default=1)}",
        )


def _heads(model: LoadedModel) -> int | None:
    config: Any = getattr(model.module, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def plan_of(program: Program, model: LoadedModel | None, mesh: Mesh) -> ShardPlan | None:
    """Return how the weights are cut within a stage; None where each layer is on one rank.

    Raises:
        UsageError: They cannot be, or there are fewer layers than stages.
    """
    if program.layout is None or program.layout.states:
        raise UsageError(
            "a model that keeps recurrent states cannot be shared among ranks",
            got=str(program.metadata.get("model")),
            hint="build it for one process",
        )
    require_layers(program, mesh.pipeline)
    if mesh.tensor == 1:
        return None
    return plan_ranks(program, getattr(model.module, "tp_plan", None) if model is not None else None, mesh.tensor)


def rank_programs(program: Program, plan: ShardPlan | None, mesh: Mesh) -> Iterator[tuple[int, Program]]:
    """Yield (rank, program) with the rank's share of the weights, those of one place of all stages after each other."""
    for place in range(mesh.tensor):
        own = program if plan is None else program_of(program, plan.layout, place)
        for stage, part in enumerate(cut_stages(own, mesh.pipeline)):
            yield stage * mesh.tensor + place, part


def _named_once(program: Program) -> Program:
    """Return a program that holds no weight under a second name, which no op reads and no rank would have to keep."""
    exported = program.exported
    own = rebuilt(exported, copied_graph(exported.graph), exported.graph_signature.output_specs)
    return program.replace(without_dead_weights(own))


def _outputs_of(part: Program, added: Sequence[AddedOutput]) -> tuple[str, ...]:
    """Return the debug outputs of a build that one rank has, as they are asked for."""
    own = [entry for entry in added if part.sites.get(entry.site) is not None]
    return tuple(entry.site if entry.cast is None else f"{entry.site}:{entry.cast}" for entry in own)


def write_ranks(
    program: Program,
    directory: Path,
    name: str,
    settings: BuildSettings,
    model: LoadedModel | None,
    mesh: Mesh,
    *,
    progress: Progress = silent,
) -> None:
    """Compile the part of every rank and write the engine around them.

    Raises:
        UsageError: The model cannot be shared so.
        BackendError: The back-end failed.
    """
    program = _named_once(program)
    backend, _ = choose_backend(settings.backend)
    plan = plan_of(program, model, mesh)
    _, added, left_out = planned_outputs(program, settings)
    alone = replace(settings, implicit_outputs=False, passes=(), reloadable=False, notes=())
    alone = replace(alone, all_logits=True)
    for rank, part in rank_programs(program, plan, mesh):
        alone = replace(alone, add_output=_outputs_of(part, added))
        progress(Work.COMPILING.says(f"rank {rank} of {mesh.size}", rank, mesh.size))
        where = part_of(directory, rank)
        where.mkdir()
        with placeholder_group(mesh, rank):
            write_engine(part, where, f"{name}/{where.name}", alone, None, progress=silent)
    progress(Work.WRITING.says(f"writing {name}"))
    save_program(program, directory)
    notes = settings.notes if plan is None else (*settings.notes, *plan.notes)
    cuts = {} if plan is None else weight_placements(program, plan.layout)
    write_description(
        program,
        backend,
        directory,
        name,
        replace(settings, notes=notes),
        model,
        program.inputs,
        added_outputs=(),
        left_out=left_out,
        weights="all",
        shares_weights=False,
        mesh=asdict(mesh),
        placements={weight: CutWeight(cut.axis, cut.blocks) for weight, cut in cuts.items()},
    )
