"""Another model as candidate: op by op through its own export, and unchanged at module outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from glassengine.backends.calibration import kernels_of
from glassengine.diagnose.ladder.climb import Climb, nodes, skip_unpaired
from glassengine.diagnose.ladder.levels import replay_of, start
from glassengine.diagnose.ladder.step_by_step import StepStage, program_of, specialized
from glassengine.errors import UsageError, first_line
from glassengine.judge.pairing.by_value import pair_programs
from glassengine.judge.pairing.weights import compare_paired_weights, compare_weights, states_alike, weights_of
from glassengine.judge.replay.replay import Cut, Replay
from glassengine.judge.sides.module import UntouchedCandidate, own_names
from glassengine.judge.sides.program import Grafts, ProgramSide
from glassengine.judge.sides.protocol import RUNTIME, Arranged, Place
from glassengine.program import LoadedModel
from glassengine.progress import Progress, Work
from glassengine.results import Skipped, WeightsComparison


def start_stage(stage: StepStage, stack: ExitStack, progress: Progress) -> Climb:
    """Return the climb of a stage, with its first side: the unchanged baseline."""
    climb = start(stage.baseline, stage.steps, 0, stack, progress, arguments=stage.ours_of, exported=stage.ours)
    climb.skipped += specialized(stage)
    return climb


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
    observable: dict[str, Any] = {}
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
        same = candidate.dtype == climb.baseline.dtype
        options: dict[str, Any] = {
            "compiled": not same,
            "dtype": None if same else getattr(torch, candidate.dtype),
        }
        replay = replay_of(climb, by_node, **options)
        climb.pairs, arranged = by_node, Arranged(climb.program, by_node)
        both_remember = climb.baseline.state is not None and candidate.state is not None
        remembered = states_alike(climb.program, program) if both_remember else {}
        side = ProgramSide(
            program,
            by_node,
            place=Place.CANDIDATE,
            replay=replay,
            arranged=arranged,
            remembered=remembered,
            has_fixed_cache=program.layout is not None and candidate.stored is None,
        )
        if grafts:
            side.grafts = Grafts(climb.program, by_node, arranged, grafts)
        climb.add(side)
        skip_unpaired(climb, program, by_node, Place.CANDIDATE)
        observable = {"names": own_names(program, by_node), "arranged": arranged}
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
        **observable,
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
