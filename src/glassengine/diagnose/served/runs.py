"""What a serving engine is run on, and what it showed: recordings by rung and prompt."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from glassengine.errors import UsageError
from glassengine.judge.cases import Case, causal_cases, read_inputs
from glassengine.judge.sides.protocol import Place
from glassengine.judge.sides.recorded import case_of
from glassengine.program import LoadedModel
from glassengine.recording.read.source import TensorSource, open_source
from glassengine.results import Skipped
from glassengine.serving.alignment import numbers_of
from glassengine.serving.protocol import Run, Served
from glassengine.serving.target import RecordedEngine

DEPLOYED = "as deployed"


@dataclass(frozen=True)
class Runs:
    """What was recorded.

    Attributes:
        cases: Prompts with the tokens that follow.
        records: Rung -> name of a case -> recording.
        skipped: Prompts that were not run.
    """

    cases: list[Case]
    records: dict[str, dict[str, TensorSource]]
    skipped: list[Skipped]


def runs_of(served: Served, model: LoadedModel, inputs: str | None, steps: int, folder: Path) -> Runs:
    """Run an engine on prompts: as exactly as it can, then on the same tokens as deployed.

    Args:
        served: What is run; a recording is taken as it is.
        model: The baseline; its tokenizer encodes text.
        inputs: As for `check`; each prompt is run alone, of the built-in ones the first.
        steps: Decode steps after the prefill.
        folder: For the recordings.

    Raises:
        UsageError: There is no prompt of one row.
        IncomparableError: A recording does not say on which tokens it was made.
    """
    if isinstance(served, RecordedEngine):
        case = case_of(served.source, model.generation)
        assert case is not None
        rung = DEPLOYED if served.source.metadata.get("as_deployed") else Place.RECORD.value
        return Runs([case], {rung: {case.name: served.source}}, [])
    given, skipped = _cases(model, inputs, steps)
    records: dict[str, dict[str, TensorSource]] = {Place.RECORD.value: {}, DEPLOYED: {}}
    cases = []
    numbers = numbers_of(getattr(model.module, "config", None))
    for number, case in enumerate(given):
        run = Run(_prompt(case), steps, numbers=numbers)
        served.record(run, folder / f"ops-{number}")
        ops = open_source(folder / f"ops-{number}")
        made = case_of(ops, model.generation)
        assert made is not None and made.tokens is not None
        following = made.tokens[0].tolist()
        deployed = dataclasses.replace(run, following=following, as_deployed=True)
        served.record(deployed, folder / f"deployed-{number}")
        cases.append(dataclasses.replace(made, name=case.name, origin=case.origin, recipes=case.recipes))
        records[Place.RECORD.value][case.name] = ops
        records[DEPLOYED][case.name] = open_source(folder / f"deployed-{number}")
    return Runs(cases, records, skipped)


def _cases(model: LoadedModel, inputs: str | None, steps: int) -> tuple[list[Case], list[Skipped]]:
    given = causal_cases(model, read_inputs(inputs), steps)
    alone = [case for case in given if case.batch == 1]
    cases = alone[:1] if inputs is None else alone
    if not cases:
        raise UsageError("a serving engine is given prompts of one row", got=f"{given[0].batch} rows in a batch")
    why = "a serving engine is run on the first built-in prompt" if inputs is None else "prompts are run one at a time"
    return cases, [Skipped(case.name, "both", why) for case in given if case not in cases]


def _prompt(case: Case) -> list[int]:
    assert case.input_ids is not None and case.attention_mask is not None
    return [int(token) for token in case.input_ids[0][case.attention_mask[0].bool()]]
