"""Counts the terms of one sum inside of an op: products, convolutions, pools and reductions."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from glassengine.ops.row import Terms

_LEAST = 16
"""Terms of overlapping windows (pooling, resampling): more than the ratio of the sizes, but never many."""


def last_axis(position: int) -> Terms:
    """Return what counts the elements along the last axis of an argument: the inner size of a product."""

    def count(args: tuple[Any, ...], result: Tensor) -> int:
        return max(1, int(args[position].shape[-1]))

    return count


def of_batches(args: tuple[Any, ...], result: Tensor) -> int:
    """Count the terms of addbmm, which sums over the batch, too."""
    return max(1, int(args[1].shape[0] * args[1].shape[-1]))


def of_all(args: tuple[Any, ...], result: Tensor) -> int:
    """Count all elements of the first tensor: of einsum, and of what accumulates."""
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    return max(1, tensors[0].numel())


def of_kernel(args: tuple[Any, ...], result: Tensor) -> int:
    """Count the terms of a convolution: the weights of one channel of the result."""
    if len(args) > 6 and args[6] is True:  # aten.convolution, transposed
        return of_transposed_kernel(args, result)
    weight: Tensor = args[1]
    return max(1, weight[0].numel())


def of_transposed_kernel(args: tuple[Any, ...], result: Tensor) -> int:
    """Count the terms of a transposed convolution, whose weights are [in, out / groups, ...]."""
    weight: Tensor = args[1]
    groups = result.shape[1 - weight.dim()] // max(1, weight.shape[1])
    return max(1, weight.shape[0] // max(1, groups) * math.prod(weight.shape[2:]))


def of_ratio(args: tuple[Any, ...], result: Tensor) -> int:
    """Count the elements of the first tensor for one of the result."""
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    return max(_LEAST, tensors[0].numel() // max(1, result.numel()))


def of_filter(args: tuple[Any, ...], result: Tensor) -> int:
    """Count the terms of a resampling whose filter is up to four times as wide as the ratio along each axis."""
    x: Tensor = args[0]
    return _LEAST * max(1, x.numel() // max(1, result.numel()))
