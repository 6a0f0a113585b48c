"""Builds an engine of several ranks: a part for each, with its share of the weights, beside what all have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from glassengine.backends.protocol.backend import Backend
from glassengine.backends.registry import choose_backend
from glassengine.engine.build.plan import BuildSettings, planned_outputs
from glassengine.engine.build.write import write_description, write_engine
from glassengine.engine.manifest import AddedOutput, CutWeight
from glassengine.engine.run.member import part_of, placeholder_group
from glassengine.errors import UsageError
from glassengine.program import LoadedModel, Program
from glassengine.program.parallel.placements import Mesh
from glassengine.program.parallel.plan import ShardPlan, plan_ranks
from glassengine.program.parallel.rewrite import program_of, weight_placements
from glassengine.program.parallel.stages import cut_stages, require_layers
from glassengine.program.representation.program import copied_graph, rebuilt, without_dead_weights
from glassengine.program.representation.stored import save_program
from glassengine.progress import Progress, Work, silent


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
    alone = dataclasses.replace(settings, implicit_outputs=False, passes=(), reloadable=False, notes=())
    for rank, part in rank_programs(program, plan, mesh):
        alone = dataclasses.replace(alone, add_output=_outputs_of(part, added))
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
        dataclasses.replace(settings, notes=notes),
        model,
        added_outputs=(),
        left_out=left_out,
        weights="all",
        shares_weights=False,
        mesh=dataclasses.asdict(mesh),
        placements={weight: CutWeight(cut.axis, cut.blocks) for weight, cut in cuts.items()},
    )
