"""Assertions of `glass.testing` beside `assert_matches`: gradients of a candidate, and samples of a sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from glassengine.errors import UsageError
from glassengine.kernels.match import accumulation_of, called, explained, judged
from glassengine.kernels.prepared import Prepared, as_tensors
from glassengine.kernels.trace import copied, tensors_of
from glassengine.results.kernels import Match

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
