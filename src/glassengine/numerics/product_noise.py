"""A product in float64, and what rounding and disturbed factors make of it, at the price of float32.

A product (of matrices, or a convolution) is linear in each of its factors. With P the exact result for a factor x:

    (x + d) W = P + d W

d is what rounding further up has done to x, small beside it, so that d W needs no float64: its own rounding is 2^-24
of the noise that it stands for.

The rounding of sums over K terms has a standard deviation of sqrt(K / 6) u_acc sqrt(x^2 W^2) (see `rounding`). That is
what steps of random sign in x make of the product, Var(sum_k +-s x_k w_k) = s^2 sum_k x_k^2 w_k^2, and they go into d:
one product in float32 gives both. A step has a fixed size, not a random one, lest a row with one huge element draws
next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.numerics.float64 import target_of
from glassengine.numerics.ops import FLOAT32_SUMS, Accumulation
from glassengine.ops.traits import traits_of

_PER_DRAW = 8
_LOWEST = -(2**63)
_MEAN_SIZE = math.sqrt(2 / math.pi)
"""Of a normal variable in units of its standard deviation."""


class ExactProduct:
    """One product with its float64 result; draws samples of what rounding makes of it.

    Args:
        node: The op.
        value: Its float64 result.
        args: The float64 arguments it was computed from.
        kwargs: Its keyword arguments, likewise.
        narrow: Position among the leaves of `args` -> the same values in a smaller dtype, where there are any.
    """

    def __init__(
        self,
        node: Node,
        value: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        narrow: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        traits = traits_of(node)
        self._value, self._call = value, target_of(node)
        self._kwargs = kwargs
        self._leaves, self._spec = pytree.tree_flatten(args)
        # The added operand of addmm and the bias of linear and convolutions are not factors.
        floats = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        self._added = traits.addend if traits.addend in floats else None
        self._factors = [i for i in floats if i != traits.addend]
        self._terms = 1 if traits.terms is None else traits.terms(args, value)
        self._narrow = dict(narrow)

    def sums(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        u: float,
        generator: torch.Generator,
        accumulation: Accumulation = FLOAT32_SUMS,
    ) -> Tensor | None:
        """Return a sample of (result for `args`, sums rounded) - (exact result), float32; its own rounding is missing.

        None where more than one operand differs from the exact ones, or the difference is not finite.

        Args:
            args: Float64 arguments near the exact ones, or these.
            kwargs: Likewise.
            u: Unit roundoff of the dtype in which the op rounds its result.
            generator: Source of the noise.
            accumulation: How the sums are rounded.
        """
        leaves = pytree.tree_leaves(args)
        moved = [i for i in self._operands if not _is_same(leaves[i], self._leaves[i])]
        if len(moved) > 1 or (moved and moved[0] == self._added) or not self._has_options(kwargs):
            return None
        position = moved[0] if moved else self._factors[0]
        factor = leaves[position]
        step = torch.copysign(factor.float() * self._step(u, accumulation), uniform(factor.shape, generator))
        if moved:
            step += (factor - self._leaves[position]).float()
        largest = _largest(step)
        if not largest < math.inf:
            if moved:
                return None
            largest = _largest(step.nan_to_num_(0.0, 0.0, 0.0))
        if not largest:
            return torch.zeros_like(self._value, dtype=torch.float32)
        # In units of the largest, or squares of small gradients fall out of float32.
        deviation: Tensor = self._linear(position, step.div_(largest)).mul_(largest)
        return deviation

    @property
    def _operands(self) -> list[int]:
        return self._factors if self._added is None else [*self._factors, self._added]

    def _step(self, u: float, accumulation: Accumulation) -> float:
        """Relative size of the steps in a factor: a standard deviation, while noise is given by its half-width.

        The rounding of the result, u |P|, is drawn apart; half-widths a and u |P| that are added make a mean square
        that is larger by 2 a u mean|P| than that of two draws.
        """
        half = math.sqrt(3.0 * self._terms / 6.0) * accumulation.u_sums + 2 * accumulation.u_operands
        return math.sqrt(half * (half + 2 * _MEAN_SIZE * u) / 3.0)

    def _linear(self, position: int, step: Tensor) -> Tensor:
        """The product with `step` instead of one factor, nothing added, in float32."""
        leaves = [step if i == position else self._narrowed(i) for i in range(len(self._leaves))]
        named = {name: None if name == "bias" else option for name, option in self._kwargs.items()}
        result: Tensor = self._call(*pytree.tree_unflatten(leaves, self._spec), **named)
        return result

    def _narrowed(self, position: int) -> Any:
        leaf = self._leaves[position]
        if position == self._added:
            return leaf.new_zeros((), dtype=torch.float32).expand(leaf.shape) if not position else None
        if position not in self._factors:
            return leaf
        self._narrow[position] = self._narrow.get(position, leaf).float()
        return self._narrow[position]

    def _has_options(self, kwargs: dict[str, Any]) -> bool:
        pairs = zip(pytree.tree_leaves(kwargs), pytree.tree_leaves(self._kwargs), strict=True)
        return all(_is_same(one, other) for one, other in pairs if isinstance(one, Tensor))


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().amax()) if tensor.numel() else 0.0


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two live tensors are the same memory, seen alike: weights are, in all lanes."""
    if one.data_ptr() != other.data_ptr() or one.dtype != other.dtype:
        return False
    return one.shape == other.shape and one.stride() == other.stride()


def uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return float32 numbers in (-1, 1), 256 levels of one probability, mean 0 and variance 1/3 (to 2^-16).

    A byte each is as good for the size of rounding, and six times as fast as `torch.rand`.
    """
    number = math.prod(shape)
    drawn = torch.empty(-(-number // _PER_DRAW), dtype=torch.int64).random_(_LOWEST, None, generator=generator)
    levels = drawn.view(torch.int8)[:number].view(tuple(shape))
    return levels.float().add_(0.5).mul_(1 / 128)
