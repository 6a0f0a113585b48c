"""Pending graphs of lazy tensors, and operations that were not recorded."""

from __future__ import annotations

from dataclasses import dataclass

from glassengine.results.base import Result


@dataclass(frozen=True)
class PendingTensor(Result):
    """A lazy tensor that has no value yet.

    Attributes:
        dtype: Without "torch.".
        shape: Its sizes.
        op: The operation that makes it.
        where: "file:line" of the user's code that called it; "" where it is unknown.
    """

    dtype: str
    shape: tuple[int, ...]
    op: str
    where: str

    def __str__(self) -> str:
        made = f"{self.dtype}{list(self.shape)} of {self.op}"
        return f"{made} at {self.where}" if self.where else made


@dataclass(frozen=True)
class Fallback(Result):
    """An operation on lazy tensors that was not recorded, but computed at once.

    Attributes:
        op: As PyTorch/XLA counts it: "aten::nonzero".
        reason: Why it was not recorded.
        where: "file:line" of the user's code that called it; "" where it is unknown.
        count: How often.
    """

    op: str
    reason: str
    where: str
    count: int

    def __str__(self) -> str:
        times = f" {self.count} times" if self.count > 1 else ""
        return f"{self.op} ran on ATen{times}: {self.reason}" + (f", at {self.where}" if self.where else "")
