"""Numbers that hide a key: a softmax or a maximum makes nothing of them, so their size does not matter.

One implementation writes the least number of the dtype, another writes minus infinity or -1e9, a third adds two of
them; the softmax makes 0 of each. Such a number is not excluded: it is compared by whether it hides (see
`numerics.mask_values`). It is recognized by where it comes from: from numbers of that size that the program writes
itself or is given, with nothing but selecting, adding and scaling between. A score that merely is that small is no
mask, and what anything but a softmax reads is compared as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from glassengine.judge.exclusions.exactness import Exactness
from glassengine.numerics.mask_values import HIDDEN
from glassengine.ops.arguments import argument
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of

_ON_THE_WAY = ("stays", "moves")


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
