"""Mistakes in precision: operands and results in a dtype with fewer bits than the program has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, tensors_of, with_leaves
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit, TrialCall
from glassengine.numerics.float64 import is_real
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name

_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_TF32 = 1 << 11
"""Steps of a mantissa between a half and one."""

Rounding = Callable[[Tensor], Tensor]


def coarser(question: Question) -> Iterator[Hypothesis]:
    """Yield: an operand, all operands or the result of an op is rounded to a dtype with fewer bits."""
    trial = question.trial
    for node, _ in trial.real_ops():
        if traits_of(node).kind == "reshape":
            continue
        tensors = [(place, source) for place, source in tensors_of(trial, node) if is_real(trial.values[source])]
        every = [place for place, _ in tensors]
        name = op_name(node)
        for word, rounded in _roundings(question):
            result = {node: lambda call, rounded=rounded: rounded(call.value)}
            yield Hypothesis("dtype", f"the result of {name} is rounded to {word}", result, "dtype")
            computed = {node: _of_operands(every, rounded, rounded)}
            yield Hypothesis("dtype", f"{name} is computed in {word}", computed, "dtype")
            chosen = [(question.label(source), [place]) for place, source in tensors]
            for what, places in chosen if len(chosen) == 1 else [*chosen, ("what it reads", every)]:
                text = f"{what} is rounded to {word} before {name}"
                yield Hypothesis("dtype", text, {node: _of_operands(places, rounded)}, "dtype")


def in_its_own_dtype(question: Question) -> Iterator[Hypothesis]:
    """Yield: what the baseline computes in a finer dtype is computed in the candidate's own."""
    if question.native is not None:
        text = "computed in the dtype of the model: the baseline casts to a finer one first"
        yield Hypothesis("dtype", text, {question.trial.end: question.native})


def _of_operands(places: list[int], rounded: Rounding, finished: Rounding = lambda made: made) -> Edit:
    def edit(call: TrialCall) -> Any:
        leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
        return finished(with_leaves(call, {place: rounded(leaves[place]) for place in places}))

    return edit


def _roundings(question: Question) -> Iterator[tuple[str, Rounding]]:
    """Yield (name, function) of the dtypes that are coarser than the rounding of the piece."""
    for dtype in _DTYPES:
        if torch.finfo(dtype).eps > 2 * question.noise:
            yield str(dtype).removeprefix("torch."), partial(_through, dtype=dtype)
    if 2 * question.noise < 2.0**-10:
        yield "TensorFloat-32", lambda value: to_tf32(value, torch.round)
        yield "TensorFloat-32, towards zero", lambda value: to_tf32(value, torch.trunc)


def _through(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.float().to(dtype).double()


def to_tf32(value: Tensor, rounded: Rounding = torch.round) -> Tensor:
    """Return numbers as TensorFloat-32 has them: with ten bits of the mantissa."""
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp(rounded(mantissa * _TF32) / _TF32, exponent)
