"""The float64 reference: graphs retargeted to real float64, ops with their results, and how candidates round them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from glassengine.numerics.kernels import UNMEASURED, KernelError, Kernels
from glassengine.numerics.mask_values import is_finite
from glassengine.ops.row import OpTraits, Rounding
from glassengine.ops.traits import named, traits_of
from glassengine.program.representation.naming import of_any_layout, op_name

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
CHECKED = frozenset({"_weight_norm"})
"""Ops whose arguments are checked before they are called."""


def is_real(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor of floating numbers."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def double(value: torch.Tensor) -> torch.Tensor:
    """Return floating tensors in float64, complex ones of two such, others as they are."""
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def retarget(value: Any) -> Any:
    """Make one argument of a node float64: tensors, and dtypes written into the graph."""
    if isinstance(value, torch.Tensor):
        return double(value)
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _FLOATS else torch.complex128 if value is torch.complex64 else value
    return value


def retargeted(arguments: Any) -> Any:
    """Make what a node holds, or is called with, float64; walked in C++, which is forty times as fast as pytree."""
    return map_aggregate(arguments, retarget)


def in_double(node: Node, target: Callable[..., Any]) -> Callable[..., Any]:
    """Return what computes a node in float64, of arguments in float64, given what calls it.

    Of windows, of integers and a number (`arange(8) * 0.1`) torch makes tensors of its default dtype. Other threads
    would see a change of that dtype, so the op gets its dtype as an argument, or floats for its integers.
    """
    if not _has_default_dtype(node):
        return target
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # several ops in one, which may read integers as places
        return partial(_widened, target)
    takes_dtype = any(one.name == "dtype" for one in schema.arguments)
    return partial(_widened, partial(target, dtype=torch.float64)) if takes_dtype else partial(_of_floats, target)


def _of_floats(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = map_aggregate((args, kwargs), _float_of_integer)
    return _widened(target, *args, **kwargs)


def _widened(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return map_aggregate(target(*args, **kwargs), retarget)


def _float_of_integer(value: Any) -> Any:
    is_integer = isinstance(value, Tensor) and _is_integral(value.dtype) and value.dtype is not torch.bool
    return value.double() if is_integer else value


def _has_default_dtype(node: Node) -> bool:
    made = node.meta.get("val")
    if not isinstance(made, Tensor) or made.dtype not in _FLOATS:
        return False
    if any(isinstance(one, torch.dtype) for one in (*node.args, *node.kwargs.values())):
        return False
    read = (source.meta.get("val") for source in node.all_input_nodes)
    return not any(isinstance(value, Tensor) and not _is_integral(value.dtype) for value in read)


def _is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def target_of(node: Node) -> Any:
    """Return what to call for `node` in float64.

    Another kernel's memory layout may not allow a strict view, uninitialized memory is NaN, products of the
    rows of each expert with its matrix have no kernel in float64, and a weight norm does not look at what it is given.
    """
    if op_name(node) in CHECKED:
        return partial(_normed, node.target)
    if op_name(node) == "_grouped_mm":
        return partial(_grouped, node.target)
    return partial(_unwritten, node.target) if traits_of(node).is_unwritten else of_any_layout(node.target)


def _grouped(target: Any, rows: torch.Tensor, matrices: torch.Tensor, ends: Any = None, *rest: Any) -> torch.Tensor:
    """Multiply rows [T, I] by matrices [E, I, O]; expert e has the rows up to ends[e]."""
    if rows.dtype is not torch.float64 or ends is None or (rows.dim(), matrices.dim()) != (2, 3):
        result: torch.Tensor = target(rows, matrices, ends, *rest)
        return result
    result = rows.new_zeros(len(rows), matrices.shape[-1])
    start = 0
    for end, matrix in zip(ends.tolist(), matrices, strict=True):
        result[start:end] = rows[start:end] @ matrix
        start = end
    return result


def _normed(target: Any, v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """A weight norm whose kernel is asked only for sizes that fit: for others it writes where it should not."""
    if dim in (0, v.dim() - 1) and list(g.shape) != [v.shape[i] if i == dim else 1 for i in range(v.dim())]:
        raise ValueError(f"norms of shape {list(g.shape)} for a weight of shape {list(v.shape)} along {dim}")
    result: torch.Tensor = target(v, g, dim)
    return result


def _unwritten(target: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    value: torch.Tensor = target(*args, **kwargs)
    return value.fill_(math.nan) if value.is_floating_point() else value.zero_()


U_ACCUMULATE = 2.0**-24


@dataclass(frozen=True)
class Accumulation:
    """How products (matrix products, convolutions, attention) are summed: unit roundoffs of sums and of operands.

    And of the sums of an attention over its keys, where these are coarser, and how accurate elementwise kernels are.
    """

    u_sums: float = U_ACCUMULATE
    u_operands: float = 0.0
    kernels: Kernels = UNMEASURED
    u_contexts: float = 0.0


FLOAT32_SUMS = Accumulation()

ACCUMULATIONS = {
    "float32": FLOAT32_SUMS,
    "tf32": Accumulation(u_operands=2.0**-11),
    "bfloat16": Accumulation(2.0**-9, 2.0**-9),
    "float16": Accumulation(2.0**-11, 2.0**-11),
}
"""What a candidate may declare; anything less than float32 would otherwise show as an error."""


@dataclass(frozen=True)
class Roundoff:
    """Unit roundoffs of one op (see `bounds`), and what rounding does near zero.

    Attributes:
        tiny: Largest error of rounding near zero in the dtype of the result.
        tiny_in: The same in the coarsest of what u_in and u_w are of.
        kernel: What the runtime's kernel of the op is off by beyond that; None where it was not measured.
    """

    u: float
    u_in: float = 0.0
    u_w: float = 0.0
    tiny: float = 0.0
    u_sums: float = U_ACCUMULATE
    tiny_in: float = 0.0
    kernel: KernelError | None = None

    def size_in(self, x: Tensor) -> Tensor:
        """Return |x| as roundoffs of inputs are relative to it: near zero more, lest their errors be below `tiny_in`.

        Twice that, since bounds are of first order and numbers of one or two steps are far from that.
        """
        u = max(self.u_in, self.u_w)
        return x.abs().clamp(min=2 * self.tiny_in / u) if u and self.tiny_in else x.abs()


@dataclass(frozen=True)
class Operation:
    """One op in float64: ATen base name, what computes it, arguments and result."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    exact: Tensor

    @property
    def traits(self) -> OpTraits:
        """What is known of the op."""
        return named(self.name)

    @property
    def num_terms(self) -> int:
        """Number of terms of one of the sums inside of the op; 1 where it has none."""
        count = self.traits.terms
        return 1 if count is None else count(self.args, self.exact)

    def on(self, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the result of the op on floating arguments changed by `change`; numbers stay."""

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) and value.is_floating_point() else value

        args, kwargs = pytree.tree_map(changed, (self.args, self.kwargs))
        found = self.target(*args, **kwargs)
        result: Tensor = found[0] if isinstance(found, (tuple, list)) else found
        return result


def is_broken(value: Any) -> bool:
    """Return whether there is a NaN or a positive infinity (masks hold negative ones)."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return False
    return not bool(value.amax() < math.inf)


def num_newly_broken(
    operation: Operation, candidate: torch.Tensor, unwritten: torch.Tensor | None, hidden: torch.Tensor | None = None
) -> int:
    """Return how many NaN and infinities the op made of finite inputs; padding counts: what comes later reads it.

    A row of padding that may see nothing has a softmax of its own in every kernel, and uninitialized memory
    holds anything.

    Args:
        operation: On finite inputs.
        candidate: What the candidate made of them.
        unwritten: Bool mask of the elements that depend on memory that nothing has written; None if there are none.
        hidden: Bool mask of those that hide a place, where minus infinity equals any number.
    """
    traits = operation.traits
    is_of_rows = traits.kind in ("softmax", "log_softmax") or traits.rounding is Rounding.ATTENTION
    if is_of_rows or is_finite(candidate):
        return 0
    largest = torch.finfo(candidate.dtype).max / 2
    broken = ~candidate.isfinite() & operation.exact.isfinite() & (operation.exact.abs() < largest)
    if hidden is not None:
        broken = broken & ~(hidden & (candidate < 0))
    return int((broken if unwritten is None else broken & ~unwritten).sum())
