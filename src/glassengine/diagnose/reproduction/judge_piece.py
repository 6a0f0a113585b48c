"""Whether what a back-end made of a piece is explained by rounding: the piece in float64, in its own dtypes, and twice
with Monte-Carlo rounding, as the reference of a check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Interpreter, Node
from torch.utils import _pytree as pytree

from glassengine.judge.graphs.cut import Piece
from glassengine.judge.graphs.flat import with_values
from glassengine.judge.replay.reference import NUM_NOISE_RUNS
from glassengine.numerics.float64 import retarget, target_of
from glassengine.numerics.judgement import WRONG, Judgement, smallest_precise, unit_roundoff
from glassengine.numerics.noise import noisy, rounds
from glassengine.numerics.verdict import Reference


@dataclass(frozen=True)
class Expected:
    """What a piece should give.

    Attributes:
        references: Of its outputs, in order.
        exact: Its float64 results, in order.
        allowed: How far from them rounding may lead, the same for every element of an output.
    """

    references: Sequence[Reference]
    exact: Sequence[torch.Tensor]
    allowed: Sequence[torch.Tensor]

    def judge(self, results: Sequence[Any]) -> list[Judgement]:
        """Judge what a back-end made of the piece, output by output."""
        return [reference.judge(value) for reference, value in zip(self.references, results, strict=True)]


@torch.no_grad()
def expected_of(piece: Piece) -> Expected:
    """Run a piece in every way that is legal and return what that allows."""
    with_values(piece.module, piece.arguments())
    exact, native = piece.exact(), piece.run()
    runs = [_Noisy(piece, torch.Generator().manual_seed(seed)).results() for seed in range(NUM_NOISE_RUNS)]
    references, allowed = [], []
    for index, value in enumerate(native):
        references.append(Reference(exact[index], value, [run[index] for run in runs], dtype=_float(value), valid=None))
        size = 0.0
        if value.is_floating_point():
            samples = [value.double(), *(run[index] for run in runs)]
            spread = max(_rms(sample - exact[index]) for sample in samples)
            size = WRONG * max(spread, unit_roundoff(value.dtype) * _rms(exact[index]))
        allowed.append(torch.full(value.shape, size, dtype=torch.float64))
    return Expected(references, exact, allowed)


class _Noisy(Interpreter):
    """The piece in float64 with the rounding of each op."""

    def __init__(self, piece: Piece, generator: torch.Generator) -> None:
        super().__init__(piece.module)
        self._piece = piece
        self._generator = generator

    def results(self) -> tuple[torch.Tensor, ...]:
        doubles = [retarget(tensor) for tensor in self._piece.arguments()]
        found: tuple[torch.Tensor, ...] = self.run(*doubles)
        return found

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = pytree.tree_map(retarget, self.fetch_args_kwargs_from_env(n))
        value = target_of(n)(*args, **kwargs)
        if not rounds(n):
            return value
        kept = pytree.tree_leaves(n.meta["val"])
        return pytree.tree_map(partial(self._rounded, n, args, kwargs, kept[0]), value)

    def _rounded(self, node: Node, args: Any, kwargs: Mapping[str, Any], kept: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        u, tiny = unit_roundoff(_float(kept)), smallest_precise(_float(kept))
        return noisy(node, value, args, dict(kwargs), u, self._generator, tiny=tiny)


def _float(value: torch.Tensor) -> torch.dtype:
    return value.dtype if value.is_floating_point() else torch.float32


def _rms(tensor: torch.Tensor) -> float:
    finite = torch.nan_to_num(tensor, 0.0, 0.0, 0.0)
    return float(finite.square().mean().sqrt()) if tensor.numel() else 0.0
