"""Non-tensor arguments of ops: epsilons, scales, dimensions, strides, flags, words, numbers written in a sum.

First what the candidate's own ops have, then common values, then any number that fits, and what it is called.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.argument_words import is_epsilon, kind_of, name_of, text_of
from glassengine.judge.hypotheses.mistakes.tensor_roles import PLACING, counts_alone, makes_sines
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, Literal, becoming, for_any_rank, literals_of
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit
from glassengine.numerics.float64 import is_real
from glassengine.ops.traits import named, traits_of
from glassengine.program.representation.naming import op_name

_SKIPPED = frozenset(
    {"layout", "device", "pin_memory", "memory_format", "dtype", "dropout_p", "train", "training", "momentum"}
)
_OF_SUMS = frozenset({"alpha", "beta"})
"""Factors of the terms of a sum, of which more is asked elsewhere; of an activation they are what it is."""
_EPSILONS = (0.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12)
BASES = (1e2, 1e3, 1e4, 2e4, 5e4, 1e5, 1.5e5, 2e5, 5e5, 1e6, 5e6, 1e7)
_SLOPES = (0.01, 0.1, 0.2, 0.3)
_LEAST_PLACES = 3
_WORDS = {
    "approximate": ("none", "tanh"),
    "mode": ("constant", "reflect", "replicate", "circular"),
    "rounding_mode": ("floor", "trunc"),
}


def same_op(question: Question) -> Iterator[Hypothesis]:
    """Yield: all arguments as the candidate's op of the same name has them, several at once."""
    for node, differing in _differing(question):
        first, value = differing[0]
        # No line is corrected by one of several.
        name, values = (name_of(question, first), (first.value, value)) if len(differing) == 1 else (None, None)
        text, kind = _text_of_all(question, differing), kind_of(question, first, value)
        yield Hypothesis(kind, text, {node: becoming(differing)}, name, values)


def same_ops(question: Question) -> Iterator[Hypothesis]:
    """Yield: the arguments of several ops as the candidate has them: a padding that goes with a dilation."""
    several = dict(_differing(question))
    if len(several) > 1:
        everything = [one for differing in several.values() for one in differing]
        edits = {node: becoming(differing) for node, differing in several.items()}
        yield Hypothesis(kind_of(question, *everything[-1]), _text_of_all(question, everything), edits)


def _text_of_all(question: Question, differing: Sequence[tuple[Literal, Any]]) -> str:
    return "; ".join(text_of(question, one, other) for one, other in differing)


def _differing(question: Question) -> Iterator[tuple[Node, list[tuple[Literal, Any]]]]:
    """Yield the ops whose arguments are others in the candidate's op of the same name, with these and their values."""
    for node in question.trial.ops:
        there = _in_its_place(question, node)
        if there is None:
            continue
        ours = {literal.place: literal for literal in literals_of(node)}
        read = there.args[0].meta.get("val") if there.args and isinstance(there.args[0], Node) else None
        here, beside = _rank(next(iter(question.trial.call(node).args), None)), _rank(read)
        differing = [
            (ours[literal.place], literal.value)
            for literal in literals_of(there)
            if literal.place in ours and _is_asked(literal)
            if for_any_rank(ours[literal.place], here) != for_any_rank(literal, beside)
        ]
        if differing:
            yield node, _that_count(question, node, differing)


def _that_count(question: Question, node: Node, differing: list[tuple[Literal, Any]]) -> list[tuple[Literal, Any]]:
    """Return the arguments that change the result beside the others: a pad by zero is one without a value."""

    def made(but: object = None) -> torch.Tensor | None:
        return question.trial.changed({node: becoming([one for one in differing if one is not but])})

    of_all = made() if len(differing) > 1 else None
    if of_all is None:
        return differing
    return [one for one in differing if (rest := made(one)) is None or not torch.equal(rest, of_all)] or differing


def _in_its_place(question: Question, node: Node) -> Node | None:
    """Return the candidate's op of the same name: the only one, the last of both, or of as many that in its place."""
    there = [theirs for theirs in question.theirs if theirs.target == node.target]
    here = [op for op in question.trial.ops if op.target == node.target]
    if len(there) == len(here):
        return there[here.index(node)]
    is_last = bool(there) and node is question.trial.end and there[-1] is question.theirs[-1]
    return there[-1] if len(there) == 1 or is_last else None


def _rank(value: Any) -> int | None:
    return value.dim() if isinstance(value, torch.Tensor) else None


def as_theirs(question: Question, *, is_turned: bool = False) -> Iterator[Hypothesis]:
    """Yield: one argument has a value that the candidate's own ops have somewhere in their counterpart of the piece.

    Args:
        question: What went wrong.
        is_turned: Whether the candidate's number may be a divisor where the baseline has a factor.
    """
    pool = [value for value in question.their_values if not is_whole(value)]
    numbers = [value for value in question.their_values if isinstance(value, (int, float)) and value]
    pool += [1 / value for value in numbers] if is_turned else []
    for literal in literals(question):
        for value in pool:
            value = fitting(literal, value)
            if value is not None:
                yield with_value(question, literal, value)


