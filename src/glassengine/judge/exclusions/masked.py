"""Masks and padding: numbers that hide a key, rows that see no key, positions that hold no token.

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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from glassengine.judge.cases import StepInputs
from glassengine.judge.exclusions.exactness import Exactness
from glassengine.judge.exclusions.perturbation import NATIVE, Source, Values
from glassengine.numerics.mask_values import HIDDEN, is_mask
from glassengine.ops.row import Rounding, argument
from glassengine.ops.traits import traits_of
from glassengine.program.representation.program import Program
from glassengine.results import ExemptionReason
from glassengine.sites import Site

_ON_THE_WAY = ("stays", "moves")


class HiddenValues:
    """Follows such numbers through the steps of one graph, in graph order.

    Args:
        graph: It.
        exactness: Says which tensors are exact, of the same steps.
    """

    def __init__(self, graph: Graph, exactness: Exactness) -> None:
        self._exactness = exactness
        self._leading, self._only_softmax = read_by_softmax(graph)
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


def read_by_softmax(graph: Graph) -> tuple[set[Node], set[Node]]:
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
