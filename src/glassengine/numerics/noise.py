"""Models the rounding of each op, products included: which ops round, and how much noise a Monte-Carlo run adds.

Noise is uniform in [-u, u] relative to the result (near zero absolute, and never more than the number itself), plus the
accumulation error of sums: sqrt(K / 6) u_acc sqrt(x^2 W^2) for products over K terms (the probabilistic bound of Higham
and Mary); without that term 5-40 % of legitimate float32 runs looked wrong (`docs/numerics.md`). u_acc is
float32's, unless less is declared: lower accumulation must show as an error. The noise itself is worked out in float32,
and added in float64.

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
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.numerics.bounds import attention_parts
from glassengine.numerics.float64 import FLOAT32_SUMS, U_ACCUMULATE, Accumulation, target_of
from glassengine.numerics.kernels import assumed
from glassengine.ops.row import Rounding
from glassengine.ops.traits import named, traits_of
from glassengine.program.representation.naming import op_name
from glassengine.program.representation.outputs import is_view

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


_UNDERFLOW = 2.0**-60
"""Errors near zero that are smaller than this are none for any model: those of all dtypes with eight exponent bits."""
_MANY = 64
"""Terms: of fewer than these the probabilistic bound allows any error."""
_LARGE = 1 << 20
"""Of more elements noise is drawn in 256 levels and in float32: a weight's is the most that a coarse side costs."""
_LARGEST_ARGUMENT = 1e4
"""Where functions are saturated, or beyond what a sweep covers."""


def rounds(node: Node) -> bool:
    """Whether the op of `node` rounds its result."""
    traits = traits_of(node)
    if is_view(node) or traits.moves or traits.rounding in (Rounding.COUNTS, Rounding.STEPS):
        return False
    if traits.casts:
        source = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
        target = node.meta["val"].dtype
        floating: bool = source.is_floating_point and target.is_floating_point
        return floating and torch.finfo(source).bits > torch.finfo(target).bits
    return True


def noisy(
    node: Node,
    value: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    u: float,
    generator: torch.Generator,
    accumulation: Accumulation = FLOAT32_SUMS,
    tiny: float = 0.0,
) -> torch.Tensor:
    """Return `value` (float64, the exact result of `node` for `args`) with one sample of legal rounding.

    Args:
        node: The op.
        value: Its float64 result.
        args: The float64 arguments it was computed from.
        kwargs: Its keyword arguments, likewise.
        u: Unit roundoff of the dtype in which the op rounds its result.
        generator: Source of the noise.
        accumulation: Of products.
        tiny: Largest error of rounding near zero in that dtype.
    """
    if traits_of(node).multiplies:
        summed = ExactProduct(node, value, args, kwargs).sums(args, kwargs, u, generator, accumulation)
        return rounded(value, u, generator, summed, tiny)
    half = _half_width(value.float().abs_(), u, tiny)
    accumulated = _accumulation(node, value, args, kwargs, u, accumulation)
    if accumulated is not None:
        half += accumulated.float()
    return _added(value, half.mul_(uniform(value.shape, generator)), u)


def rounded(
    value: torch.Tensor, u: float, generator: torch.Generator, noise: torch.Tensor | None, tiny: float = 0.0
) -> torch.Tensor:
    """Return `value` (float64) with other `noise` (float32) and its own rounding."""
    own = _half_width(value.float(), u, tiny).mul_(uniform(value.shape, generator))
    return _added(value, own if noise is None else own.add_(noise), u)


def disturbed(value: torch.Tensor, u: float, generator: torch.Generator, tiny: float = 0.0) -> torch.Tensor:
    """Return `value` (float64) as rounding to a dtype may have moved it before it was used."""
    if value.numel() > _LARGE:
        return _added(value, _half_width(value.float(), u, tiny).mul_(uniform(value.shape, generator)), u)
    unit = torch.rand(value.shape, generator=generator, dtype=torch.float32).double() * 2 - 1
    return torch.where(value.isfinite(), value + _half_width(value.abs(), u, tiny) * unit, value)


def _half_width(value: torch.Tensor, u: float, tiny: float) -> torch.Tensor:
    """Half-width of uniform noise, up to its sign: u |x|, near zero `tiny` but at most |x|; overwrites `value`."""
    if tiny < _UNDERFLOW:
        return value.mul_(u)
    size = value.abs()
    return torch.minimum((size * u).clamp_(min=tiny), size)


def _added(value: torch.Tensor, noise: torch.Tensor, u: float) -> torch.Tensor:
    """`value` with noise where there can be any: what is infinite, or a mask beyond float32, has none."""
    moved = noise.double().add_(value)
    if math.isfinite(float(moved.sum())):
        return moved
    return torch.where(moved.isfinite(), moved, value)


