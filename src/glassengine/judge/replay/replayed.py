"""What a replay runs instead of a node, and what it finds."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from glassengine.numerics.exemptions import Masks
from glassengine.numerics.float64 import target_of
from glassengine.numerics.judgement import Judgement
from glassengine.program.representation.outputs import is_view

Valid = Callable[[Node, torch.Tensor], torch.Tensor | None]
"""Which elements of the value of a node count; None where all do."""


@dataclass(frozen=True)
class Replayed:
    """What a replay found: the judgement, and P, the op's float64 result on the candidate's inputs.

    `exempt` are the elements that it left out, by reason, where they are not those of the accumulated reference.
    """

    judgement: Judgement
    predicted: torch.Tensor
    exempt: Masks | None = None


def called(node: Node) -> tuple[Node, Callable[..., Any]]:
    """Return the op to replay for `node`, and what computes its value; one of several results is taken from its op."""
    source = node.args[0] if node.args else None
    if node.target is operator.getitem and isinstance(source, Node) and not is_view(source):
        target, part = target_of(source), part_of(node, source)
        return source, lambda *args, **kwargs: part(target(*args, **kwargs))
    return node, target_of(node)


def part_of(node: Node, op: Node) -> Callable[[Any], Any]:
    """Return what takes the value of `node` from the result of its op."""
    return (lambda result: result) if node is op else operator.itemgetter(node.args[1])
