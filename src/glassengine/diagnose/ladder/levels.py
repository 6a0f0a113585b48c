"""The levels of a check: which sides run, what of them can be observed, how their tensors pair with the baseline's.

A whole program that is compiled op by op costs one compilation per distinct node: without `--all-levels` only what the
engine got wrong is compiled alone, with its neighbors: is the op itself miscompiled, or only together with others?
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glassengine.backends import registry
from glassengine.backends.calibration import kernels_of, of_any_runtime
from glassengine.backends.registry import choose_graph_backend
from glassengine.compare.matching.maps import TensorMap
from glassengine.diagnose.ladder.climb import (
    Climb,
    engine_nodes,
    nodes,
    observable,
    result_nodes,
    sizes_of,
    skip_unpaired,
)
from glassengine.diagnose.ladder.step_by_step import StepStage, program_of, require_no_memory, specialized
from glassengine.engine import files
from glassengine.engine.build.build import CompilerBeside, build_program, compiled_beside
from glassengine.engine.build.write import BuiltParts
from glassengine.engine.run.engine import Engine
from glassengine.engine.run.load import ParallelEngine
from glassengine.engine.run.member import mesh_of, part_of
from glassengine.errors import GlassError, IncomparableError, UsageError, first_line
from glassengine.frontends.eager_debug import op_runner
from glassengine.judge.cases import Case, Inputs, causal_cases, module_cases
from glassengine.judge.pairing.by_value import pair_programs
from glassengine.judge.pairing.weights import compare_paired_weights, compare_weights, states_alike, weights_of
from glassengine.judge.replay.replay import Cut, Replay
from glassengine.judge.sides.arguments import Arguments, without_cache
from glassengine.judge.sides.engine import EngineSide, RanksSide
from glassengine.judge.sides.module import UntouchedCandidate, own_names
from glassengine.judge.sides.program import Grafts, OpByOpSide, ProgramSide, untouched
from glassengine.judge.sides.protocol import RUNTIME, Arranged, Guarantee, Place
from glassengine.judge.sides.recorded import RecordedModules, RecordedOps, RecordedTensors, dtype_of
from glassengine.judge.sides.recorded_ranks import RecordedRanks, TensorsOfRanks
from glassengine.judge.site_pairs import SitePair
from glassengine.judge.verdict.score import Score
from glassengine.program import LoadedModel, Program, export_program, load_inputs, made_up_inputs
from glassengine.program.kinds.example_inputs import MadeUp
from glassengine.program.parallel.placements import Mesh, ShardPlacement
from glassengine.program.parallel.rewrite import lay_out
from glassengine.program.representation.passes import apply_pass
from glassengine.program.representation.stored import load_program
from glassengine.progress import Progress, Work
from glassengine.recording.source import TensorSource
from glassengine.results import Skipped, WeightsComparison


def start(
    model: LoadedModel,
    inputs: Inputs,
    steps: int,
    stack: ExitStack,
    progress: Progress,
    case: Case | None = None,
    arguments: Arguments | None = None,
    exported: Program | None = None,
) -> Climb:
    """Return a climb with the exported program and its first side: the unchanged model.

    Args:
        model: The baseline.
        inputs: What `--inputs` names, read.
        steps: Number of decode steps after the prefill.
        stack: Ends with the check.
        progress: Called with an event when a stage begins.
        case: What is run, where that is known.
        arguments: How the inputs become arguments of the model; None where they are its own.
        exported: Its program, where there is one already.
    """
    if case is not None and model.generation.decodes_tokens:
        cases, given = [case], None
    elif model.generation.decodes_tokens:
        cases = causal_cases(model, inputs, steps)
        given = None
    else:
        given = arguments_of(model, inputs)
        cases = module_cases(given)
    if exported is None:
        if given is not None and not model.generation.generates:
            require_no_memory(model, given)
        progress(Work.EXPORTING.says("exporting the program"))
    program = export_program(model, inputs=given) if exported is None else exported
    side = untouched(model, program, arguments)
    climb = Climb(model, program, cases, side, [], kernels=side.kernels, stack=stack)
    climb.add(side)
    return climb


def start_stage(stage: StepStage, stack: ExitStack, progress: Progress) -> Climb:
    """Return the climb of a stage, with its first side: the unchanged baseline."""
    climb = start(stage.baseline, stage.steps, 0, stack, progress, arguments=stage.ours_of, exported=stage.ours)
    climb.skipped += specialized(stage)
    return climb


def add_built(
    climb: Climb,
    backend: str | None,
    passes: Sequence[str],
    progress: Progress,
    *,
    all_levels: bool = False,
    only_release: bool = False,
    mesh: Mesh | None = None,
    compiler: CompilerBeside | None = None,
    answer_first: Callable[[bool], None] = lambda _: None,
) -> None:
    """The baseline's own passes, (with `all_levels`) every op compiled alone, engine and release engine.

    Args:
        climb: With its program and unchanged model.
        backend: Builds the engines.
        passes: Of the user.
        progress: Called with an event when a stage begins.
        all_levels: Whether every op is compiled alone.
        only_release: Whether there is no engine with debug outputs.
        mesh: Ranks of the engine; None for one process.
        compiler: Compiles the engine with debug outputs beside this process, where there is one.
        answer_first: Called before this process builds, with whether another one compiles meanwhile.
    """
    add_passes(climb, passes, progress)
    assert climb.built is not None
    if all_levels:
        add_op_by_op(climb, backend, progress)
    folder = Path(climb.stack.enter_context(tempfile.TemporaryDirectory(prefix="glassengine-check-")))
    sizes = sizes_of(climb.cases)
    if mesh is not None:
        progress(Work.BUILDING_RELEASE.says(f"building the engine of {mesh.size} ranks"))
        ranks = build_program(climb.built, folder / "ranks", backend=backend, model=climb.baseline, mesh=mesh, **sizes)
        assert isinstance(ranks, ParallelEngine)
        add_ranks(climb, ranks, climb.built, replay_of(climb, climb.pairs))
        climb.of_runtime(kernels_of(ranks.manifest.backend))
        climb.candidate = f"{ranks.manifest.backend} engine, {ranks.manifest.dtype}, {mesh}"
        climb.add(_release_side(climb, ranks))
        return
    plan = None if only_release else observable(climb, climb.built)
    observed = [] if plan is None else [*plan.added, *plan.derived]
    with compiled_beside(climb.built, compiler, observed, **sizes) as compiled:
        answer_first(compiled is not None)
        progress(Work.BUILDING_RELEASE.says("building the release engine"))
        release = build_program(climb.built, folder / "release", backend=backend, **sizes)
        if plan is not None:
            progress(Work.BUILDING_OBSERVABLE.says(f"building the engine with {len(plan.added)} debug outputs"))
            made = BuiltParts(compiled, folder / "release" / files.WEIGHTS)
            engine = build_program(
                climb.built, folder / "engine", backend=backend, outputs=observed, made=made, **sizes
            )
            _add_observable(climb, engine, observed)
    if release.manifest.added_outputs:
        raise GlassError("the release engine has debug outputs", got=str(release.manifest.added_outputs))
    climb.of_runtime(kernels_of(release.manifest.backend))
    climb.candidate = f"{release.manifest.backend} engine, {release.manifest.dtype}"
    climb.add(_release_side(climb, release))


def add_passes(climb: Climb, passes: Sequence[str], progress: Progress) -> None:
    """The program after each pass in turn; what it is after the last one is what the engines are built from."""
    climb.built = climb.program
    climb.pairs = pair_programs(climb.program, climb.program, climb.cases)
    for spec in passes:
        progress(Work.EXPORTING.says(f"applying {spec}"))
        climb.built = apply_pass(climb.built, spec)
        climb.pairs = pair_programs(climb.program, climb.built, climb.cases)
        side = ProgramSide(
            climb.built, climb.pairs, place=Place.PASS, detail=spec, replay=replay_of(climb, climb.pairs)
        )
        climb.add(side)
        skip_unpaired(climb, climb.built, climb.pairs, side.level)


def add_op_by_op(climb: Climb, backend: str | None, progress: Progress) -> None:
    """Every op of what the engine is built from, or those around what the engine got wrong, compiled alone."""
    program = climb.built or climb.program
    engine = next((score for score in climb.scores if score.side.place is Place.ENGINE), None)
    around = None if engine is None else list(engine.divergences)
    what = "every op alone" if around is None else f"{len(around)} ops and what is near alone"
    progress(Work.COMPILING.says(f"compiling {what}"))
    try:
        if program.onnx is not None:
            raise UsageError("an ONNX file is run node by node already")
        runner = op_runner(type(choose_graph_backend(backend)))
    except UsageError as error:
        climb.skipped.append(Skipped("*", "candidate", f"not judged op by op: {error.what}", level=Place.OP_BY_OP))
        return
    alone = None
    if around is not None:
        wrong = [program.node(climb.pairs[name].candidate.node) for name in around if name in climb.pairs]
        alone = frozenset(near.name for node in wrong for near in (node, *node.all_input_nodes, *node.users))
    dtype: torch.dtype | None = getattr(torch, str(program.metadata.get("dtype")), None)
    side = OpByOpSide(
        program,
        climb.pairs,
        place=Place.OP_BY_OP,
        guarantee=Guarantee.EVERY_OP if around is None else Guarantee.NEAR_THE_ERROR,
        replay=Replay(climb.program, compiled=True, dtype=dtype, accumulation=climb.accumulation),
        runner=runner,
        alone=alone,
    )
    place = len(climb.scores) if engine is None else climb.scores.index(engine)
    climb.scores.insert(place, Score(side, climb.program))


def add_engine(climb: Climb, release: Engine, progress: Progress, *, only_release: bool = False) -> None:
    """An engine as candidate: judged as the release, with an observable twin built from its own stored program."""
    program = release.program
    if program.kind != climb.program.kind:
        raise IncomparableError(
            "the engine was built from another kind of model", got=program.kind, expected=climb.program.kind
        )
    climb.built = program
    climb.pairs = pair_programs(climb.program, program, climb.cases)
    climb.weights = compare_paired_weights(climb.program, program, nodes(climb.pairs))
    skip_unpaired(climb, program, climb.pairs, Place.CANDIDATE)
    if isinstance(release, ParallelEngine):
        add_ranks(climb, release, program, replay_of(climb, climb.pairs))
    elif not only_release:
        folder = Path(climb.stack.enter_context(tempfile.TemporaryDirectory(prefix="glassengine-check-")))
        plan = observable(climb, program)
        observed = [*plan.added, *plan.derived]
        progress(Work.BUILDING_OBSERVABLE.says(f"building an observable twin with {len(plan.added)} debug outputs"))
        twin = build_program(
            program, folder / "twin", backend=release.manifest.backend, outputs=observed, **sizes_of(climb.cases)
        )
        _add_observable(climb, twin, observed)
    climb.of_runtime(kernels_of(release.manifest.backend))
    climb.add(_release_side(climb, release))


def _release_side(climb: Climb, release: Engine) -> EngineSide:
    options: dict[str, Any] = {"place": Place.RELEASE, "guarantee": Guarantee.RESULTS_AND_CACHES}
    return EngineSide(release, result_nodes(climb.program, release), program=climb.built or climb.program, **options)


def _add_observable(climb: Climb, engine: Engine, observed: Sequence[str]) -> None:
    capabilities = registry.find_backend(engine.manifest.backend).capabilities
    replay = replay_of(
        climb,
        climb.pairs,
        compiled=True,
        dtype=getattr(torch, engine.manifest.dtype),
        wide_operands=capabilities.wide_operands,
        accumulation=climb.of_runtime(kernels_of(engine.manifest.backend)),
    )
    side = EngineSide(
        engine,
        engine_nodes(climb, engine, observed),
        place=Place.ENGINE,
        program=climb.built or climb.program,
        pairs=climb.pairs,
        replay=replay,
        arranged=Arranged(climb.program, climb.pairs),
    )
    climb.add(side)


def add_model(
    climb: Climb,
    other: LoadedModel,
    stage: StepStage | None,
    progress: Progress,
    grafts: Sequence[str] = (),
) -> torch.dtype:
    """Another model or port: op by op through its own export, and unchanged at module outputs.

    Args:
        climb: With the baseline.
        other: The other model.
        stage: What of it is run; None for a model that generates.
        progress: Called with an event when a stage begins.
        grafts: Sites at which the baseline's op takes the place of the candidate's.

    Raises:
        UsageError: There are grafts, and the candidate has no program to put them into.
    """
    candidate = other if stage is None else stage.candidate
    arguments, exported = (None, None) if stage is None else (stage.theirs_of, stage.theirs)
    pairing: dict[str, Any] = {}
    if exported is None:
        progress(Work.EXPORTING_CANDIDATE.says("exporting the candidate"))
        exported = program_of(candidate)
    if not isinstance(exported, UsageError):
        if arguments is not None:
            # The inputs of both have one name, by which they are given and paired.
            renamed = tuple(replace(port, name=arguments.ours(port.name)) for port in exported.inputs)
            exported = replace(exported, inputs=renamed)
        progress(Work.PAIRING.says("pairing the two programs"))
        try:
            by_node = pair_programs(climb.program, exported, climb.cases)
        except RuntimeError as error:
            if candidate.stored is None:
                raise
            # A file may hold a graph that fails on these inputs; its own runtime says so where the results are made.
            exported = UsageError("its graph does not run", got=first_line(error))
    if isinstance(exported, UsageError):
        if grafts:
            raise UsageError("--graft needs a candidate that can be exported", got=exported.what)
        reason = f"not judged op by op: {exported.what} ({exported.got})"
        climb.skipped.append(Skipped("*", "candidate", reason, level=Place.CANDIDATE))
        climb.weights = _weights_by_name(climb, candidate)
    else:
        program = exported
        climb.weights = compare_paired_weights(climb.program, program, nodes(by_node))
        own_dtype = None if candidate.dtype == climb.baseline.dtype else getattr(torch, candidate.dtype)
        climb.pairs, arranged = by_node, Arranged(climb.program, by_node)
        both_remember = climb.baseline.state is not None and candidate.state is not None
        remembered = states_alike(climb.program, program) if both_remember else {}
        side = ProgramSide(
            program,
            by_node,
            place=Place.CANDIDATE,
            replay=replay_of(climb, by_node, compiled=own_dtype is not None, dtype=own_dtype),
            arranged=arranged,
            remembered=remembered,
            has_fixed_cache=program.layout is not None and candidate.stored is None,
        )
        if grafts:
            side.grafts = Grafts(climb.program, by_node, arranged, grafts)
        climb.add(side)
        skip_unpaired(climb, program, by_node, Place.CANDIDATE)
        pairing = {"names": own_names(program, by_node), "arranged": arranged}
    coarsest: torch.dtype = getattr(torch, candidate.dtype)
    if grafts:  # the module as it is has none of them
        return coarsest
    runs_onnx = candidate.stored is not None and candidate.stored.onnx is not None
    accumulation = climb.of_runtime(kernels_of(RUNTIME)) if runs_onnx else climb.accumulation
    segments = Replay(climb.program, cut=Cut.SEGMENT, dtype=coarsest, accumulation=accumulation)
    untouched_side = UntouchedCandidate(
        candidate.module,
        climb.program,
        replay=segments,
        beside=climb.model,
        arguments=arguments,
        state=candidate.state,
        **pairing,
    )
    climb.add(untouched_side)
    return coarsest


def leave_out_export(climb: Climb) -> None:
    """Leave out what was judged of an export that returns something else than the candidate."""
    for score in [score for score in climb.scores if score.unlike is not None]:
        climb.scores.remove(score)
        climb.severity.pop(score.side.level, None)
        reason = (
            f"not judged op by op: its export returns other results than it does ({score.unlike}); "
            "its code decides by the length of the cache or of the step, which an export fixes"
        )
        climb.skipped.append(Skipped("*", "candidate", reason, level=Place.CANDIDATE))


def _weights_by_name(climb: Climb, candidate: LoadedModel) -> WeightsComparison | None:
    """Compare weights by name where a candidate has all names of the baseline: fewer may coincide by chance."""
    known = weights_of(climb.program)
    own = dict(candidate.module.state_dict(keep_vars=True)) | dict(candidate.module.named_buffers())
    if not known.keys() <= own.keys():
        return None
    # A program has no weights that it does not use, and a tied one under one name: a name on one side only is expected.
    return compare_weights(known, {name: tensor for name, tensor in own.items() if name in known})


def tensors_of(climb: Climb, record: TensorSource, rules: TensorMap | None) -> RecordedTensors:
    """Return the tensors of a record by the names of the baseline's program."""
    if len({entry.rank for entry in record.entries}) > 1:
        return TensorsOfRanks(record, climb.program, climb.model, climb.cases[0])
    return RecordedTensors(record, climb.program, rules)