def _accumulation(
    node: Node, value: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], u: float, how: Accumulation
) -> torch.Tensor | None:
    """Half-width of uniform noise for the internal sums of an op (broadcasts against its result), None without sums."""
    traits = traits_of(node)
    kernel = how.kernels.error(op_name(node), _dtype_of(node)) or assumed(op_name(node))
    if kernel is not None and any(kernel.spread):
        argument = args[0] if args and isinstance(args[0], torch.Tensor) else None
        fits = argument is not None and argument.shape == value.shape
        size, of_argument = (
            0.0 if tensor is None else tensor.abs().nan_to_num(0.0, 0.0, 0.0).clamp(max=_LARGEST_ARGUMENT)
            for tensor in (value, argument if fits else None)
        )
        return kernel.noise(size, of_argument)  # type: ignore[arg-type]
    if traits.rounding is Rounding.ATTENTION:
        return _attention(args, kwargs, max(u, how.u_operands), how)
    if traits.terms is not None:
        absolute: torch.Tensor = target_of(node)(*pytree.tree_map(_absolute, args), **kwargs).abs()
        terms = traits.terms(args, value)
        noise = absolute * math.sqrt(min(terms, 1 << 16)) * U_ACCUMULATE
        biased = one_after_another(op_name(node), value, args, kwargs) if terms >= _MANY else None
        return noise if biased is None else noise + 2 * (biased - value).abs()
    return None


def one_after_another(
    op: str, value: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return a sum whose terms are added one after another in float32; None for ops that are not plain sums.

    Roundings of terms that are alike (padding, a constant) go in one direction, and do not cancel as the probabilistic
    bound has it.
    """
    if named(op).kind != "sum" or not args or not isinstance(args[0], torch.Tensor):
        return None
    x = args[0]
    given = next((part for part in (*args[1:2], kwargs.get("dim"), kwargs.get("axes")) if part is not None), None)
    if isinstance(given, torch.Tensor):
        given = given.flatten().tolist()
    if isinstance(given, int) and not isinstance(given, bool):
        given = [given]
    if given is not None and not isinstance(given, (list, tuple)):
        return None
    dims = sorted({int(dim) % max(1, x.dim()) for dim in given or range(x.dim())})
    if not x.is_floating_point() or not dims:
        return None
    rows = x.movedim(dims, list(range(x.dim() - len(dims), x.dim()))).reshape(value.numel(), -1)
    if not rows.numel() or not bool(rows.isfinite().all()):
        return None
    added = np.add.accumulate(rows.float().contiguous().numpy(), axis=-1, dtype=np.float32)[:, -1]
    total = torch.from_numpy(added).double() / (rows.shape[-1] if op == "mean" else 1)
    return total.reshape(value.shape)


def _dtype_of(node: Node) -> torch.dtype:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else torch.float32


def _absolute(value: Any) -> Any:
    return value.abs() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any], u: float, how: Accumulation) -> torch.Tensor:
    """Scores are sums over D, probabilities are rounded (to the input dtype by fused kernels), contexts sum over T."""
    # The size of noise needs no float64, which takes twice the time.
    narrow = [arg.float() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args]
    query, key, value = narrow[:3]
    size, length = query.shape[-1], key.shape[-2]
    scale = kwargs.get("scale") or size**-0.5
    spread = query.square().sum(-1, keepdim=True).amax().sqrt() * key.square().sum(-1).amax().sqrt()
    score_error = size**0.5 * how.u_sums * scale * float(spread)
    named = {k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in kwargs.items()}
    weight = torch.ops.aten.scaled_dot_product_attention.default(query, key, value.abs(), *narrow[3:], **named)
    share = score_error + 2 * U_ACCUMULATE + length**0.5 * max(how.u_sums, how.u_contexts) + u / max(1.0, length**0.5)
    noise: torch.Tensor = weight * share
    return noise


WideOperands = Literal["none", "thin products", "products"]
"""Which products may read operands that are not rounded yet, where the output of the op before them is."""


def reads_memory(op: Node, shape: torch.Size, wide: WideOperands) -> bool:
    """Return whether an op reads its operands from memory, so that what was dumped is what was used.

    Args:
        op: The op.
        shape: Of its result as it was run: in the graph sizes may be symbols.
        wide: Products of the runtime that read registers. A thin product is a batched one of one row or column, which a
            compiler may fuse with other ops, as a sum.
    """
    traits = traits_of(op)
    if not traits.reads_memory or wide == "products":
        return False
    values = [op.meta["val"], *(source.meta.get("val") for source in op.all_input_nodes)]
    is_batched = all(isinstance(v, torch.Tensor) and v.dim() > 2 for v in values)
    is_thin = traits.kind == "matrix product" and traits.addend is None and is_batched and 1 in shape[-2:]
    return wide == "none" or not is_thin


def other_kernel(op: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return a second implementation, where one kernel would be too little of a floor: attention written out."""
    if traits_of(op).rounding is not Rounding.ATTENTION:
        return []
    _, _, value, _, probabilities, _ = attention_parts(args, kwargs)
    return [(probabilities.to(value.dtype) @ value).double()]
