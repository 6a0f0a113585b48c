"""Exact tensors: rounding has no part in them, and every right implementation has the same values.

Inputs and constants are exact. So is what is made of exact values alone by ops that move or select; by ops that round
correctly, where float64 gives the same as the program's own dtype (differences of whole numbers, a product with a power
of two); and by sums and products of whole numbers that stay small. The result of a library function (an exponential) is
never exact. Between exact values there are no ties, and numbers that hide a key are followed from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.numerics.float64 import Accumulation, target_of
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.mask_values import HIDDEN
from glassengine.ops.row import OpTraits
from glassengine.ops.traits import traits_of
from glassengine.program.representation.outputs import is_view

_A_FEW = 16


def keeps_whole_numbers(node: Node, args: Any, kwargs: Any, result: Any, u: float) -> bool:
    """Return whether an op adds up or multiplies whole numbers that stay small, so that it rounds nothing.

    Args:
        node: The op.
        args: Its arguments, floating ones in float64.
        kwargs: Its keyword arguments, likewise.
        result: Its float64 result.
        u: Unit roundoff of the coarsest dtype in which it is computed.
    """
    if not traits_of(node).keeps_whole or not isinstance(result, Tensor):
        return False
    floats = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor) and v.is_floating_point()]
    numbers = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, float)]
    # The first few tell nearly all tensors that are none.
    if not all(_is_whole(value.flatten()[:_A_FEW]) for value in floats) or not all(v.is_integer() for v in numbers):
        return False
    if not all(_is_whole(value) for value in floats):
        return False
    sizes = pytree.tree_map(_size, (tuple(args), dict(kwargs)))
    total: Any = target_of(node)(*sizes[0], **sizes[1])
    return bool(total.abs().amax() <= 1 / u) if isinstance(total, Tensor) and total.numel() else False


class Exactness:
    """Finds the exact tensors of each step, node by node in graph order; `node in exactness` asks for one.

    Args:
        weights: Of the program, by node.
        coarsest: Dtype of the coarsest candidate; None for the program's own.
        accumulation: How the candidates' products are summed.
    """

    def __init__(self, weights: Mapping[str, Tensor], coarsest: torch.dtype | None, accumulation: Accumulation) -> None:
        self._weights = weights
        self._coarsest = coarsest
        self._accumulation = accumulation
        self._of_weights: dict[str, bool] = {}
        self._nodes: set[Node] = set()

    def begin_step(self) -> None:
        """Forget the step before."""
        self._nodes.clear()

    def __contains__(self, node: Node) -> bool:
        return node in self._nodes

    def take(self, node: Node, value: Any) -> None:
        """Take note of an input or a constant; all sides are given the same."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            is_exact = True
        elif node.name in self._weights:
            if node.name not in self._of_weights:
                self._of_weights[node.name] = self._is_kept(value, as_weight=True)
            is_exact = self._of_weights[node.name]
        else:
            is_exact = self._is_kept(value)
        if is_exact:
            self._nodes.add(node)

    def forced(self, node: Node, value: Tensor, exact: Tensor) -> None:
        """Take note of what takes the place of the value of a node."""
        if node in self._nodes and not torch.equal(value.double(), exact.double()):
            self._nodes.discard(node)

    def finds(self, node: Node, args: Any, kwargs: Any, exact: Any, native: Any) -> bool:
        """Return whether the result of an op is exact, and take note of it.

        Args:
            node: The op.
            args: In float64.
            kwargs: Likewise.
            exact: Its result on these.
            native: Its result in the program's own dtypes.
        """
        traits = traits_of(node)
        if traits.is_arbitrary or not all(source in self._nodes for source in node.all_input_nodes):
            return False
        ours, theirs = pytree.tree_leaves(exact), pytree.tree_leaves(native)
        if len(ours) != len(theirs) or not all(map(self._is_same, ours, theirs)):
            return False
        makes_floats = any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in ours)
        if makes_floats and not self._keeps(node, args, kwargs, theirs):
            return False
        self._nodes.add(node)
        return True

    def _keeps(self, node: Node, args: Any, kwargs: Any, results: list[Any]) -> bool:
        traits = traits_of(node)
        is_of_numbers = not node.all_input_nodes
        if is_view(node) or traits.moves or traits.casts or traits.correctly_rounded or is_of_numbers:
            return True
        (result,) = results if len(results) == 1 else (None,)
        if not isinstance(result, Tensor):
            return False
        return keeps_whole_numbers(node, args, kwargs, result, self.unit(traits, result.dtype))

    def unit(self, traits: OpTraits, dtype: torch.dtype) -> float:
        """Return the unit roundoff of the coarsest dtype in which a candidate may compute an op of these traits."""
        dtypes = [dtype, dtype if self._coarsest is None else self._coarsest]
        of_products = (self._accumulation.u_sums, self._accumulation.u_operands)
        found = [unit_roundoff(one) for one in dtypes] + list(of_products if traits.multiplies else ())
        return max(found)

    def _is_same(self, exact: Any, native: Any) -> bool:
        if not isinstance(exact, Tensor) or not isinstance(native, Tensor):
            return bool(exact == native)
        if exact.shape != native.shape:
            return False
        if not exact.is_floating_point():
            return not exact.is_complex() and torch.equal(exact, native)
        wide = native.double()
        return bool(((exact == wide) | (exact.isnan() & wide.isnan())).all()) and self._is_kept(native)

    def _is_kept(self, value: Tensor, *, as_weight: bool = False) -> bool:
        """Whether a candidate's coarser dtype holds these very values.

        How weights other than whole numbers came to be in it is unknown.
        """
        coarsest = self._coarsest
        if coarsest is None or torch.finfo(coarsest).eps <= torch.finfo(value.dtype).eps:
            return True
        if as_weight and not bool(((value == value.round()) | (value <= HIDDEN)).all()):
            return False
        return torch.equal(value.to(coarsest).to(value.dtype), value)


def _size(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value


def _is_whole(value: Tensor) -> bool:
    return bool((value == value.round()).all())
