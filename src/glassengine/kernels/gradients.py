"""`glass.testing.assert_gradients_match`: backward of a candidate beside the gradients of its reference in float64."""

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
