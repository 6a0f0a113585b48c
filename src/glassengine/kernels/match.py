"""`glass.matches` and `glass.assert_matches`: a function, or what it made, beside its reference, without tolerances."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from glassengine.errors import UsageError
from glassengine.kernels.arrays import as_tensors
from glassengine.kernels.leaves import RIGHT, figures, passes
from glassengine.kernels.prepared import Prepared, same, settled
from glassengine.kernels.trace import tensors_of
from glassengine.kernels.words import explained
from glassengine.numerics.judgement import Judgement
from glassengine.numerics.ops import ACCUMULATIONS, Accumulation
from glassengine.results import worst
from glassengine.results.base import VERDICTS
from glassengine.results.kernels import KernelMistake, Match, TensorMatch

_CHEAP, _MOST_CHEAP = 2.0, 6.0
_MOST_WRONG_PARTS = 2
"""Parts that are judged with all noise once they are wrong: more do not change the verdict."""


def assert_matches(
    actual: Any,
    reference: Callable[..., Any],
    inputs: Any = (),
    *,
    accumulation: str | None = None,
    check_dtype: bool = True,
    seed: int = 0,
) -> Match:
    """Raise an AssertionError unless rounding explains how `actual` differs from `reference(*inputs)`.

    The arguments are those of `matches`.

    Returns:
        The figures.

    Raises:
        AssertionError: A difference is not rounding. It has the element, both values, which elements, and the kind.
        UsageError: The reference cannot be judged by.
    """
    found = matches(actual, reference, inputs, accumulation=accumulation, check_dtype=check_dtype, seed=seed)
    if not found.ok:
        raise AssertionError(explained(found))
    return found


def matches(
    actual: Any,
    reference: Callable[..., Any],
    inputs: Any = (),
    *,
    accumulation: str | None = None,
    check_dtype: bool = True,
    seed: int = 0,
) -> Match:
    """Judge `actual` beside `reference(*inputs)`: rounding, or a mistake. There is no tolerance.

    The reference runs in float64, in its own dtype, and with legal rounding after each of its operations.

    Args:
        actual: The function under test, which is called on copies of the inputs, or what it made: a tensor, an array
            or a tree of them.
        reference: A function or module in PyTorch, as plain as possible.
        inputs: A tensor, the arguments as a sequence, or keyword arguments as a mapping.
        accumulation: How products may be summed: "float32", "tf32", "bfloat16", "float16". By default as torch's
            settings have it for the reference.
        check_dtype: Whether a result of another dtype than the reference's is wrong.
        seed: Of the noise.

    Raises:
        UsageError: The reference can neither be traced nor run in float64, or draws random numbers.
    """
    call, args = called(reference, inputs)
    prepared = Prepared(call, as_tensors(args), how(accumulation), seed)
    return judged(actual, inputs, prepared, accumulation=accumulation or "", check_dtype=check_dtype)


def judged(actual: Any, inputs: Any, prepared: Prepared, *, accumulation: str, check_dtype: bool = True) -> Match:
    """Judge a candidate beside a reference that is prepared on the same inputs."""
    from glassengine.kernels.mistakes import mistakes_of

    written: list[Tensor | None] = []
    candidate = actual
    is_function = callable(actual) and not isinstance(actual, Tensor)
    if is_function:
        call, args = called(actual, inputs)
        own = prepared.copies(args)
        with torch.no_grad():
            candidate = call(*own)
        written = list(tensors_of(as_tensors(own)))
    candidate = _in_order(as_tensors(candidate), prepared.result)
    found, notes = _compared(candidate, written, prepared, check_dtype)
    if not found and all(leaf is None for leaf in pytree.tree_leaves(prepared.result)):
        raise UsageError("the reference gives nothing to compare", got="no result, and no input that it writes to")
    verdict = worst(one.verdict for one in found)
    ok = all(map(passes, found))
    trace = prepared.trace
    mistakes: tuple[KernelMistake, ...] = ()
    if not ok:
        given = called(actual, inputs)[0] if is_function else None
        mistakes = mistakes_of(found, prepared, candidate, given)
    return Match(
        ok=ok,
        verdict=verdict,
        tensors=tuple(found),
        mistakes=mistakes,
        num_ops=len(trace.steps),
        not_traced=trace.why_not,
        accumulation=accumulation or _declared(),
        notes=tuple(notes),
    )


def _compared(
    candidate: Any, written: list[Tensor | None], prepared: Prepared, check_dtype: bool
) -> tuple[list[TensorMatch], list[str]]:
    pairs, found = _paired(candidate, prepared)
    notes = []
    for path, which, tensor in pairs:
        native = prepared.native[which]
        if tensor.dtype is not native.dtype:
            text = f"{tensor.dtype} in place of {native.dtype}".replace("torch.", "")
            notes.append(f"{path or 'the result'} is {text}")
            if check_dtype:
                found.append(_refused(path, native, tensor, f"dtype: {text}"))
                continue
        found.append(_judged_tensor(path, which, settled(tensor), prepared))
    before = tensors_of(prepared.inputs)
    for i, (after, writes) in enumerate(zip(written, prepared.writes, strict=False)):
        if after is None:
            continue
        path, which = f"inputs[{i}] after the call", prepared.num_results + i
        if writes:
            found.append(_judged_tensor(path, which, settled(after), prepared))
        elif not same(after, before[i]):
            found.append(_refused(path, before[i], after, "the reference does not write to it"))
    return found, notes


def _in_order(candidate: Any, result: Any) -> Any:
    """Return what a candidate made as the reference has it, where both give the same names; else as it is."""
    ours, spec = pytree.tree_flatten_with_path(result)
    theirs = {pytree.keystr(path): value for path, value in pytree.tree_flatten_with_path(candidate)[0]}
    names = [pytree.keystr(path) for path, _ in ours]
    return pytree.tree_unflatten([theirs[name] for name in names], spec) if theirs.keys() == set(names) else candidate


def _names(tree: Any) -> set[str]:
    """Return the names that a tree gives to its values; none for places of a list."""
    paths = [path for path, value in pytree.tree_flatten_with_path(tree)[0] if value is not None]
    return {pytree.keystr(path) for path in paths if any(isinstance(key, pytree.MappingKey) for key in path)}


def _paired(candidate: Any, prepared: Prepared) -> tuple[list[tuple[str, int, Tensor]], list[TensorMatch]]:
    """Return (path, number, tensor) of the tensors of a candidate, and what does not fit the reference."""
    trees = [pytree.tree_flatten_with_path(tree)[0] for tree in (candidate, prepared.result)]
    theirs, ours = ([(pytree.keystr(k), v) for k, v in side if v is not None] for side in trees)
    named = [_names(tree) for tree in (candidate, prepared.result)]
    if all(named) and named[0] != named[1]:
        reason = f"results named {', '.join(sorted(named[0]))}, expected {', '.join(sorted(named[1]))}"
        return [], [_refused("", torch.empty(0), torch.empty(0), reason)]
    if len(theirs) != len(ours):
        nothing = torch.empty(0)
        reason = f"{len(theirs)} results, expected {len(ours)}"
        return [], [_refused("", nothing, nothing, reason)]
    pairs: list[tuple[str, int, Tensor]] = []
    found: list[TensorMatch] = []
    which = 0
    for (_, value), (path, native) in zip(theirs, ours, strict=True):
        if not isinstance(native, Tensor):
            if isinstance(value, Tensor) or value != native:
                found.append(_refused(path, torch.empty(0), torch.empty(0), f"{value!r}, expected {native!r}"))
            continue
        if isinstance(value, Tensor):
            pairs.append((path, which, value))
        else:
            found.append(_refused(path, native, torch.empty(0), f"{type(value).__name__}, expected a tensor"))
        which += 1
    return pairs, found


def _refused(path: str, native: Tensor, tensor: Tensor, reason: str) -> TensorMatch:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorMatch(path, tuple(native.shape), dtype, "wrong", None, None, reason)


def _judged_tensor(path: str, which: int, tensor: Tensor, prepared: Prepared) -> TensorMatch:
    if tensor.shape != prepared.native[which].shape:
        shapes = f"shape {list(tensor.shape)}, expected {list(prepared.native[which].shape)}"
        return _refused(path, prepared.native[which], tensor, shapes)
    worst_one: TensorMatch | None = None
    num_wrong = num_beyond = 0
    cheap = _CHEAP
    for part, start in prepared.parts():
        if prepared.rows is not None and prepared.depends_on_rows(part):
            prepared.rows = None
            return _judged_tensor(path, which, tensor, prepared)
        expectation, own = part.expectation(which), prepared.of(tensor, start)
        expectation.cheap = cheap
        found: Judgement = expectation.judge(own)
        if expectation.only is None and found.verdict in RIGHT and _CHEAP < expectation.quick_ratio < _MOST_CHEAP:
            # What noise runs have found right in one part needs none in the next.
            cheap = max(cheap, 1.2 * expectation.quick_ratio)
        one = _placed(figures(path, expectation, own, found), prepared, start)
        num_beyond += one.num_beyond
        if worst_one is None or _rank(one) > _rank(worst_one):
            worst_one = one
        num_wrong += not passes(one)
        if num_wrong >= _MOST_WRONG_PARTS:
            break
    assert worst_one is not None
    return dataclasses.replace(worst_one, num_beyond=num_beyond, shape=tuple(tensor.shape))


def _placed(one: TensorMatch, prepared: Prepared, start: int) -> TensorMatch:
    """Return the figures of a part with places in the whole tensor."""
    if prepared.rows is None or one.index is None or one.where is None:
        return one
    axis = prepared.rows.axis
    names = "row" if not axis and len(one.shape) == 2 else f"axis {axis}"
    where = f"{one.where}, counted from {start}" if names in one.where else one.where
    if one.where == "all elements":
        where = f"all elements of {names}s {start} to {start + prepared.rows.step - 1}"
    return dataclasses.replace(one, index=tuple(i + start * (k == axis) for k, i in enumerate(one.index)), where=where)


def _rank(one: TensorMatch) -> tuple[int, float]:
    return VERDICTS.index(one.verdict), one.noise_ratio or 0.0


def called(function: Callable[..., Any], inputs: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function of places, and the arguments for it, of inputs in any form."""
    if not callable(function):
        raise UsageError("not a function", got=type(function).__name__, hint="matches(actual, reference, inputs)")
    if isinstance(inputs, Mapping):
        names = list(inputs)
        return lambda *args: function(**dict(zip(names, args, strict=True))), list(inputs.values())
    if isinstance(inputs, (list, tuple)):
        return lambda *args: function(*args), list(inputs)
    return lambda *args: function(*args), [inputs]


def how(accumulation: str | None) -> Accumulation:
    """Return how products may be summed."""
    name = accumulation or _declared()
    if name not in ACCUMULATIONS:
        raise UsageError(f"unknown accumulation {name!r}", expected=list(ACCUMULATIONS))
    return ACCUMULATIONS[name]


def _declared() -> str:
    """Return how torch sums products of float32 by its settings."""
    return {"highest": "float32", "high": "tf32", "medium": "bfloat16"}[torch.get_float32_matmul_precision()]
