"""Tensors whose values are not computed yet, and what they promise.

A front end that records operations and runs them later gives its tensors the two methods of `ComputedLater`. What looks
at tensors of a running model then need not make it run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeGuard

from torch import Tensor


class Promise(Protocol):
    """The values that a tensor has now, some day."""

    @property
    def data(self) -> Tensor | None:
        """A plain tensor, which is never written to; None while it is not computed."""


class ComputedLater(Protocol):
    """A tensor whose values may not be computed yet."""

    def promised(self, site: str, told: Callable[[], None]) -> Promise:
        """Return the promise of its values under the name `site`; `told` is called when promises were kept."""

    def keep_promises(self, why: str) -> None:
        """Compute all promised values, now."""


def is_computed_later(tensor: Tensor) -> TypeGuard[ComputedLater]:
    """Return whether a tensor can promise its values."""
    return type(tensor) is not Tensor and hasattr(type(tensor), "promised")


def values_now(tensor: ComputedLater, why: str) -> Tensor | None:
    """Return the values of such a tensor; all promised values is computed for it where need be."""
    promise = tensor.promised("", _nothing)
    if promise.data is None:
        tensor.keep_promises(why)
    return promise.data


def _nothing() -> None:
    pass
