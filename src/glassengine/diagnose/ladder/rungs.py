"""The rungs of a check: which sides run, what of them can be observed, how their tensors pair with the baseline's."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from glassengine.backends import registry
from glassengine.backends.accuracy.calibration import kernels_of, of_any_runtime
from glassengine.diagnose.ladder.op_by_op import op_by_op
from glassengine.engine.build.build import build_program
from glassengine.engine.run.engine import Engine
from glassengine.errors import GlassError, IncomparableError, UsageError
from glassengine.judge.cases import Case, Inputs, causal_cases, module_cases
from glassengine.judge.graphs.by_name import SitePair
from glassengine.judge.pairing.programs import pair_programs
from glassengine.judge.pairing.weights import compare_paired_weights
from glassengine.judge.replay.op import Replay
from glassengine.judge.replay.region import RegionReplay, covered
from glassengine.judge.replay.segment import SegmentReplay
from glassengine.judge.sides.arguments import Arguments, without_cache
from glassengine.judge.sides.arranged import Arranged
from glassengine.judge.sides.engine import EngineSide
from glassengine.judge.sides.module import ModuleSide
from glassengine.judge.sides.program import ProgramSide
from glassengine.judge.sides.protocol import Guarantee, Place, Side
from glassengine.judge.sides.recorded import RecordedOps, RecordedTensors, module_side
from glassengine.judge.sides.source import SourceSide, untouched
from glassengine.judge.verdict.score import Score
from glassengine.judge.verdict.severity import Severity
from glassengine.numerics.kernels import UNMEASURED, Kernels
from glassengine.numerics.metrics.tolerance import is_inexact
from glassengine.numerics.ops import FLOAT32_SUMS, Accumulation
from glassengine.program import LoadedModel, Program, example_inputs, export_program, load_inputs
from glassengine.program.inputs.modules import module_inputs
from glassengine.program.inputs.programs import stored_inputs
from glassengine.program.kinds.causal_lm import is_pretrained
from glassengine.program.kinds.steps import MadeUp
from glassengine.program.representation.derived import From
from glassengine.program.representation.outputs import OutputPlan, plan_outputs
from glassengine.program.representation.passes import apply_pass
from glassengine.progress import Progress, Work
from glassengine.results import Skipped, WeightsComparison

logger = logging.getLogger("glassengine")

BYTE_BUDGET = 1 << 30
"""Most bytes of debug outputs in one step of a check."""


@dataclass
class Climb:
    """Everything one check has; filled rung by rung.

    `built` is what the engines are built from, `pairs` which of its ops are those of the baseline's program, and
    `candidate` names what is built.
    """

    baseline: LoadedModel
    program: Program
    cases: list[Case]
    model: ModuleSide | SourceSide
    scores: list[Score]
    accumulation: Accumulation = FLOAT32_SUMS
    kernels: Kernels = UNMEASURED
    built: Program | None = None
    pairs: Mapping[str, SitePair] = field(default_factory=dict)
    candidate: str = ""
    skipped: list[Skipped] = field(default_factory=list)
    severity: dict[str, Severity] = field(default_factory=dict)
    weights: WeightsComparison | None = None
    stack: ExitStack = field(default_factory=ExitStack)

    def of_runtime(self, kernels: Kernels) -> Accumulation:
        """Return how a runtime of such kernels computes; the floor of all sides counts them from now on."""
        self.kernels = self.kernels.joined(kernels)
        return replace(self.accumulation, kernels=kernels)

    def add(self, side: Side) -> None:
        """Add a side to judge."""
        self.scores.append(Score(side, self.program))

    def chooser(self) -> ModuleSide:
        """Return the untouched model once more, to choose the same tokens for sides that are judged later."""
        return self.model.chooser()


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
    """Return a climb with the exported program and its first side: the untouched model.

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
        progress(Work.EXPORTING.says("exporting the program"))
    program = export_program(model, inputs=given) if exported is None else exported
    side = untouched(model, program, arguments)
    climb = Climb(model, program, cases, side, [], kernels=side.kernels, stack=stack)
    climb.add(side)
    return climb


