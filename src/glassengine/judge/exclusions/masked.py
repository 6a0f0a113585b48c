"""Exact values, and masks and padding: numbers that hide a key, rows that see no key, positions that hold no token.

*Hidden values.* One implementation hides a key with the least number of the dtype, another with minus infinity or -1e9;
the softmax makes 0 of each. Such a number is not excluded: it is compared by whether it hides (see
`numerics.mask_values`). It is recognized by where it comes from: numbers of that size that the program writes itself or
is given, with nothing but selecting, adding and scaling between. A score that is that small by itself hides nothing.

*Hidden rows.* A query of padding with nothing but padding before it sees no key. One implementation gives all keys the
same share, another gives none, a third returns NaN, and rounding alone picks one of the hidden numbers. The noise of
such rows would hide any mistake in the real ones, so they and what depends on them (see `perturbation`) are excluded,
unless nothing else is left of a tensor.

*Padding.* The inputs of a step say which positions are padding, and the axes of a site which dimensions are positions.
No value is followed: a position of padding is left out whatever is computed there.

Exact tensors: rounding has no part in them, and every right implementation has the same values. Inputs and constants
are exact. So is what is made of exact values alone by ops that move or select; by ops that round correctly, where
float64 gives the same as the program's own dtype (differences of whole numbers, a product with a power of two); and by
sums and products of whole numbers that stay small. The result of a library function (an exponential) is never exact.
Between exact values there are no ties, and numbers that hide a key are followed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from glassengine.judge.cases import StepInputs
from glassengine.judge.exclusions.perturbation import NATIVE, Source, Values
from glassengine.numerics.float64 import Accumulation, target_of
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.mask_values import HIDDEN, is_mask
from glassengine.ops.row import OpTraits, Rounding, argument
from glassengine.ops.traits import traits_of
from glassengine.program.representation.outputs import is_view
from glassengine.program.representation.program import Program
from glassengine.results import ExemptionReason
from glassengine.sites import Site

_ON_THE_WAY = ("stays", "moves")
_A_FEW = 16


class HiddenValues:
    """Follows such numbers through the steps of one graph, in graph order.

    Args:
        graph: It.
        exactness: Says which tensors are exact, of the same steps.
    """

    def __init__(self, graph: Graph, exactness: Exactness) -> None:
        self._exactness = exactness
        self._leading, self._only_softmax = _read_by_softmax(graph)
        self._made_of_exact: set[Node] = set()
        self._found: dict[Node, Tensor] = {}

    def begin_step(self) -> None:
        """Forget the step before."""
        self._made_of_exact.clear()
        self._found.clear()

    def visit(self, node: Node, value: Any, env: Mapping[Node, Sequence[Any]]) -> None:
        """Take note of an input, a constant or a computed node.

        Args:
            node: It.
            value: Its exact value.
            env: Values of the nodes computed so far, the exact one first.
        """
        is_input = node.op != "call_function"
        if is_input or traits_of(node).hidden in _ON_THE_WAY:
            sources = node.all_input_nodes
            if node in self._exactness or (
                sources and all(s in self._exactness or s in self._made_of_exact for s in sources)
            ):
                self._made_of_exact.add(node)
        if node not in self._leading or not isinstance(value, Tensor) or not value.is_floating_point():
            return
        where = value <= HIDDEN
        if node not in self._made_of_exact:
            came = self._carried(node, value, env)
            where = where & came if came is not None else torch.zeros_like(where)
        if bool(where.any()):
            self._found[node] = where

    def of(self, node: Node) -> Tensor | None:
        """Return where the value of `node` hides, so that its size does not matter; None if nowhere."""
        return self._found.get(node) if node in self._only_softmax else None

    def places(self, node: Node) -> Tensor | None:
        """Return where the value of `node` hides, for any other readers; None if nowhere."""
        return self._found.get(node)

    def settle(self, node: Node) -> None:
        """Note that `node` has no more readers."""
        self._found.pop(node, None)

    def _carried(self, node: Node, value: Tensor, env: Mapping[Node, Sequence[Any]]) -> Tensor | None:
        """Return where a number that hides went into the result of an op; None if unknown."""
        hidden = traits_of(node).hidden
        if hidden not in _ON_THE_WAY:
            return None
        if hidden == "stays":
            masks = [self._found[source] for source in node.all_input_nodes if source in self._found]
            if not masks or any(mask.dim() > value.dim() for mask in masks):
                return None
            found = masks[0].expand(value.shape)
            for mask in masks[1:]:
                found = found | mask
            return found

        def as_numbers(leaf: Any) -> Any:
            if isinstance(leaf, Node):
                known = env[leaf][0]
                if not isinstance(known, Tensor) or not known.is_floating_point():
                    return known
                mask = self._found.get(leaf)
                return torch.zeros_like(known) if mask is None else mask.to(known.dtype)
            if isinstance(leaf, (int, float)) and leaf <= HIDDEN:
                return 1.0
            return 0.0 if isinstance(leaf, float) else leaf

        args, kwargs = pytree.tree_map(as_numbers, (tuple(node.args), dict(node.kwargs)))
        target: Any = node.target
        try:
            found = target(*args, **kwargs)
        except (RuntimeError, IndexError, KeyError, TypeError):
            return None
        return found > 0 if isinstance(found, Tensor) and found.shape == value.shape else None


def _read_by_softmax(graph: Graph) -> tuple[set[Node], set[Node]]:
    """Return the nodes that become scores of a softmax or the mask of an attention; and those that become no more."""
    leading: set[Node] = set()
    only: set[Node] = set()
    for node in reversed(graph.nodes):
        readers = [user for user in node.users if "_assert" not in str(user.target)]
        if any(_hides_for(user, node, leading) for user in readers):
            leading.add(node)
            if all(_hides_for(user, node, only) for user in readers):
                only.add(node)
    return leading, only


def _hides_for(user: Node, node: Node, found: set[Node]) -> bool:
    traits = traits_of(user)
    if traits.hidden == "ignored":
        return user.args[0] is node
    if traits.rounding is Rounding.ATTENTION:
        return argument(user, "attn_mask") is node
    return user in found and traits.hidden in _ON_THE_WAY


class HiddenRows(Source):
    """What depends on fully masked attention rows.

    Args:
        hidden: Takes a node of scores and returns a bool mask, in its shape, of the numbers that hide a key (see
            `masked`), or None if there are none. Without it every number of that size hides.
    """

    kind: ExemptionReason = "masked rows"
    reason = "fully masked attention rows, and elements that depend on them"

    def __init__(self, hidden: Callable[[Node], torch.Tensor | None] | None = None) -> None:
        self._hidden = hidden

    def concerns(self, traits: OpTraits) -> bool:
        """Return whether an op makes shares of scores."""
        return traits.hidden == "ignored" or traits.rounding is Rounding.ATTENTION

    def marks(self, node: Node, value: torch.Tensor, values: Values) -> torch.Tensor | None:
        """Return the rows that see no key, of the result of a softmax or an attention."""
        traits = traits_of(node)
        if traits.hidden == "ignored":
            source, dims = node.all_input_nodes[0], argument(node, "dim")
            scores = values[source][NATIVE]
            along = list(range(scores.dim())) if dims is None or dims == [] else dims
            return self._sees_nothing(source, scores, along, keep=value.dim() == scores.dim())
        if traits.rounding is Rounding.ATTENTION:
            own = argument(node, "attn_mask")
            return self._sees_nothing(own, values[own][NATIVE], -1) if isinstance(own, Node) else None
        return None

    def excludes(self, mask: torch.Tensor) -> bool:
        """Return whether any element of the tensor is left."""
        return not bool(mask.all())

    def _sees_nothing(
        self, node: Node, scores: torch.Tensor, dim: int | list[int], *, keep: bool = True
    ) -> torch.Tensor | None:
        """Return which rows along `dim` hold hidden places only; None where no row does."""
        if not scores.dim() or not scores.numel():
            return None
        if scores.dtype is torch.bool:
            seen = scores
        else:
            known = None if self._hidden is None else self._hidden(node)
            if self._hidden is not None and known is None:
                return None
            seen = scores > HIDDEN if known is None else ~known
        none: torch.Tensor = ~seen.any(dim, keepdim=keep)
        return none if bool(none.any()) else None


def valid_mask(site: Site, value: torch.Tensor, inputs: StepInputs) -> torch.Tensor | None:
    """Return a bool mask that broadcasts against `value`, or None when every element counts.

    Of a mask every slot counts: it says which slots are seen, and those of padding must not be.

    Args:
        site: Says which dimensions are batch, sequence and cache (or batch and sequence folded into one).
        value: The tensor.
        inputs: Of the step: [B, S] real tokens, [B, T] occupied cache slots.
    """
    reads_slots = "cache" in site.axes and not is_mask(value)
    key = (tuple(site.shape), *site.axes.items(), value.shape, reads_slots)
    if key not in inputs.known_masks:
        inputs.known_masks[key] = _valid_mask(site, value, inputs, reads_slots=reads_slots)
    return inputs.known_masks[key]


def _valid_mask(site: Site, value: torch.Tensor, inputs: StepInputs, *, reads_slots: bool) -> torch.Tensor | None:
    tokens, slots = inputs.token_mask, inputs.attention_mask.bool()
    if bool(tokens.all()) and bool(slots.all()):
        return None
    mask: torch.Tensor | None = None
    folded = [i for i, size in enumerate(site.shape) if size in ("batch*sequence", "sequence*batch")]
    if folded:
        mask = _spread(tokens.flatten(), value, folded[0])
    elif tokens.shape[1] == 1 and not bool(tokens.all()) and "batch" in site.axes:
        mask = _spread(tokens[:, 0], value, site.axes["batch"])  # all that a row of padding has
    tables = {"sequence": tokens, "cache": slots} if reads_slots else {"sequence": tokens}
    for axis, table in tables.items():
        if axis in site.axes and "batch" in site.axes:
            part = _spread(table, value, site.axes["batch"], site.axes[axis])
            mask = part if mask is None else mask & part
    return mask


def _spread(table: torch.Tensor, value: torch.Tensor, *axes: int) -> torch.Tensor:
    """Reshape `table` so that its dimensions lie at `axes` of `value` (in any order)."""
    order = sorted(range(len(axes)), key=lambda i: axes[i])
    shape = [1] * value.dim()
    for axis in axes:
        shape[axis] = value.shape[axis]
    return table.permute(order).reshape(shape)


def valid_in_step(
    program: Program, inputs: StepInputs | Mapping[str, Any], node: torch.fx.Node, value: torch.Tensor
) -> torch.Tensor | None:
    """Return which elements of the value of a node are no padding in a step; None where all are real."""
    if not isinstance(inputs, StepInputs):
        return None
    return valid_mask(program.sites.by_node[node.name][0], value, inputs)


def completed(tensor: torch.Tensor, native: torch.Tensor, cache_axis: int | None, num_seen: int) -> torch.Tensor:
    """Return a candidate's cache in the length of the baseline's, with the baseline's values in slots that it lacks.

    A cache that grows is shorter than the static one, and one that slides holds the newest slots only. Only slots that
    both have are compared: in the others the result equals the baseline. A tensor of another shape is returned as is.

    Args:
        tensor: The candidate's.
        native: The baseline's, in its own dtype.
        cache_axis: Axis of the slots; None for other tensors.
        num_seen: Slots of the baseline's cache that hold a token.
    """
    axis = cache_axis
    if axis is None or tensor.dim() != native.dim() or tensor.shape[axis] >= native.shape[axis]:
        return tensor
    if any(tensor.shape[i] != native.shape[i] for i in range(native.dim()) if i != axis):
        return tensor
    start = max(0, num_seen - tensor.shape[axis])
    whole = native.to(tensor.dtype, copy=True)
    whole.narrow(axis, start, tensor.shape[axis]).copy_(tensor)
    return whole


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