def add_record(climb: Climb, tensors: RecordedTensors) -> torch.dtype | None:
    """A record of another run; returns its dtype: what it says, else that of most of its floating tensors."""
    dtype = dtype_of(tensors.source, by_values=not isinstance(tensors, TensorsOfRanks))
    accumulation = climb.of_runtime(of_any_runtime())
    if "op" in tensors.kinds and not isinstance(tensors, TensorsOfRanks):
        replay = Replay(climb.program, compiled=True, dtype=dtype, accumulation=accumulation)
        climb.add(RecordedOps(tensors, climb.program, replay=replay))
    else:
        segments = Replay(climb.program, cut=Cut.SEGMENT, dtype=dtype, accumulation=accumulation)
        if isinstance(tensors, TensorsOfRanks):
            climb.add(RecordedRanks(nn.Identity(), climb.program, tensors=tensors, replay=segments))
        else:
            climb.add(RecordedModules(nn.Identity(), climb.program, tensors=tensors, replay=segments))
    for item in tensors.source.skipped:
        climb.skipped.append(Skipped(item.site, "candidate", item.reason, step=item.step, level=Place.RECORD))
    return dtype


def replay_of(climb: Climb, pairs: Mapping[str, SitePair], **options: Any) -> Replay:
    """Return the replay of a side whose program has counterparts `pairs`: with regions where an op has none."""
    is_whole = all(site.node in pairs for site in climb.program.sites if site.kind == "op")
    options = {"cut": Cut.OP if is_whole else Cut.REGION, "accumulation": climb.accumulation, **options}
    return Replay(climb.program, **options)