def add_built(
    climb: Climb,
    backend: str | None,
    passes: Sequence[str],
    progress: Progress,
    *,
    all_rungs: bool = False,
    only_release: bool = False,
) -> None:
    """The baseline's own passes, (with `all_rungs`) every op compiled alone, engine and release engine."""
    add_passes(climb, passes, progress)
    assert climb.built is not None
    if all_rungs:
        add_op_by_op(climb, backend, progress)
    folder = Path(climb.stack.enter_context(tempfile.TemporaryDirectory(prefix="glassengine-check-")))
    sizes = sizes_of(climb.cases)
    if not only_release:
        plan = observable(climb, climb.built)
        progress(Work.BUILDING_OBSERVABLE.says(f"building the engine with {len(plan.added)} debug outputs"))
        observed = [*plan.added, *plan.derived]
        engine = build_program(climb.built, folder / "engine", backend=backend, outputs=observed, **sizes)
        _add_observable(climb, engine, observed)
    progress(Work.BUILDING_RELEASE.says("building the release engine"))
    release = build_program(climb.built, folder / "release", backend=backend, **sizes)
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
        skip_unpaired(climb, climb.built, climb.pairs, side.rung)


def add_op_by_op(climb: Climb, backend: str | None, progress: Progress) -> None:
    """Every op of what the engine is built from, or those around what the engine got wrong, compiled alone."""
    program = climb.built or climb.program
    engine = next((score for score in climb.scores if score.side.place is Place.ENGINE), None)
    around = None if engine is None else list(engine.divergences)
    what = "every op alone" if around is None else f"{len(around)} ops and what is near alone"
    progress(Work.COMPILING.says(f"compiling {what}"))
    try:
        side = op_by_op(climb.program, program, climb.pairs, backend, around=around, accumulation=climb.accumulation)
    except UsageError as error:
        climb.skipped.append(Skipped("*", "candidate", f"no op-by-op rung: {error.what}", rung=Place.OP_BY_OP))
        return
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
    if not only_release:
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
    return EngineSide(release, _result_nodes(climb.program, release), program=climb.built or climb.program, **options)


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


def replay_of(climb: Climb, pairs: Mapping[str, SitePair], **options: Any) -> Replay:
    """Return the replay of a side whose program has counterparts `pairs`: with regions where an op has none."""
    is_whole = all(site.node in pairs for site in climb.program.sites if site.kind == "op")
    make = Replay if is_whole else RegionReplay
    return make(climb.program, **{"accumulation": climb.accumulation, **options})


def arguments_of(model: LoadedModel, inputs: Inputs) -> Sequence[Mapping[str, Any]]:
    """Return the keyword arguments of a plain module's steps: one forward each, without a cache as a result."""
    if inputs is None:
        if model.stored is not None:
            return stored_inputs(model.module, model.stored)
        if is_pretrained(model.module):
            return example_inputs(model.module, model.directory)
        return module_inputs(model.module, model.spec)
    given = load_inputs(inputs) if isinstance(inputs, str) else inputs
    if model.stored is not None or isinstance(given, MadeUp):
        return given
    return [without_cache(model.module, step) for step in given]


def nodes(pairs: Mapping[str, SitePair]) -> dict[str, str]:
    """Return baseline node -> candidate node."""
    return {node: pair.candidate.node for node, pair in pairs.items()}


def skip_unpaired(climb: Climb, program: Program, pairs: Mapping[str, SitePair], rung: str) -> None:
    """List the ops of both programs that have no counterpart and are in no region."""
    taken = {pair.candidate.node for pair in pairs.values()}
    inside = covered(climb.program, pairs)
    for site in climb.program.sites:
        if site.kind == "op" and site.node not in pairs and site.node not in inside:
            climb.skipped.append(Skipped(site.name, "baseline", "no counterpart in the candidate", rung=rung))
    reason = "written with other ops: no counterpart in the baseline"
    for site in program.sites:
        if site.kind == "op" and site.node not in taken:
            climb.skipped.append(Skipped(site.name, "candidate", reason, rung=rung))


