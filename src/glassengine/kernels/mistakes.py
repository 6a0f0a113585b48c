"""Names the kind of mistake: by what the values show, by calls with other inputs, and by mistakes that are tried."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glassengine.kernels.edits import Mistake, mistakes_in, numbers_in, with_number
from glassengine.kernels.leaves import beyond_rounding, described, passes
from glassengine.kernels.prepared import KernelPart, Prepared, as_tensors, same, settled
from glassengine.kernels.trace import copied, tensors_of
from glassengine.kernels.written_out import WrittenOut
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.kinds import parts
from glassengine.numerics.orders import called, order_between
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of
from glassengine.results.kernels import KernelMistake, MistakeKind, TensorMatch

Call = Callable[..., Any]

_SECONDS = 5.0
_MOST = 1 << 20
"""Elements beyond which no mistakes are tried."""
_PROVEN = 8.0
"""Error with the mistake, over that of the reference in its own dtype, up to which it explains all."""
_LIKELY = 0.2
_STEPS, _NEAR = 8, 1.001
_NOISE = 0.03
"""Error relative to the values, up to which it may be one of rounding in half precision."""
"""Share of the error that a mistake may leave to be named as a guess."""
_SUMMED = (Rounding.SUMS, Rounding.COMPOSITE, Rounding.ATTENTION)
_CONSTANTS = {
    "log2(e)": math.log2(math.e), "ln 2": math.log(2), "1/2": 0.5, "2": 2.0, "-1": -1.0, "sqrt(2)": math.sqrt(2),
    "1 / sqrt(2)": math.sqrt(0.5), "1/4": 0.25, "4": 4.0, "1/3": 1 / 3, "3": 3.0, "1/8": 0.125, "8": 8.0, "pi": math.pi
}  # fmt: skip

_SAME, _OTHER = 0.98, 0.2
"""Shares of elements: that are a truncated result, and fewer that are the nearest one."""

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp, "log": torch.log, "the square": torch.square, "the root": torch.sqrt,
    "the absolute value": torch.abs, "the inverse": torch.reciprocal
}  # fmt: skip


def mistakes_of(
    found: Sequence[TensorMatch], prepared: Prepared, candidate: Any, call: Call | None
) -> tuple[KernelMistake, ...]:
    """Return the kinds of mistakes that make what a candidate made, the likeliest first; `call` calls it again."""
    wrong = [one for one in found if not passes(one)]
    told = [one for one in wrong if one.index is None and one.reason]
    if told:
        return tuple(_refused(one) for one in told)
    results = [one for one in found if not one.path.startswith("inputs[")]
    which = next((i for i, one in enumerate(results) if not passes(one)), None)
    tensors = tensors_of(candidate)
    if which is None or which >= len(tensors):
        return (KernelMistake("inputs written", f"{wrong[0].path} is not what the reference makes of it"),)
    value = settled(tensors[which])
    part, start = prepared.worst(value, which)
    case = _Case(part, which, prepared.of(value, start))
    guesses = [*_of_values(case), *(_of_calls(call, prepared, tensors) if call is not None else ())]
    if any(guess.proven for guess in guesses):
        return _ordered(guesses)
    if part.trace.module is not None and value.numel() <= _MOST:
        guesses += _tried(case)
    if not any(guess.proven for guess in guesses):
        guesses += _by_region(case)
        guesses += _by_size(case)
    return _ordered(guesses)[:3] or (KernelMistake("other", "no known kind of mistake"),)


def _ordered(guesses: Sequence[KernelMistake]) -> tuple[KernelMistake, ...]:
    def rank(one: KernelMistake) -> tuple[bool, float]:
        return not one.proven, 0.0 if one.unexplained is None else one.unexplained

    return tuple(sorted(dict.fromkeys(guesses), key=rank))


def _refused(one: TensorMatch) -> KernelMistake:
    if one.path.startswith("inputs["):
        return KernelMistake("inputs written", f"it writes to {one.path.partition(' ')[0]}", proven=True)
    return KernelMistake("shape or dtype", f"{one.path or 'the result'}: {one.reason}", proven=True)


@dataclass
class _Case:
    """One wrong tensor, with the rows that are looked at."""

    part: KernelPart
    which: int
    candidate: Tensor

    def __post_init__(self) -> None:
        self.exact = self.part.exact[self.which]
        self.expectation = self.part.expectation(self.which)
        self.is_float = self.exact.is_floating_point() and self.candidate.is_floating_point()
        self.value, self.wide = (
            parts(t).double() if t.is_complex() else t.double() for t in (self.candidate, self.exact)
        )
        self.error = _rms(self.value - self.wide)
        dtype = self.candidate.dtype if self.candidate.is_floating_point() else torch.float32
        native = _rms(self.part.native[self.which].double() - self.wide) if self.is_float else 0.0
        self.u = unit_roundoff(dtype)
        self.floor = max(native, self.u / 2 * _rms(self.wide))

    def unexplained(self, other: Tensor) -> float:
        """Return the share of the error that is left beside other values."""
        if other.shape != self.value.shape:
            return math.inf
        other = other.double()
        if not bool((other.isfinite() == self.value.isfinite()).all()):
            return math.inf
        left = _rms(self.value - other)
        return left / self.error if self.error else math.inf

    def explains(self, other: Tensor) -> bool:
        """Whether other values are those of the candidate up to rounding."""
        size = _rms(self.wide) or 1.0
        floor = self.floor * max(1.0, _rms(other.double()) / size)
        left = self.unexplained(other)
        return left * self.error <= _PROVEN * floor and left < _LIKELY


def _rms(t: Tensor) -> float:
    t = t.nan_to_num(0.0, 0.0, 0.0)
    return float(t.square().mean().sqrt()) if t.numel() else 0.0


def _of_values(case: _Case) -> Iterator[KernelMistake]:
    value, exact = case.value, case.wide
    odd = exact.isfinite() & ~value.isfinite()
    if bool(odd.any()):
        uses = {str(n.target).split(".")[1] for n in case.part.trace.steps if "." in str(n.target)}
        exps = {"exp", "softmax", "log_softmax", "logsumexp", "cross_entropy_loss", "scaled_dot_product_attention"}
        why = ": the maximum is not subtracted before exp" if uses & exps else ""
        if not bool(exact[odd].any()):
            why = " and 0: what is masked as a whole is no case of its own"
        kinds = "NaN" if bool(value.isnan().any()) else "infinite"
        yield KernelMistake("overflow", f"{kinds} where the reference is finite{why}")
        return
    if bool((exact.isnan() & value.isfinite()).any()):
        yield KernelMistake("other", "a number where the reference gives NaN: it swallows NaN", True, 0.0)
        return
    for kind, text in _plain(case):
        yield KernelMistake(kind, text, True, 0.0)
        return
    for kind, text, other in _transformed(case):
        if case.explains(other) or (not case.is_float and torch.equal(other, value)):
            yield KernelMistake(kind, text, True, case.unexplained(other))


def _plain(case: _Case) -> Iterator[tuple[MistakeKind, str]]:
    """Yield what the values alone say."""
    value, exact = case.value, case.wide
    if not case.is_float:
        shift = (value - exact).flatten()
        if bool((shift == shift[0]).all()):
            yield "bias missing", f"{float(shift[0]):g} is added to each element"
        return
    if bool((value == value.flatten()[0]).all()) and (not bool((exact == exact.flatten()[0]).all()) or not value.any()):
        yield "constant", f"every element is {float(value.flatten()[0]):g}"
    for i, given in enumerate(tensors_of(case.part.inputs)):
        if given.shape == value.shape and bool((given.cpu().double() == value).all()):
            yield "input returned", f"it returns argument {i}"
    if case.candidate.element_size() == 2:
        nearest = exact.to(case.candidate.dtype)
        below = (nearest.view(torch.int16) - 1).view(nearest.dtype)
        chopped = torch.where(nearest.abs() > exact.abs(), below, nearest)
        cut, near = (float((case.candidate == one).double().mean()) for one in (chopped, nearest))
        if cut > _SAME > near + _OTHER:
            yield "precision", "results are truncated, not rounded to the nearest"
    beyond, _ = beyond_rounding(case.expectation, case.candidate)
    outside = value[beyond]
    where = described(beyond) if 0 < len(outside) < value.numel() and bool(value.isfinite().all()) else ""
    is_end = where.startswith(("the last", "the first")) or (where and not outside.any())
    if is_end and bool((outside == outside[0]).all()):
        yield "tail", f"{where} hold {float(outside[0]):g}: they are not written"


def _transformed(case: _Case) -> Iterator[tuple[MistakeKind, str, Tensor]]:
    """Yield what else may have become of the whole result."""
    value, exact = case.value, case.wide
    power = float((exact * exact).sum())
    if 0 < power < math.inf and bool(value.isfinite().all()) and case.is_float:
        factor = float((value * exact).sum()) / power
        known = next((n for n, c in _CONSTANTS.items() if math.isclose(factor, c, rel_tol=1e-5)), "")
        is_known = bool(known) or math.isclose(factor, round(factor), rel_tol=1e-5)
        if value.numel() > 1 or is_known:  # any single number is a multiple of another
            text = f"multiplied by {factor:.6g}" + (f" = {known}" if known and known != f"{factor:g}" else "")
            yield "scale", text, exact * factor
    if value.numel() > 1 and case.is_float:
        by = float((value - exact).mean())
        yield "bias missing", f"{by:.6g} is added to each element", exact + by
    if exact.dim() > 1 and exact.shape[-1] == exact.shape[-2]:
        yield "permuted", "the result is transposed", exact.mT
    for axis in range(exact.dim()):
        order = order_between(exact, value, axis, 1e-3)
        if order is not None and len(order) == exact.shape[axis]:
            kind, text = called(order)
            word: MistakeKind = "position" if kind == "position" else "permuted"
            yield word, f"the result is {text} along axis {axis}", exact.index_select(axis, order)
        inside = slice(1, exact.shape[axis] - 1)
        for by_one in (1, -1) if exact.shape[axis] > 4 else ():
            rolled, own = (t.movedim(axis, 0) for t in (exact.roll(by_one, axis), value))
            if torch.equal(rolled[inside], own[inside]):
                yield "position", f"the result is moved by {by_one} along axis {axis}", value
    for name, function in _FUNCTIONS.items() if case.is_float else ():
        yield "operation replaced", f"the result is {name} of what it should be", function(exact)


def _of_calls(call: Call, prepared: Prepared, first: list[Tensor]) -> Iterator[KernelMistake]:
    """Call the candidate again, on the same inputs and with one argument changed."""
    inputs = prepared.inputs
    try:
        again = tensors_of(as_tensors(call(*copied(inputs))))
        if any(not same(a, b) for a, b in zip(first, again, strict=True)):
            yield KernelMistake("stale or unstable", "the second call on the same inputs gives another result", True)
            return
        ignored, is_finite = [], all(bool(t.isfinite().all()) for t in first)
        places = [i for i, t in enumerate(inputs) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
        for i in places:
            other = copied(inputs)
            other[i] = other[i] * -0.5 + 0.75
            changed = tensors_of(as_tensors(call(*other)))
            with torch.no_grad():
                reference = tensors_of(prepared.reference(*copied(other)))
            is_used = any(not same(a, b) for a, b in zip(reference, prepared.native, strict=False))
            if is_used and is_finite and all(same(a, b) for a, b in zip(changed, first, strict=True)):
                ignored.append(i)
    except Exception:
        return
    if ignored and len(ignored) == len(places):
        yield KernelMistake("stale or unstable", "it gives the same result on other inputs", True)
    for i in ignored if len(ignored) < len(places) else ():
        yield KernelMistake("argument ignored", f"argument {i} is ignored", True)


def _tried(case: _Case) -> list[KernelMistake]:
    """Make each mistake in the reference, and compare with what the candidate made."""
    try:
        written = WrittenOut(case.part.trace, case.part.inputs)
    except Exception:
        return []  # a graph that cannot be written out has no mistakes to try
    if case.which >= len(written.results) or written.results[case.which].shape != case.exact.shape:
        return []
    found: list[tuple[float, Mistake]] = []
    end = time.monotonic() + _SECONDS
    for mistake in mistakes_in(written):
        if time.monotonic() > end:
            break
        try:
            other = written.run(mistake.changes, mistake.inputs)[case.which]
            left = case.unexplained(other)
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        if not left < 1 and not (not case.is_float and torch.equal(other.to(case.candidate.dtype), case.candidate)):
            continue
        if case.explains(other) or (not case.is_float and left == 0):
            found.append((left / 1e3 + 1e-4 * mistake.weight, mistake))
            if len(found) >= 8:
                break
        elif left < (0.6 if mistake.kind == "precision" else _LIKELY):
            found.append((left + 0.01 * mistake.weight + 0.01, mistake))
    if case.is_float and not any(share < 0.01 for share, _ in found):
        found += _fitted(case, written)
    found.sort(key=lambda pair: pair[0])
    return [KernelMistake(m.kind, m.text, share < 0.01, min(1.0, share)) for share, m in found[:3]]


def _fitted(case: _Case, written: WrittenOut) -> Iterator[tuple[float, Mistake]]:
    """Fit each number of the reference to what the candidate made, by the method of Gauss and Newton."""
    for node, place, given in numbers_in(written):
        number = given
        try:
            for _ in range(_STEPS):
                at, near = (
                    written.run(with_number(node, place, x).changes)[case.which] for x in (number, number * _NEAR)
                )
                slope = (near - at) / (number * (_NEAR - 1))
                power = float((slope * slope).sum())
                number += float(((case.value - at) * slope).sum()) / power if power else 0.0
            mistake = with_number(node, place, number)
            other = written.run(mistake.changes)[case.which]
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        if math.isfinite(number) and case.explains(other):
            yield case.unexplained(other) / 1e3, mistake


def _by_region(case: _Case) -> Iterator[KernelMistake]:
    """Of elements at an end that are wrong while all others are right."""
    beyond, _ = beyond_rounding(case.expectation, case.candidate)
    share = float(beyond.double().mean())
    for axis in range(beyond.dim()):
        others = [i for i in range(beyond.dim()) if i != axis]
        hit = (beyond.any(others) if others else beyond).nonzero().flatten()
        size = beyond.shape[axis]
        if 0 < len(hit) <= size / 2 and len(hit) == size - int(hit[0]) and share > 0.5 * len(hit) / size:
            yield KernelMistake("tail", f"only {described(beyond)} are wrong", unexplained=0.3)
            return


def _by_size(case: _Case) -> Iterator[KernelMistake]:
    """Of an error that is as large as rounding to a coarser dtype."""
    if not case.is_float or not case.error:
        return
    relative = case.error / (_rms(case.wide) or 1.0)
    sums = any(traits_of(n).multiplies or traits_of(n).rounding in _SUMMED for n in case.part.trace.steps)
    own = str(case.candidate.dtype).removeprefix("torch.")
    coarser = {"float16": 2.0**-11, "bfloat16": 2.0**-8} if case.u < 2.0**-20 else {own: case.u}
    for name, u in coarser.items():
        if sums and 2 * u < relative < min(64 * u, _NOISE):
            yield KernelMistake("accumulation", f"the error is as large as that of sums in {name}", unexplained=0.5)
        if u / 64 < relative < 4 * u:
            yield KernelMistake("precision", f"the error is as large as that of {name}", unexplained=0.5)
    size = float(case.wide.abs().nan_to_num(0.0, 0.0, 0.0).amax())
    if case.u < 2.0**-20 and float((case.value - case.wide).abs().amax()) < _PROVEN * case.u * size:
        text = "small results lose digits: the error is one of rounding beside the largest result"
        yield KernelMistake("precision", text, unexplained=0.55)
    if case.u > 2.0**-20 and sums:
        yield KernelMistake("accumulation", f"the error is as large as that of sums in {own}", unexplained=0.4)
