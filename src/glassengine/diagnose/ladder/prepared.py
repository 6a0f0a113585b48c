"""Prepares a check: its inputs, its climbs, and a record as its candidate."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from glassengine.compare.matching.maps import load_map
from glassengine.diagnose.ladder.climb import Climb
from glassengine.diagnose.ladder.generations import JUDGED
from glassengine.diagnose.ladder.record import add_record, tensors_of
from glassengine.engine.run.engine import Engine
from glassengine.errors import IncomparableError, UnknownNameError
from glassengine.judge.cases import Inputs, in_one_forward, read_inputs
from glassengine.judge.sides.recorded import RecordedTensors, case_of, given_case, recorded_inputs, require_own
from glassengine.numerics.ops import ACCUMULATIONS, Accumulation
from glassengine.program import LoadedModel
from glassengine.program.generation.generation import PLAIN
from glassengine.progress import Progress
from glassengine.recording.read.source import TensorSource


def accumulation_of(name: str | None) -> Accumulation:
    """Return how a candidate sums; None is what torch is set to."""
    if name is None:
        name = {"high": "tf32", "medium": "bfloat16"}.get(torch.get_float32_matmul_precision(), "float32")
    if name not in ACCUMULATIONS:
        raise UnknownNameError("accumulation", name, list(ACCUMULATIONS), hint="--accum tf32")
    return ACCUMULATIONS[name]


def given_to(
    model: LoadedModel, inputs: Inputs, of_first: TensorSource | None, *, alone: bool
) -> tuple[LoadedModel, Inputs, str | None]:
    """Return the model as it is judged, what it is given, and why there is no decode loop.

    Args:
        model: The baseline.
        inputs: What `--inputs` names.
        of_first: Record of the first rank; None where the candidate is none.
        alone: Whether it is judged without the programs that it generates with.
    """
    given = read_inputs(inputs) if of_first is None or inputs is not None else recorded_inputs(of_first, model)
    if of_first is not None and inputs is not None:
        require_own(of_first, given)
    if alone:
        model = model.judged_as(model.generation.alone)
    judged = JUDGED[model.generation]
    given = judged.given(model, given)
    more = judged.beside(model, given)
    if more:
        model, given = model.judged_as(PLAIN), in_one_forward(given)
    return model, given, f"{', '.join(more)} given: the model is judged as a plain module" if more else None


def climbs_of(
    model: LoadedModel,
    given: Inputs,
    steps: int,
    stack: ExitStack,
    progress: Progress,
    of_first: TensorSource | None = None,
) -> list[Climb]:
    """Return the climbs of a model, on what a record was made with where there is one.

    Raises:
        IncomparableError: What is given is not what the record was made with.
    """
    case, num_steps = None, steps + 1
    if of_first is not None:
        case = case_of(of_first, model.generation) if given is None else given_case(of_first, model, given)
        num_steps = len({entry.step for entry in of_first.entries})
    climbs = list(JUDGED[model.generation].start(model, given, min(steps, num_steps - 1), stack, progress, case))
    cases = climbs[0].cases
    if of_first is not None and (len(cases) > 1 or cases[0].num_steps > num_steps):
        raise IncomparableError(
            "the record is of one run, and more inputs are given",
            got=f"{of_first.path}: {num_steps} steps; {len(cases)} cases, the first of {cases[0].num_steps} steps",
            hint="--inputs FILE with what it was made on, and no more",
        )
    return climbs


def with_record(climb: Climb, record: TensorSource, rules: Any) -> RecordedTensors:
    """Add a record to a climb, and return its tensors."""
    tensors = tensors_of(climb, record, load_map(rules) if rules else None)
    climb.coarsest = add_record(climb, tensors)
    return tensors


def parts_of(engine: Engine | None, number: int) -> list[Engine | None]:
    """Return the engines of the programs that are climbed: one, or encoder (or vision) and decoder."""
    if engine is None:
        return [None] * number
    parts: list[Engine | None] = [engine.encoder, engine] if engine.manifest.has_encoder else [engine]
    if len(parts) != number:
        raise IncomparableError(
            "the engine was built from another kind of model",
            got="encoder and decoder" if len(parts) == 2 else "one program",
            expected="encoder and decoder" if number == 2 else "one program",
        )
    return parts