def add_record(climb: Climb, tensors: RecordedTensors) -> torch.dtype | None:
    """A record of another run; returns its dtype: what it says, else that of most of its floating tensors."""
    known = str(tensors.source.metadata.get("dtype"))
    if not is_inexact(known):
        floating = Counter(entry.dtype for entry in tensors.source.entries if is_inexact(entry.dtype))
        known = floating.most_common(1)[0][0] if floating else known
    dtype: torch.dtype | None = getattr(torch, known, None)
    accumulation = climb.of_runtime(of_any_runtime())
    if "op" in tensors.kinds:
        replay = Replay(climb.program, compiled=True, dtype=dtype, accumulation=accumulation)
        climb.add(RecordedOps(tensors, climb.program, replay=replay))
    else:
        segments = SegmentReplay(climb.program, coarsest=dtype, accumulation=accumulation)
        climb.add(module_side(tensors, climb.program, replay=segments))
    for item in tensors.source.skipped:
        climb.skipped.append(Skipped(item.site, "candidate", item.reason, step=item.step, rung=Place.RECORD))
    return dtype


def observable(climb: Climb, program: Program) -> OutputPlan:
    """Return which ops of `program` an engine for the cases of a check can have as outputs; the rest is skipped."""
    nodes = [site.node for site in program.sites if site.kind == "op"]
    sizes = {"sequence": 1, "cache": 1, "batch": 1}
    if climb.program.generates:
        longest = max(climb.cases, key=lambda case: case.batch * case.cache_length)
        assert longest.input_ids is not None
        sizes = {"batch": longest.batch, "sequence": longest.input_ids.shape[1], "cache": longest.cache_length}
    plan = plan_outputs(program, nodes, sizes=sizes, byte_budget=BYTE_BUDGET)
    for node, reason in plan.left_out.items():
        climb.skipped.append(Skipped(program.sites.by_node[node][0].name, "candidate", reason, rung=Place.ENGINE))
    constant = [node for node, derived in plan.derived.items() if derived.source is From.WEIGHTS]
    for node in constant:
        name = program.sites.by_node[node][0].name
        climb.skipped.append(Skipped(name, "both", "depends on weights alone: folded by compilers", rung=Place.ENGINE))
    kept = {node: derived for node, derived in plan.derived.items() if node not in constant}
    return OutputPlan(plan.added, kept, plan.left_out, plan.num_bytes)


def engine_nodes(climb: Climb, engine: Engine, observed: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Baseline node -> (output name, engine site, method), for the engine's outputs that the baseline's program has.

    Args:
        climb: With the pairs of the program that `engine` was built from.
        engine: With debug outputs.
        observed: Which nodes of its program to look at.
    """
    nodes = _result_nodes(climb.program, engine)
    table = {entry.node: entry for entry in engine.manifest.added_outputs}
    for node, pair in climb.pairs.items():
        own = pair.candidate.node
        if own in table and own in observed:
            nodes[node] = (table[own].name, pair.candidate.name, pair.method)
    return nodes


def _result_nodes(baseline: Program, engine: Engine) -> dict[str, tuple[str, str, str]]:
    """Baseline node -> (output name, engine site, method) for results and updated caches."""
    own = {entry.name: entry.node for entry in engine.manifest.outputs}
    nodes = {}
    for name, node in baseline.output_nodes.items():
        if name in own:
            sites = engine.sites.by_node.get(own[name])
            nodes[node] = (name, sites[0].name if sites else name, "name")
    return nodes


def sizes_of(cases: Sequence[Case]) -> dict[str, Any]:
    """The ranges that an engine for `cases` must be built with."""
    causal = [case for case in cases if case.input_ids is not None]
    if not causal:
        return {}
    return {"max_batch_size": max(c.batch for c in causal), "max_seq_len": max(c.cache_length for c in causal)}
