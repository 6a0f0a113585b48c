"""What an engine computes more coarsely than float32, on purpose and op by op: noisy lanes do the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from glassengine.numerics.ops import Accumulation
from glassengine.numerics.product_noise import uniform
from glassengine.numerics.quantization.activations import Read

_FACTORS = 3
"""Arguments of an op that are multiplied or added; a mask comes after them."""


@dataclass(frozen=True)
class Arithmetic:
    """Node -> what is coarse there; what is not named is computed in float32.

    Attributes:
        operands: What an op reads of its activations.
        summed: How a product is summed.
        rounded: Dtype of a table from which results are read.
        words: What that is, as the engine's makers call it.
    """

    operands: Mapping[str, Callable[[torch.Tensor], Read]] = field(default_factory=dict)
    summed: Mapping[str, Accumulation] = field(default_factory=dict)
    rounded: Mapping[str, torch.dtype] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    def joined(self, other: Arithmetic) -> Arithmetic:
        """Return what is coarse in one of two; of a node that both have, the other's counts."""
        return Arithmetic(
            {**self.operands, **other.operands},
            {**self.summed, **other.summed},
            {**self.rounded, **other.rounded},
            tuple(dict.fromkeys([*self.words, *other.words])),
        )

    def read(
        self, node: Node, args: tuple[Any, ...], generator: torch.Generator, weights: set[Node]
    ) -> tuple[Any, ...]:
        """Return arguments that are as far from `args` as what the engine reads, with signs of their own in each lane.

        Args:
            node: The op.
            args: In float64.
            generator: Of the lane.
            weights: Nodes that depend on weights alone.
        """
        reader = self.operands.get(node.name)
        if reader is None:
            return args

        def one(source: Any, value: Any) -> Any:
            if not isinstance(source, Node) or source in weights:
                return value
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            apart = (reader(value.float()).values.double() - value).abs()
            return value + torch.copysign(apart, uniform(value.shape, generator).double())

        read = [one(source, value) for source, value in zip(node.args[:_FACTORS], args, strict=False)]
        return (*read, *args[_FACTORS:])


PLAIN = Arithmetic()