def usual(question: Question) -> Iterator[Hypothesis]:
    """Yield: one argument has another value of those that people write, or is left out."""
    for literal in literals(question):
        if not is_whole(literal.value):
            yield from _with_others(question, literal, usual_values(question, literal))


def whole(question: Question) -> Iterator[Hypothesis]:
    """Yield the same for dimensions, indices and sizes: there are many, and some of them fit by chance."""
    pool = [value for value in question.their_values if is_whole(value)]
    for literal in literals(question):
        if is_whole(literal.value):
            theirs = _axes_there(question, literal) if literal.name.startswith("dim") else pool
            fits = (value for one in theirs if (value := fitting(literal, one)) is not None)
            yield from _with_others(question, literal, itertools.chain(fits, usual_values(question, literal)))


def _with_others(question: Question, literal: Literal, values: Iterable[Any]) -> Iterator[Hypothesis]:
    return (with_value(question, literal, value) for value in values if not is_same(value, literal.value))


def _axes_there(question: Question, literal: Literal) -> list[Any]:
    """Return the axes that the candidate's ops of this name have, and those that make what these ops read."""
    near = dict.fromkeys(one for op in question.theirs for one in (op, *op.all_input_nodes))
    alike = (op for op in near if op.target == literal.node.target)
    return [one.value for op in alike for one in literals_of(op) if one.place == literal.place]


def literals(question: Question) -> Iterator[Literal]:
    """Yield the non-tensor arguments of all ops of the piece, last ops first.

    Numbers and flags that the candidate's op has as well are left out. Axes stay: other axes before the op come to the
    same.
    """
    for node in reversed(question.trial.ops):
        there = _in_its_place(question, node)
        theirs = {} if there is None else {literal.place: literal.value for literal in literals_of(there)}
        calculates = traits_of(node).kind in ("factor", "term")
        for literal in literals_of(node):
            is_number = isinstance(literal.value, (float, bool)) or (calculates and isinstance(literal.value, int))
            is_theirs = is_number and is_same(theirs.get(literal.place), literal.value)
            if _is_asked(literal) and not is_theirs:
                # Numbers of an activation have whole ones as defaults, and need not be whole.
                is_real = traits_of(node).kind == "activation" and type(literal.value) is int
                yield dataclasses.replace(literal, value=float(literal.value)) if is_real else literal


def with_value(question: Question, literal: Literal, value: Any) -> Hypothesis:
    """Return the hypothesis that one argument has another value."""
    name, kind = name_of(question, literal), kind_of(question, literal, value)
    is_negated = isinstance(value, float) and isinstance(literal.value, (int, float)) and value == -literal.value
    if kind == "scale" and is_negated and makes_sines(question, literal.node):
        kind = "position"
    edits = {literal.node: becoming([(literal, value)])}
    return Hypothesis(kind, text_of(question, literal, value), edits, name, (literal.value, value))


def _is_asked(literal: Literal) -> bool:
    if literal.name in _OF_SUMS:
        return traits_of(literal.node).kind == "activation"
    return literal.name not in _SKIPPED


def fitting(literal: Literal, value: Any) -> Any:
    """Return a value of the candidate as this argument would have it; None where it is no such value, or the same."""
    own = literal.value
    if isinstance(own, bool) or isinstance(value, bool) or value is None:
        fits = isinstance(own, bool) and isinstance(value, bool)
    elif isinstance(own, float) or (own is None and literal.name == "scale"):
        fits = isinstance(value, (int, float))
        value = float(value) if fits else value
    elif isinstance(own, (list, tuple)):
        fits = isinstance(value, (list, tuple)) and len(value) == len(own)
    else:
        fits = isinstance(own, (int, str)) and isinstance(value, int if isinstance(own, int) else str)
    return value if fits and not is_same(value, own) else None


def usual_values(question: Question, literal: Literal) -> Iterator[Any]:
    """Yield values that people write in place of the one that an argument has."""
    own, name, op = literal.value, literal.name, op_name(literal.node)
    is_calculated = named(op).kind in ("factor", "term") or op == "pow"
    if isinstance(own, bool):
        yield not own
    elif isinstance(own, str):
        yield from _WORDS.get(name, ())
    elif name == "scale" and "attention" in op:
        yield from _scales(question, literal.node)
    elif isinstance(own, float) or (is_calculated and name in ("other", "self")):
        yield from _numbers(question, literal)
    elif isinstance(own, int):
        yield from _integers(question, literal)
    elif isinstance(own, (list, tuple)):
        yield from _lists(question, literal)
    if op == "clamp" and own is not None:
        yield None


