"""Where a mistake can be planted: ops found by what the graph says, so in any model that has them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from glassengine.program.representation.naming import op_name
from tests.corpus.edits import Edit, Op

aten = torch.ops.aten


def is_float(node: Any) -> bool:
    """Whether `node` is a node with one floating tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def num_dims(node: Op) -> int:
    """Return the number of dimensions of a tensor node."""
    return int(node.meta["val"].dim())


def inputs_of(node: Op) -> list[Op]:
    """Return the nodes among the positional arguments."""
    return [arg for arg in node.args if isinstance(arg, Node)]


def literal_of(node: Op) -> float | None:
    """Return the first positional argument that is a float."""
    found = [arg for arg in node.args if isinstance(arg, float)]
    return found[0] if found else None


def comes_from(node: Op, *ops: str) -> bool:
    """Whether an input of `node` is one of `ops`."""
    return any(op_name(source) in ops for source in inputs_of(node))


def feeds(node: Op, *ops: str) -> bool:
    """Whether a user of `node` is one of `ops`."""
    return any(op_name(user) in ops for user in node.users)


def attention(e: Edit) -> Op:
    """One attention."""
    return e.one(e.find("scaled_dot_product_attention"))


def product(e: Edit) -> Op:
    """One product with a weight."""
    return e.one(e.find("linear", "addmm", "mm", where=lambda node: is_float(node)))


def residual(e: Edit) -> Op:
    """One sum of two hidden states of the same shape, neither of them small."""

    def is_residual(node: Op) -> bool:
        sources = inputs_of(node)
        same = (
            len(sources) == 2
            and is_float(node)
            and all(is_float(s) and s.meta["val"].shape == node.meta["val"].shape for s in sources)
        )
        return same and num_dims(node) == 3 and not comes_from(node, "mul")

    return e.one(e.find("add", where=is_residual))


def is_epsilon(node: Op) -> bool:
    """Whether `node` adds the small number under a root."""
    literal = literal_of(node)
    return literal is not None and 0 < literal < 1e-3 and is_float(node)
