"""`glass.matches`, `glass.assert_matches` and what `glass.testing` asserts beside: results, gradients, samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from glassengine.errors import UsageError
from glassengine.kernels.leaves import RIGHT, figures, passes
from glassengine.kernels.prepared import Prepared, as_tensors, same, settled
from glassengine.kernels.trace import copied, tensors_of
from glassengine.numerics.float64 import ACCUMULATIONS, Accumulation
from glassengine.numerics.judgement import Judgement
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


def explained(match: Match) -> str:
    """Return the message: element, values, which elements, kind of mistake."""
    if match.ok:
        return f"{match.verdict}: rounding explains every difference"
    lines = [f"{match.verdict}: rounding does not explain the difference"]
    for one in match.tensors:
        if not passes(one):
            lines += _of_tensor(one)
    # What has another shape or dtype has its own line.
    for number, mistake in enumerate([one for one in match.mistakes if one.kind != "shape or dtype"][:3]):
        is_made = mistake.proven and mistake.unexplained is not None
        how = " (proven: the reference with this mistake gives the same)" if is_made else ""
        lines.append(f"  {'looks like' if not number else 'or        '}  {mistake.text}{how}")
    if match.not_traced:
        lines.append(f"  note        the reference could not be traced ({match.not_traced}): its floor is coarser")
    lines += [f"  note        {note}" for note in match.notes]
    return "\n".join(lines)


def _of_tensor(one: TensorMatch) -> list[str]:
    name = one.path or "result"
    shape = f"{one.dtype}{list(one.shape)}" if one.dtype else "", one.reason or ""
    lines = [f"  {name}: {', '.join(filter(None, shape))}"]
    if one.index is not None:
        ulp = "" if one.ulp is None else f", {one.ulp:.3g} ulp apart"
        lines.append(f"  element     {list(one.index)}: {one.actual:.9g}, expected {one.expected:.9g}{ulp}")
    if one.where:
        lines.append(f"  where       {one.where} ({one.num_beyond} beyond rounding)")
    if one.noise_ratio is not None:
        bound = "" if one.bound_ratio is None else f", {one.bound_ratio:.3g} times the bound"
        lines.append(f"  error       {one.noise_ratio:.3g} times rounding{bound}")
    return lines


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
    prepared = Prepared(call, as_tensors(args), accumulation_of(accumulation), seed)
    return judged(actual, inputs, prepared, accumulation or "", check_dtype)


def judged(actual: Any, inputs: Any, prepared: Prepared, accumulation: str = "", check_dtype: bool = True) -> Match:
    """Judge a candidate beside a reference that is prepared on the same inputs."""
    from glassengine.kernels.mistakes import mistakes_of

    written: list[Tensor] = []
    candidate = actual
    is_function = callable(actual) and not isinstance(actual, Tensor)
    if is_function:
        call, args = called(actual, inputs)
        own = prepared.copies(args)
        with torch.no_grad():
            candidate = call(*own)
        written = tensors_of(as_tensors(own))
    pairs, found = _paired(as_tensors(candidate), prepared)
    notes: list[str] = []
    for path, which, tensor in pairs:
        native = prepared.native[which]
        if tensor.dtype is not native.dtype:
            text = f"{tensor.dtype} in place of {native.dtype}".replace("torch.", "")
            notes.append(f"{path or 'the result'} is {text}")
            if check_dtype:
                found.append(_refused(path, f"dtype: {text}", native, tensor))
                continue
        found.append(_judged_tensor(path, which, settled(tensor), prepared))
    for i, (before, after, writes) in enumerate(
        zip(tensors_of(prepared.inputs), written, prepared.writes, strict=False)
    ):
        path = f"inputs[{i}] after the call"
        if writes:
            found.append(_judged_tensor(path, prepared.num_results + i, settled(after), prepared))
        elif not same(after, before):
            found.append(_refused(path, "the reference does not write to it", before, after))
    if not found and all(leaf is None for leaf in pytree.tree_leaves(prepared.result)):
        raise UsageError("the reference gives nothing to compare", got="no result, and no input that it writes to")
    verdict = worst(one.verdict for one in found)
    ok = all(map(passes, found))
    mistakes: tuple[KernelMistake, ...] = ()
    if not ok:
        given = called(actual, inputs)[0] if is_function else None
        mistakes = mistakes_of(found, prepared, [tensor for _, _, tensor in pairs], given)
    steps, why_not = len(prepared.trace.steps), prepared.trace.why_not
    return Match(ok, verdict, tuple(found), mistakes, steps, why_not, accumulation or _declared(), tuple(notes))


def _leaves(tree: Any) -> tuple[dict[str, Any], set[str]]:
    """Return what is not None in a tree by its place, and the places with names."""
    pairs = [(path, value) for path, value in pytree.tree_flatten_with_path(tree)[0] if value is not None]
    named = {pytree.keystr(path) for path, _ in pairs if any(isinstance(key, pytree.MappingKey) for key in path)}
    return {pytree.keystr(path): value for path, value in pairs}, named


def _paired(candidate: Any, prepared: Prepared) -> tuple[list[tuple[str, int, Tensor]], list[TensorMatch]]:
    """Return (path, number, tensor) of the tensors of a candidate, and what does not fit the reference."""
    (theirs, their_names), (ours, names) = _leaves(candidate), _leaves(prepared.result)
    if their_names and names and their_names != names:
        return [], [
            _refused("", f"results named {', '.join(sorted(their_names))}, expected {', '.join(sorted(names))}")
        ]
    if len(theirs) != len(ours):
        return [], [_refused("", f"{len(theirs)} results, expected {len(ours)}")]
    pairs: list[tuple[str, int, Tensor]] = []
    found: list[TensorMatch] = []
    which = 0
    in_order = [theirs[path] for path in ours] if theirs.keys() == ours.keys() else theirs.values()
    for value, (path, native) in zip(in_order, ours.items(), strict=True):
        if not isinstance(native, Tensor):
            if isinstance(value, Tensor) or value != native:
                found.append(_refused(path, f"{value!r}, expected {native!r}"))
            continue
        if isinstance(value, Tensor):
            pairs.append((path, which, value))
        else:
            found.append(_refused(path, f"{type(value).__name__}, expected a tensor", native))
        which += 1
    return pairs, found


def _refused(path: str, reason: str, native: Tensor | None = None, tensor: Tensor | None = None) -> TensorMatch:
    shape = () if native is None else tuple(native.shape)
    dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
    return TensorMatch(path, shape, dtype, "wrong", None, None, reason)


def _judged_tensor(path: str, which: int, tensor: Tensor, prepared: Prepared) -> TensorMatch:
    if tensor.shape != prepared.native[which].shape:
        shapes = f"shape {list(tensor.shape)}, expected {list(prepared.native[which].shape)}"
        return _refused(path, shapes, prepared.native[which], tensor)
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


def accumulation_of(accumulation: str | None) -> Accumulation:
    """Return how products may be summed."""
    name = accumulation or _declared()
    if name not in ACCUMULATIONS:
        raise UsageError(f"unknown accumulation {name!r}", expected=list(ACCUMULATIONS))
    return ACCUMULATIONS[name]


def _declared() -> str:
    """Return how torch sums products of float32 by its settings."""
    return {"highest": "float32", "high": "tf32", "medium": "bfloat16"}[torch.get_float32_matmul_precision()]


Function = Callable[..., Any]


def assert_gradients_match(
    candidate: Function,
    reference: Function,
    inputs: Any,
    *,
    gradients: Sequence[Tensor] | None = None,
    double: bool = False,
    accumulation: str | None = None,
    seed: int = 0,
) -> Match:
    """Raise an AssertionError unless rounding explains how the gradients of two functions differ.

    Both are given the same gradients of their results. Those of the reference come from autograd in float64, over a
    floor of noise runs of the same backward pass. There is no step and no tolerance as for `torch.autograd.gradcheck`.

    Args:
        candidate: The function under test; what it computes forwards is not judged here.
        reference: A function in PyTorch that autograd differentiates.
        inputs: As in `matches`. Floating tensors get gradients, unless some of them require them: then these alone.
        gradients: Of the floating results; normal numbers by default.
        double: Whether gradients of the gradients are judged as well.
        accumulation: As in `matches`.
        seed: Of the gradients and the noise.

    Returns:
        The figures, one tensor for each gradient.

    Raises:
        AssertionError: A difference is not rounding.
        UsageError: The reference has no gradients.
    """
    ours, args = called(reference, inputs)
    theirs, _ = called(candidate, inputs)
    args = as_tensors(args)
    leaves, spec = pytree.tree_flatten(args)
    floats = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    asked = [i for i in floats if leaves[i].requires_grad] or floats
    with torch.no_grad():
        results = [t for t in tensors_of(ours(*copied(args))) if t.is_floating_point()]
    if not results or not asked:
        raise UsageError("there are no gradients", got="no floating result" if asked else "no floating input")
    generator = torch.Generator().manual_seed(seed)
    given = list(gradients or [torch.randn(t.shape, generator=generator).to(t) for t in results])

    def backward(function: Function) -> Function:
        def first(*values: Any) -> list[Tensor]:
            return _gradients(function, values[: len(leaves)], spec, asked, values[len(leaves) :], create=double)

        if not double:
            return first

        def second(*values: Any) -> list[Tensor]:
            with torch.enable_grad():
                own = [v.detach().requires_grad_(v.is_floating_point()) if isinstance(v, Tensor) else v for v in values]
                found = first(*own)
                wanted = [own[i] for i in [*asked, *range(len(leaves), len(own))]]
                total = sum((g.sum() for g in found if g.requires_grad), torch.zeros(()))
                if not total.requires_grad:
                    return [torch.zeros_like(w) for w in wanted]
                return list(torch.autograd.grad(total, wanted, materialize_grads=True))

        return second

    plain = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    everything = [*plain, *given]
    prepared = Prepared(backward(ours), everything, accumulation_of(accumulation), seed, True)
    found = judged(backward(theirs), everything, prepared, accumulation or "")
    if not found.ok:
        raise AssertionError(explained(found))
    return found


def _gradients(
    function: Function, leaves: Sequence[Any], spec: Any, asked: Sequence[int], given: Sequence[Tensor], create: bool
) -> list[Tensor]:
    with torch.enable_grad():
        own = list(leaves)
        for i in asked:
            own[i] = own[i] if create else own[i].detach().requires_grad_()
        found = tensors_of(function(*pytree.tree_unflatten(own, spec)))
        pairs = list(zip((t for t in found if t.is_floating_point()), given, strict=True))
        pairs = [(t, g) for t, g in pairs if t.requires_grad]
        wanted = [own[i] for i in asked]
        if not pairs:
            return [torch.zeros_like(w) for w in wanted]
        results, cotangents = zip(*pairs, strict=True)
        made = torch.autograd.grad(results, wanted, cotangents, create_graph=create, materialize_grads=True)
        return list(made)


_LEAST = 5.0
"""Draws that a value should have to be counted by itself; rarer ones are counted together."""
_CHANCE = 1e-6
"""Of a right sampler to be refused."""


def assert_samples_match(samples: Tensor, probabilities: Tensor) -> float:
    """Raise an AssertionError unless samples may be drawn from a distribution, by the chi-square test.

    Args:
        samples: Integers, of any shape: independent draws.
        probabilities: [values], need not add to 1; 0 for what must never be drawn.

    Returns:
        The chance of a right sampler to be as far off.

    Raises:
        AssertionError: A value was drawn that is impossible, or the counts are too far off.
        UsageError: There are too few samples to judge by, or a probability is negative or not finite, or all are 0.
    """
    p = probabilities.double().flatten()
    if not bool(p.isfinite().all()) or bool((p < 0).any()) or not bool(p.any()):
        raise UsageError("not a distribution", got=str(p.tolist()[:6]), expected="numbers from 0 on, some above 0")
    drawn = samples.flatten().long().cpu()
    if bool((drawn < 0).any()) or bool((drawn >= len(p)).any()):
        raise AssertionError(f"a sample is outside of 0 to {len(p) - 1}: {int(drawn.min())} to {int(drawn.max())}")
    counts = torch.bincount(drawn, minlength=len(p)).double()
    impossible = ((p == 0) & (counts > 0)).nonzero().flatten().tolist()
    if impossible:
        raise AssertionError(f"value {impossible[0]} was drawn {int(counts[impossible[0]])} times and has no chance")
    expected = p / p.sum() * drawn.numel()
    often = expected >= _LEAST
    groups = [(counts[often], expected[often])]
    if float(expected[~often].sum()) > 0:
        groups.append((counts[~often].sum()[None], expected[~often].sum()[None]))
    seen, wanted = (torch.cat(part) for part in zip(*groups, strict=True))
    if len(seen) < 2:
        raise UsageError("too few samples", got=str(drawn.numel()), hint="draw at least ten times the number of values")
    statistic = ((seen - wanted).square() / wanted).sum()
    chance = float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2).double(), statistic / 2))
    if chance < _CHANCE:
        worst = int(((seen - wanted).square() / wanted).argmax())
        value = int(often.nonzero().flatten()[worst]) if worst < int(often.sum()) else "the rare ones"
        text = f"drawn {int(seen[worst])} times, expected {float(wanted[worst]):.0f}"
        raise AssertionError(f"not this distribution (chance {chance:.1g}): value {value} is {text}")
    return chance
