"""Rows of attention that see no key at all: what comes out of them is nobody's mistake.

A query of padding before which there is nothing but padding has scores that a mask hides, every one. One implementation
gives all keys the same share, another none, a third NaN, and rounding alone picks one of the hidden numbers: the noise
of such rows is as large as the values, and what is measured over them and real rows together would hide any mistake in
the real ones. So neither these rows count nor whatever hangs on them, unless that is all there is of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from glassengine.compare.operation import ATTENTION
from glassengine.compare.undefined_casts import Undefined
from glassengine.diagnose.validity import HIDDEN
from glassengine.program.naming import op_name

_SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})
_MASK = 3
"""Place of the mask among the arguments of attention."""


class HiddenRows(Undefined):
    """What hangs on rows of attention that see no key."""

    reason = "rows of attention that see no key, and what hangs on them"

    def begin(self, node: Node, value: torch.Tensor, value_of: Callable[[Node], Any]) -> torch.Tensor | None:
        """Return the rows that see no key."""
        name = op_name(node)
        if name in _SOFTMAX:
            scores, dim = value_of(node.all_input_nodes[0]), node.args[1] if len(node.args) > 1 else node.kwargs["dim"]
            return _sees_nothing(scores, dim if isinstance(dim, int) else -1)
        if name == ATTENTION:
            mask = node.args[_MASK] if len(node.args) > _MASK else node.kwargs.get("attn_mask")
            return _sees_nothing(value_of(mask), -1) if isinstance(mask, Node) else None
        return None

    def of(self, node: str) -> torch.Tensor | None:
        """Return what does not count, as everywhere; None also where nothing would be left that counts."""
        found = super().of(node)
        return None if found is None or bool(found.all()) else found


def _sees_nothing(scores: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Return which rows along `dim` hold hidden places only; None where no row does."""
    if not scores.dim() or not scores.shape[dim]:
        return None
    seen = scores if scores.dtype is torch.bool else scores > HIDDEN
    hidden: torch.Tensor = ~seen.any(dim, keepdim=True)
    return hidden if bool(hidden.any()) else None
