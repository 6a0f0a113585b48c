"""What is rounded on the way: operands and results in a dtype with fewer bits than the program has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, tensors_of, with_leaves
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Call
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name

_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_TF32 = 1 << 11
"""Steps of a mantissa between a half and one."""


def coarser(question: Question) -> Iterator[Hypothesis]:
    """Yield: an operand, all operands or the result of an op is rounded to a dtype with fewer bits."""
    trial = question.trial
    for node in reversed(trial.ops):
        made = trial.values[node]
        if not isinstance(made, torch.Tensor) or not made.is_floating_point() or traits_of(node).kind == "reshape":
            continue
        tensors = [(place, source) for place, source in tensors_of(trial, node) if _is_number(trial.values[source])]
        name = op_name(node)
        for word, rounded in _roundings(question):

            def of_result(call: Call, rounded: Any = rounded) -> Any:
                return rounded(call.value)

            yield Hypothesis("dtype", f"the result of {name} is rounded to {word}", {node: of_result}, "dtype")
            every = tuple(place for place, _ in tensors)

            def of_both(call: Call, rounded: Any = rounded, places: Any = every) -> Any:
                leaves = torch.utils._pytree.tree_leaves((call.args, dict(call.kwargs)))
                return rounded(with_leaves(call, {place: rounded(leaves[place]) for place in places}))

            yield Hypothesis("dtype", f"{name} is computed in {word}", {node: of_both}, "dtype")
            chosen = [[item] for item in tensors]
            for some in chosen if len(tensors) == 1 else [*chosen, tensors]:
                places = [place for place, _ in some]
                what = question.label(some[0][1]) if len(some) == 1 else "what it reads"

                def of_operands(call: Call, rounded: Any = rounded, places: Any = tuple(places)) -> Any:
                    leaves = torch.utils._pytree.tree_leaves((call.args, dict(call.kwargs)))
                    return with_leaves(call, {place: rounded(leaves[place]) for place in places})

                yield Hypothesis("dtype", f"{what} is rounded to {word} before {name}", {node: of_operands}, "dtype")


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _roundings(question: Question) -> Iterator[tuple[str, Any]]:
    """Yield (name, function) of the dtypes that are coarser than the rounding of the piece."""
    for dtype in _DTYPES:
        if torch.finfo(dtype).eps > 2 * question.noise:
            yield str(dtype).removeprefix("torch."), lambda value, dtype=dtype: _through(value, dtype)
    if 2 * question.noise < 2.0**-10:
        yield "TensorFloat-32", _nearest_tf32
        yield "TensorFloat-32, towards zero", _cut_tf32


def _through(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.float().to(dtype).double()


def _nearest_tf32(value: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp((mantissa * _TF32).round() / _TF32, exponent)


def _cut_tf32(value: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp((mantissa * _TF32).trunc() / _TF32, exponent)


def in_its_own_dtype(question: Question) -> Iterator[Hypothesis]:
    """Yield: what the baseline computes in a finer dtype is computed in the candidate's own."""
    if question.native is not None:
        text = "computed in the dtype of the model: the baseline casts to a finer one first"
        yield Hypothesis("dtype", text, {question.trial.end: question.native})
