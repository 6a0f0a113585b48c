"""Numbers that fit: for which an op makes what the candidate made, bases of frequencies; and what they are called."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from glassengine.judge.hypotheses.mistakes.arguments import BASES, literals, with_value
from glassengine.judge.hypotheses.mistakes.tensor_roles import PLACING
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, Literal, becoming
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit
from glassengine.numerics.float64 import is_real
from glassengine.ops.traits import named
from glassengine.program.representation.naming import op_name

_MOST_STEPS = 8
_FEW = 4
"""Of fewer elements some number fits whatever the mistake is; people write round ones."""

_STRETCHES = (0.5, 0.25, 0.125, 2.0, 4.0, 8.0, math.pi, 1 / math.pi, 2 * math.pi, 0.5 / math.pi)
"""By what people scale positions: longer texts, turns for radians."""
_APART = 1e-6
"""Relative distance from which on two numbers are others."""
_LEAST_FREQUENCIES = 3
_EVEN = 1e-5
"""Spread of the factors, as a share: as float32 rounds them."""
_FAMOUS = (
    ("log2(e)", math.log2(math.e)),
    ("ln(2)", math.log(2)),
    ("log10(e)", math.log10(math.e)),
    ("ln(10)", math.log(10)),
    ("sqrt(2)", math.sqrt(2)),
    ("1 / sqrt(2)", math.sqrt(0.5)),
    ("sqrt(2 / pi)", math.sqrt(2 / math.pi)),
    ("pi", math.pi),
    ("e", math.e),
)


def bases(question: Question) -> Iterator[Hypothesis]:
    """Yield: frequencies of another base (the theta of a rotation) than those that the baseline keeps as a buffer."""
    theirs = [float(value) for value in question.their_values if isinstance(value, (int, float)) and value > 1]
    for node in question.trial.inputs:
        value = question.trial.values[node]
        base = base_of(value) if is_real(value) else None
        for other in dict.fromkeys([*theirs, *BASES]) if base is not None else ():
            if base is not None and abs(other - base) > 1e-3 * base:
                places = torch.arange(value.numel(), dtype=torch.float64) / value.numel()
                made = (value.flatten()[0] * other**-places).reshape(value.shape)
                values = (float(f"{base:.6g}"), other)
                yield Hypothesis("position", of_another_base(base, other), {node: made}, "base", values)


def scaled_positions(question: Question) -> Iterator[Hypothesis]:
    """Yield: positions are scaled, seen at all angles of a rotation at once."""
    turned = [node for node in question.trial.ops if op_name(node) in PLACING]
    for factor in _STRETCHES if turned else ():
        text = f"positions are scaled: {factor:.6g} times the angles of the rotation"
        yield Hypothesis("position", text, dict.fromkeys(turned, _of_angles(factor)), "factor", (1.0, factor))


def fitted_constants(question: Question) -> Iterator[Hypothesis]:
    """Yield: one number is another one, whichever it takes."""
    for literal in literals(question):
        if isinstance(literal.value, bool) or not _is_continuous(literal):
            continue
        start = literal.value
        if start is None:
            start = 1.0 / math.sqrt(question.trial.values[literal.node.args[0]].shape[-1])  # type: ignore[index]
        found = _newton(question, literal, float(start))
        if found is not None and (question.actual.numel() >= _FEW or _is_round(found)):
            yield with_value(question, literal, float(f"{found:.6g}"))
            yield with_value(question, literal, found)


def _is_round(number: float) -> bool:
    """Whether a number looks like one that is written in code, or one over it."""
    return any(abs(value - float(f"{value:.3g}")) <= 1e-6 * abs(value) for value in (number, 1 / (number or 1.0)))


def _is_continuous(literal: Literal) -> bool:
    name, kind = op_name(literal.node), named(op_name(literal.node)).kind
    if literal.name == "scale" or name == "linspace":
        return literal.name in ("scale", "start", "end")
    if not isinstance(literal.value, (int, float)):
        return False
    is_known = literal.name in ("other", "self", "eps") or kind == "activation"
    return is_known and (isinstance(literal.value, float) or kind in ("factor", "term") or name == "pow")


def _newton(question: Question, literal: Literal, start: float) -> float | None:
    """Return the number for which the piece makes what the candidate made, by Gauss and Newton; None without one."""

    def made(number: float) -> torch.Tensor | None:
        return question.trial.changed({literal.node: becoming([(literal, number)])})

    def residual(value: torch.Tensor) -> torch.Tensor:
        keep = value.isfinite() & question.actual.isfinite()
        keep = keep if question.valid is None else keep & question.valid
        return torch.where(keep, question.actual.double() - value, 0.0)

    number, value = start, question.right
    # A comparison or a choice has no slope.
    if value.shape != question.actual.shape or not value.is_floating_point():
        return None
    for _ in range(_MOST_STEPS):
        step = 1e-4 * abs(number) or 1e-8
        beside = made(number + step)
        if beside is None or beside.shape != value.shape:
            return None
        slope = (beside - value) / step
        slope = torch.where(slope.isfinite(), slope, 0.0)
        power = float(slope.square().sum())
        if not power:
            return None
        moved = float((slope * residual(value)).sum()) / power
        number += moved
        following = made(number)
        if following is None or not math.isfinite(number):
            return None
        value = following
        if abs(moved) <= 1e-9 * abs(number):
            break
    return number if question.explains(value) else None


def origin_of(number: float, sizes: Iterable[int]) -> str | None:
    """Return what a number is called, as people would have written it; None where it is none of these.

    Args:
        number: A factor or another literal.
        sizes: Of axes of the tensors that it is used with.
    """
    if not math.isfinite(number) or any(abs(number - one) <= _APART * abs(one) for one in (0.0, 1.0, -1.0, 0.5, 2.0)):
        return None  # nobody has to be told what these are
    sign, size = ("-", -number) if number < 0 else ("", number)
    for name, value in _named(sizes):
        if abs(size - value) <= _APART * value:
            return sign + (f"({name})" if sign and " " in name else name)
    return None


def _named(sizes: Iterable[int]) -> Iterator[tuple[str, float]]:
    for width in sorted({size for size in sizes if size > 1}):
        yield f"1 / sqrt({width})", width**-0.5
        yield f"1 / {width}", 1 / width
        yield f"sqrt({width})", width**0.5
        if width > 4:
            yield f"{width - 1} / {width}", (width - 1) / width
            yield f"{width} / {width - 1}", width / (width - 1)
    yield from _FAMOUS


def origin_in(question: Question, number: float) -> str | None:
    """Return what a number is called where a tensor was flagged: by the sizes that are there, else by the model's."""
    near = _sizes(question.trial.values.values())
    return origin_of(number, near) or origin_of(number, _sizes(n.meta.get("val") for n in question.named.values()))


def _sizes(values: Iterable[Any]) -> set[int]:
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return {size for tensor in tensors for size in tensor.shape if isinstance(size, int)}


def base_of(value: torch.Tensor) -> float | None:
    """Return the theta of which n numbers (float64, in one axis) are powers -i / n; None where they are not."""
    flat = value.flatten()
    if flat.numel() < _LEAST_FREQUENCIES or flat.numel() != max(value.shape) or bool((flat <= 0).any()):
        return None
    steps = flat[1:] / flat[:-1]
    if float(steps.std()) > _EVEN * float(steps.abs().mean()) or float(steps[0]) >= 1:
        return None
    return float(float(steps.mean()) ** -len(flat))


def of_another_base(here: float, there: float) -> str:
    """Return how the mistake is reported that a base is another one."""
    return f"base of the frequencies (theta): {here:.6g} in the baseline, {there:.6g} in the candidate"


def _of_angles(factor: float) -> Edit:
    return lambda call: call.target(call.args[0] * factor, *call.args[1:], **call.kwargs)
