"""Runs of a serving engine and their recordings, by level and prompt."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from glassengine.diagnose.ladder.levels import arguments_of
from glassengine.errors import BackendError, UsageError
from glassengine.judge.cases import Case, Inputs, causal_cases, module_cases, read_inputs
from glassengine.judge.sides.protocol import Place
from glassengine.judge.sides.recorded import case_of, recorded_case
from glassengine.plugins.serving.alignment import numbers_of, table_of
from glassengine.plugins.serving.joined import of_ranks
from glassengine.plugins.serving.recorded_engine import RecordedEngine
from glassengine.plugins.serving.requests import Forwards
from glassengine.program import LoadedModel
from glassengine.recording.formats.folders import ranks_of
from glassengine.recording.read.source import TensorSource, open_source
from glassengine.results import Skipped
from glassengine.serving.protocol import Served, ServedOnce, ServedTogether, ServingRun

DEPLOYED = "as deployed"


@dataclass(frozen=True)
class Runs:
    """What was recorded.

    Attributes:
        cases: Prompts with the tokens that follow.
        records: Level -> name of a case -> recording.
        skipped: Prompts that were not run.
    """

    cases: list[Case]
    records: dict[str, dict[str, TensorSource]]
    skipped: list[Skipped]


def runs_of(served: Served, model: LoadedModel, inputs: Inputs, steps: int, folder: Path) -> Runs:
    """Run an engine on prompts: as exactly as it can, then on the same tokens as deployed.

    Args:
        served: What is run; a recording is taken as it is.
        model: The baseline; its tokenizer encodes text.
        inputs: As for `check`; each prompt is run alone, of the built-in ones the first. Of a dump of one forward that
            does not have its token ids: what it was given.
        steps: Decode steps after the prefill.
        folder: For the recordings.

    Raises:
        UsageError: There is no prompt of one row.
        IncomparableError: A recording does not say on which tokens it was made.
    """
    if isinstance(served, RecordedEngine):
        level = DEPLOYED if served.source.metadata.get("as_deployed") else Place.RECORD.value
        if "forwards" in served.source.metadata:
            return _of_requests(served.source, level, model)
        one = _given(served.source, model, inputs) or case_of(served.source, model.generation)
        assert one is not None
        return Runs([one], {level: {one.name: served.source}}, [])
    given, skipped = _cases(model, inputs, steps, alone=not isinstance(served, ServedTogether))
    records: dict[str, dict[str, TensorSource]] = {Place.RECORD.value: {}, DEPLOYED: {}}
    cases = []
    numbers = numbers_of(getattr(model.module, "config", None))
    if isinstance(served, ServedTogether):
        return _together(served, model, given, steps, folder, skipped)
    for number, case in enumerate(given):
        run = ServingRun(_prompt(case), steps, numbers=numbers)
        served.record(run, folder / f"ops-{number}")
        ops = open_source(folder / f"ops-{number}")
        made = case_of(ops, model.generation)
        assert made is not None and made.tokens is not None
        cases.append(dataclasses.replace(made, name=case.name, origin=case.origin, recipes=case.recipes))
        records[Place.RECORD.value][case.name] = ops
        if isinstance(served, ServedOnce):
            continue
        following = made.tokens[0].tolist()
        deployed = dataclasses.replace(run, following=following, as_deployed=True)
        served.record(deployed, folder / f"deployed-{number}")
        records[DEPLOYED][case.name] = open_source(folder / f"deployed-{number}")
    return Runs(cases, {level: found for level, found in records.items() if found}, skipped)


def _given(source: TensorSource, model: LoadedModel, inputs: Inputs) -> Case | None:
    """Return the prompt of a dump of one forward that does not say it; of more, the later tokens are unknown."""
    if inputs is None or recorded_case(source) is not None or len({entry.step for entry in source.entries}) > 1:
        return None
    cases, _ = _cases(model, inputs, 0, alone=True)
    return cases[0]


def _of_requests(source: TensorSource, level: str, model: LoadedModel) -> Runs:
    """Return what a server computed, a case for each request."""
    cases: list[Case] = []
    records: dict[str, TensorSource] = {}
    skipped: list[Skipped] = []
    for one in _ranks(source, model):
        requests, lost = Forwards(one).requests()
        skipped += [item for item in lost if item not in skipped]
        of_rank = f", rank {one.metadata['rank']}" if one.metadata.get("rank") else ""
        for number, request in enumerate(requests):
            made = case_of(request, model.generation)
            assert made is not None
            case = dataclasses.replace(made, name=f"request {number}{of_rank}")
            cases.append(case)
            records[case.name] = request
    if not cases:
        raise UsageError(
            "no request of the recording is whole",
            got=f"{source.path}: {skipped[0].site}: {skipped[0].reason}" if skipped else str(source.path),
            expected="at least one whose prompt was read while it was recorded",
        )
    return Runs(cases, {level: records}, skipped)


def _ranks(source: TensorSource, model: LoadedModel) -> list[TensorSource]:
    """Return what the ranks of a server have, put together."""
    ranks = ranks_of(source)
    if len(ranks) == 1:
        return ranks
    numbers = numbers_of(getattr(model.module, "config", None))
    return of_ranks(ranks, table_of("vllm", str(source.metadata.get("architecture")), numbers).ranks, numbers)


def _together(
    served: ServedTogether,
    model: LoadedModel,
    given: list[Case],
    steps: int,
    folder: Path,
    skipped: list[Skipped],
) -> Runs:
    """Run prompts alone, then all of them at once, on the same tokens."""
    numbers = numbers_of(getattr(model.module, "config", None))
    runs = [ServingRun(_prompt(case), steps, numbers=numbers) for case in given]
    ways = {Place.RECORD.value: "alone", DEPLOYED: "together"}
    sources = served.record_together(runs, folder, list(ways.values()))
    records: dict[str, dict[str, TensorSource]] = {}
    cases: list[Case] = []
    for level, way in ways.items():
        found, lost = Forwards(sources[way]).requests()
        skipped = skipped + lost
        records[level] = {}
        for number, (case, run) in enumerate(zip(given, runs, strict=True)):
            # The last one of this prompt: what ran before it has only filled the prefix cache.
            one = next((one for one in reversed(found) if one.prompt == tuple(run.prompt)), None)
            if one is None:
                raise BackendError(f"{served.spec} has not answered a prompt", got=f"{case.name}, {way}")
            records[level][case.name] = one
            if level == Place.RECORD.value:
                made = case_of(one, model.generation)
                assert made is not None
                cases.append(dataclasses.replace(made, name=case.name, origin=case.origin, recipes=case.recipes))
            elif one.metadata["token_ids"] != records[Place.RECORD.value][case.name].metadata["token_ids"]:
                raise BackendError(f"{served.spec} was not given the same tokens", got=f"prompt {number}, {way}")
    return Runs(cases, records, skipped)


def run_of_encoder(served: Served, model: LoadedModel, inputs: Inputs, folder: Path) -> Runs:
    """Run an encoder on the first row of what the baseline is given, as exactly as it can and as deployed.

    Args:
        served: What is run.
        model: The baseline, of one forward.
        inputs: As for `check`.
        folder: For the recordings.

    Raises:
        UsageError: There are no token ids.
    """
    given = arguments_of(model, read_inputs(inputs))[0]
    if "input_ids" not in given:
        raise UsageError("an encoder is given token ids", got=", ".join(given), expected="input_ids [1, tokens]")
    ids = torch.as_tensor(given["input_ids"])[:1]
    (case,) = module_cases([{"input_ids": ids}])
    records: dict[str, dict[str, TensorSource]] = {}
    for level, is_deployed in ((Place.RECORD.value, False), (DEPLOYED, True)):
        path = folder / f"encoder-{int(is_deployed)}"
        served.record(ServingRun([int(token) for token in ids[0]], 0, as_deployed=is_deployed), path)
        records[level] = {case.name: open_source(path)}
    return Runs([case], records, [])


def _cases(model: LoadedModel, inputs: Inputs, steps: int, *, alone: bool) -> tuple[list[Case], list[Skipped]]:
    given = causal_cases(model, read_inputs(inputs), steps)
    rows = [case for case in given if case.batch == 1]
    cases = rows[:1] if inputs is None and alone else rows
    if not cases:
        raise UsageError("a serving engine is given prompts of one row", got=f"{given[0].batch} rows in a batch")
    why = "a serving engine is given rows without padding"
    if alone:
        why = "the engine is run on the first built-in prompt" if inputs is None else "prompts are run one at a time"
    return cases, [Skipped(case.name, "both", why) for case in given if case not in cases]


def _prompt(case: Case) -> list[int]:
    assert case.input_ids is not None and case.attention_mask is not None
    return [int(token) for token in case.input_ids[0][case.attention_mask[0].bool()]]
