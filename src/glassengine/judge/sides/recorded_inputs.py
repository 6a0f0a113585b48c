"""What a record was made on: the tokens or tensors that the baseline is given, and the dtype; nothing is made up."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import torch

from glassengine.capture.runs.known_tokens import prompt_lengths
from glassengine.errors import IncomparableError
from glassengine.judge.cases import Case
from glassengine.judge.given import Inputs
from glassengine.judge.sides.record_names import named_inputs_of
from glassengine.numerics.metrics.tolerance import is_inexact, precision_of
from glassengine.program import LoadedModel
from glassengine.program.generation.generation import Generation
from glassengine.program.inputs.programs import inputs_in_file
from glassengine.recording.layout.layout import Entry
from glassengine.recording.read.source import TensorSource

_MOST_READ = 64
"""Tensors of a record whose values are asked in which dtype they were computed."""


def case_of(source: TensorSource, generation: Generation) -> Case | None:
    """Return what a record was made with; None where a plain module's record does not say.

    Raises:
        IncomparableError: A language model's record does not say it: on other tokens everything is another.
    """
    case = recorded_case(source)
    if case is None and generation.decodes_tokens:
        raise IncomparableError(
            "the record does not say on which tokens it was made",
            got=f"{source.path}: no token ids of distinguishable rows",
            expected="input_ids [batch, sequence] among its tensors, or a recording of a model that is given them",
            hint="give them: --inputs FILE; of a server: --layout vllm",
        )
    return case


def dtype_of(source: TensorSource, *, by_values: bool = True) -> torch.dtype | None:
    """Return the floating dtype of a record: what it says, else that of the values of most of its floating tensors.

    Args:
        source: The record.
        by_values: False for ranks, whose tensors are put together by what they are compared with: not before that.
    """
    known = str(source.metadata.get("dtype"))
    if not is_inexact(known):
        entries = [entry for entry in source.entries if is_inexact(entry.dtype)]
        if by_values:
            floating = Counter(precision_of(source.tensor(entry)) for entry in entries[:_MOST_READ])
        else:
            floating = Counter(entry.dtype for entry in entries)
        known = floating.most_common(1)[0][0] if floating else known
    dtype: torch.dtype | None = getattr(torch, known, None)
    return dtype


def recorded_inputs(source: TensorSource, model: LoadedModel) -> list[dict[str, Any]] | None:
    """Return what a plain module was given in each step of a record, or the inputs that the model's file keeps.

    Raises:
        IncomparableError: Neither says it: on other inputs everything is another.
    """
    if not source.entries:
        raise IncomparableError(
            "the record holds no tensors",
            got=", ".join([str(source.path), *(f"{one.site}: {one.reason}" for one in source.skipped[:4])]),
            hint="save arrays of numbers by name, half precision as float32: numpy.savez(FILE, **tensors)",
        )
    if model.generation.takes_tokens:
        return None
    if model.stored is not None:
        names = {port.name: True for port in model.stored.inputs}
    else:
        known = inspect.signature(model.module.forward).parameters.values()
        names = {one.name: one.default is one.empty for one in known if one.kind is one.POSITIONAL_OR_KEYWORD}
    found: list[dict[str, Any]] = []
    for step, there in sorted(_by_step(source).items()):
        called = named_inputs_of(there, list(names))
        missing = [name for name, is_required in names.items() if is_required and name not in called]
        if missing or not called:
            kept = inputs_in_file(model.module)
            if kept is not None and len(called) == len(found) == 0:
                return kept
            raise IncomparableError(
                "the record does not say on which inputs it was made",
                got=f"{source.path}: no {', '.join(missing or names)} in step {step}",
                expected=f"the inputs beside the tensors, by name: {', '.join(names)}",
                hint="give what it was made on: --inputs FILE",
            )
        found.append({name: source.tensor(there[own]) for name, own in called.items()})
    return found


def require_own(source: TensorSource, given: Inputs, own: Case | None = None) -> None:
    """Refuse inputs that are not those which a record has.

    Args:
        source: The record.
        given: What `--inputs` names.
        own: What a record of a language model knows to have been made with.

    Raises:
        IncomparableError: The record has another tensor of that name.
    """
    steps = _by_step(source)
    for step, values in enumerate(() if given is None or isinstance(given, str) else given):
        there = steps.get(step, {})
        ours = {name: source.tensor(there[own]) for name, own in named_inputs_of(there, list(values)).items()}
        ours |= {} if own is None or own.input_ids is None else {"input_ids": own.input_ids}
        for name, tensor in ours.items():
            wanted = values.get(name)
            if not isinstance(wanted, torch.Tensor) or wanted.shape != tensor.shape:
                continue
            if not torch.allclose(wanted.double(), tensor.double(), rtol=1e-2, equal_nan=True):
                raise IncomparableError(
                    "the record was made on other inputs than those given",
                    got=f"{source.path}: another {name} in step {step}",
                    hint="leave out --inputs: the record has its own",
                )


def given_case(source: TensorSource, model: LoadedModel, given: Inputs) -> Case | None:
    """Return what a record of a language model was made with beside inputs that are given; None if it does not say.

    Raises:
        IncomparableError: It was made with others.
    """
    case = recorded_case(source) if model.generation.decodes_tokens else None
    require_own(source, given, case)
    return case


def recorded_case(source: TensorSource) -> Case | None:
    """Return the prompts and tokens that a record of a language model was made with; None where it does not say.

    Raises:
        IncomparableError: The tokens of its steps are unknown.
    """
    rows = source.metadata.get("token_ids") or _token_rows(source)
    steps = sorted({entry.step for entry in source.entries})
    lengths = prompt_lengths(source)
    if not rows or not lengths or len(rows) != len(lengths):
        return None
    if steps != list(range(len(steps))) or any(len(r) < n + len(steps) - 1 for r, n in zip(rows, lengths, strict=True)):
        raise IncomparableError(
            "the tokens of the record's steps are unknown",
            got=f"steps {steps[:8]}, rows of {[len(row) for row in rows]} tokens, prompts of {lengths}",
            expected="all steps from the prefill on",
        )
    longest = max(lengths)
    ids = torch.zeros((len(rows), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids[index, longest - length :] = torch.tensor(row[:length])
        mask[index, longest - length :] = 1
    following = [row[length : length + len(steps) - 1] for row, length in zip(rows, lengths, strict=True)]
    tokens = torch.tensor(following)
    return Case("recorded", len(steps), input_ids=ids, attention_mask=mask, tokens=tokens, origin="recorded")


def _by_step(source: TensorSource) -> dict[int, dict[str, Entry]]:
    """Return step -> name -> entry."""
    found: dict[int, dict[str, Entry]] = {}
    for entry in source.entries:
        found.setdefault(entry.step, {})[entry.site] = entry
    return found


def _token_rows(source: TensorSource) -> list[list[int]]:
    """Return the tokens of each row without padding, of a dump that has them as tensors in each step."""
    steps = _by_step(source)
    found = [there.get("input_ids") for _, there in sorted(steps.items())]
    if None in found or any(entry is not None and len(entry.shape) != 2 for entry in found):
        return []
    ids = [source.tensor(entry) for entry in found if entry is not None]
    mask = steps.get(0, {}).get("attention_mask")
    real = torch.ones_like(ids[0]) if mask is None else source.tensor(mask)
    if len({len(one) for one in (real, *ids)}) > 1 or real.shape != ids[0].shape:
        return []
    rows = zip(ids[0], real.bool(), torch.cat([ids[0][:, :0], *ids[1:]], 1), strict=True)
    return [[*prompt[valid].tolist(), *following.tolist()] for prompt, valid, following in rows]