def _numbers(question: Question, literal: Literal) -> Iterator[Any]:
    own = literal.value
    if own is None:
        return
    if is_epsilon(question, literal):
        yield from _EPSILONS
        return
    op = op_name(literal.node)
    if named(op).kind == "factor":
        yield 1.0
        if own > 0:
            yield from (own * own, math.sqrt(own), 1 / own if own else 1.0)
        yield from (-own, 2 * own, own / 2)
        yield from _by_one(question, literal)
    elif named(op).kind == "term":
        yield 0
        yield from (own + 1, own - 1, -own, 2 * own, own / 2)
    elif op == "pow" and literal.name == "self":
        yield from BASES
    elif op == "pow":
        yield from (own + 1, own - 1, -own, own / 2, 2 * own)
    else:
        yield from (*_SLOPES, -own, 1.0, 0.0)


def _by_one(question: Question, literal: Literal) -> Iterator[float]:
    """Yield a step between places as it is where one place more, or one less, is counted: 1 / n for 1 / (n - 1)."""
    node = question.in_baseline(literal.node)
    size = getattr(question.trial.values[literal.node], "shape", (0,))[-1:]
    if not size or size[0] < _LEAST_PLACES or not counts_alone(node, question.weights):
        return
    for there in (size[0] - 1, size[0] + 1):
        yield from (literal.value * there / size[0], literal.value * size[0] / there)


def _scales(question: Question, node: Node) -> Iterator[float]:
    query = question.trial.values[node.args[0]]  # type: ignore[index]
    width, heads = query.shape[-1], query.shape[-3] if query.dim() > 2 else 1
    own = next((item.value for item in literals_of(node) if item.name == "scale"), None)
    if own is None:
        own = width**-0.5
    yield from (width**-0.5, 1.0, own * own, math.sqrt(own), 1 / width, math.sqrt(width), 1 / own)
    yield from ((width * heads) ** -0.5, own * 2, own / 2)


def _integers(question: Question, literal: Literal) -> Iterator[int]:
    own, name = literal.value, literal.name
    if name.startswith("dim"):
        first = _first_tensor(question, literal.node)
        rank = first.dim() if first is not None else 0
        yield from (axis for axis in range(rank) if axis != own % rank)
    elif name in ("groups", "num_groups"):
        yield from (n for n in (1, 2, 4, 8, 16, 32, own * 2, own // 2) if n > 0)
    else:
        yield from (0, 1) if name == "correction" else (own - 1, own + 1, own - 2, own + 2)


def _lists(question: Question, literal: Literal) -> Iterator[list[Any]]:
    own = list(literal.value)
    if literal.name == "dims" and sorted(own) == list(range(len(own))) and len(own) <= 5:
        yield from (list(order) for order in itertools.permutations(own))
    elif literal.name.startswith("dim"):
        first = _first_tensor(question, literal.node)
        if first is not None:
            yield from (list(dims) for dims in itertools.combinations(range(first.dim()), len(own)))
    elif literal.name == "pad":
        yield [item for pair in zip(own[1::2], own[::2], strict=False) for item in pair]
    elif literal.name in ("stride", "padding", "dilation", "kernel_size", "output_padding"):
        for step in (-1, 1):
            yield [max(0, item + step) for item in own]
        yield own[::-1]


def _first_tensor(question: Question, node: Node) -> torch.Tensor | None:
    sources = [question.trial.values.get(source) for source in node.all_input_nodes]
    return next((value for value in sources if isinstance(value, torch.Tensor)), None)


def is_whole(value: Any) -> bool:
    """Whether a literal is a whole number, or a list of such: a dimension, an index, a size."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, int) for item in value)
    return isinstance(value, int) and not isinstance(value, bool)


def is_same(a: Any, b: Any) -> bool:
    """Whether two literals are equal, and a flag is no number."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return list(a) == list(b)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)) and not isinstance(a, bool):
        return bool(a == b)
    return bool(type(a) is type(b) and a == b)


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


def _of_angles(factor: float) -> Edit:
    return lambda call: call.target(call.args[0] * factor)


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
        error = (question.actual.double() - value).nan_to_num(0.0, 0.0, 0.0)
        return error if question.valid is None else torch.where(question.valid, error, 0.0)

    number, value = start, question.right
    # A comparison or a choice has no slope.
    if value.shape != question.actual.shape or not value.is_floating_point():
        return None
    for _ in range(_MOST_STEPS):
        step = 1e-4 * abs(number) or 1e-8
        beside = made(number + step)
        if beside is None or beside.shape != value.shape:
            return None
        slope = ((beside - value) / step).nan_to_num(0.0, 0.0, 0.0)
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
