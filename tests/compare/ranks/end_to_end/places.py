"""What a process shares with which others, and the collectives in forwards and backwards."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, distributed


@dataclasses.dataclass
class Place:
    """What a process shares with which others."""

    mesh: Any = None
    sequence: bool = False
    mistakes: frozenset[str] = frozenset()
    experts: bool = False
    parallel_branches: bool = False
    dropout: float = 0.0
    fused: bool = False
    zigzag: bool = False
    outside: str = ""

    def of(self, name: str) -> tuple[int, int]:
        """Return the number of this process along a dimension of the mesh, and the size of that."""
        if self.mesh is None or name not in self.mesh.mesh_dim_names:
            return 0, 1
        return self.mesh.get_local_rank(name), self.mesh[name].size()

    def group(self, name: str) -> Any:
        """Return the processes along a dimension."""
        return self.mesh.get_group(name)

    def wrong(self, mistake: str) -> bool:
        """Whether a mistake is planted."""
        return mistake in self.mistakes


class _Function(torch.autograd.Function):
    """A collective and the one of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Any, back: Any) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.back(gradient), None, None


def same(x: Tensor) -> Tensor:
    return x.view_as(x)


def summed(group: Any) -> Any:
    def run(x: Tensor) -> Tensor:
        x = x.clone().contiguous()
        distributed.all_reduce(x, group=group)
        return x

    return run


def gathered(group: Any, dim: int) -> Any:
    def run(x: Tensor) -> Tensor:
        pieces = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces, dim)

    return run


def own(group: Any, dim: int) -> Any:
    return lambda x: x.chunk(distributed.get_world_size(group), dim)[distributed.get_rank(group)].contiguous()


def summed_own(group: Any, dim: int) -> Any:
    return lambda x: own(group, dim)(summed(group)(x))


def apply(x: Tensor, there: Any, back: Any) -> Tensor:
    found: Tensor = _Function.apply(x, there, back)  # type: ignore[no-untyped-call]
    return found