def arguments_of(model: LoadedModel, inputs: Inputs) -> Sequence[Mapping[str, Any]]:
    """Return the keyword arguments of a plain module's steps: one forward each, without a cache as a result."""
    if inputs is None:
        return made_up_inputs(model)
    given = load_inputs(inputs) if isinstance(inputs, str) else inputs
    if model.stored is not None or isinstance(given, MadeUp):
        return given
    return [without_cache(model.module, step) for step in given]


def add_ranks(climb: Climb, engine: ParallelEngine, program: Program, replay: Replay) -> None:
    """The stored programs of all ranks, with their own weights, run side by side.

    Args:
        climb: With the pairs of `program`.
        engine: Whose ranks they are.
        program: That of one process, which they were made from.
        replay: Judges their ops.
    """
    mesh = mesh_of(engine.manifest)
    places = [
        [part_of(engine.directory, stage * mesh.tensor + place) for place in range(mesh.tensor)]
        for stage in range(mesh.pipeline)
    ]
    parts = [[load_program(one, files.load_weights(one / files.WEIGHTS)) for one in stage] for stage in places]
    layout = None
    if mesh.tensor > 1:
        names = {qualified: node for node, qualified in program.weight_names().items()}
        cuts = {
            names[name]: ShardPlacement(cut.axis, cut.blocks)
            for name, cut in engine.manifest.placements.items()
            if name in names
        }
        layout = lay_out(program, cuts, mesh.tensor)
    climb.add(RanksSide(program, climb.pairs, place=Place.RANKS, replay=replay, parts=parts, layout=layout))
