"""Modules of a model that are called by themselves: ahead of a forward (an encoder), or with what came out of one.

A serving engine computes logits after the model's own forward, of some rows of its result. Whether a module does that
is decided once, by what it gets: rows that came out of the forward that has just ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from glassengine.capture.calls.interruption import is_interruption
from glassengine.capture.calls.leaves import tensors_in
from glassengine.capture.calls.names import Known

_MAX_ROWS = 64
"""Rows that are looked up in the result of a forward."""


class Continuations:
    """Tells which modules continue a forward that has ended.

    Args:
        known: The modules of the model.
    """

    def __init__(self, known: Collection[Known]) -> None:
        self._silent = [one for one in known if not one.is_root and _can_be_called(one.module)]
        self._continues: dict[nn.Module, bool] = {}
        self._results: dict[int, list[weakref.ref[Tensor]]] = {}

    def may_follow(self) -> bool:
        """Return whether something may still be called that belongs to a forward which ends now."""
        if any(self._continues.values()):
            return True
        # One that is called in the forward itself has no reason to be called again.
        self._silent = [one for one in self._silent if not one.is_called and one.module not in self._continues]
        return bool(self._silent)

    def note_result(self, step: int, result: Any) -> None:
        """Remember what came out of the forward that is `step`; it is not kept alive."""
        try:
            self._results = {step: [weakref.ref(tensor) for _, tensor in tensors_in("", result)]}
        except Exception as error:
            if is_interruption(error):
                raise
            self._results = {}

    def continues(self, module: nn.Module, step: int | None, given: Any) -> bool:
        """Return whether a call of `module` on `given` belongs to `step`, which was the last one in this thread."""
        if module not in self._continues:
            results = [] if step is None else [ref() for ref in self._results.get(step, ())]
            try:
                self._continues[module] = any(
                    _holds_rows(result, tensor)
                    for _, tensor in tensors_in("", given)
                    for result in results
                    if result is not None
                )
            except Exception as error:
                if is_interruption(error):
                    raise
                self._continues[module] = False  # of tensors that cannot be looked into
        return step is not None and self._continues[module]


def _holds_rows(result: Tensor, given: Tensor) -> bool:
    """Return whether every row of `given` is one of `result`."""
    if given is result:
        return True
    if not given.dim() or result.shape[-1:] != given.shape[-1:] or result.dtype != given.dtype or given.shape[-1] < 2:
        return False
    rows = given.detach().reshape(-1, given.shape[-1])[:_MAX_ROWS]
    there = result.detach().reshape(-1, result.shape[-1])
    return 0 < len(rows) <= len(there) and all(bool((there == row).all(-1).any()) for row in rows)


def _can_be_called(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is not nn.Module.forward


def callable_ones(known: Iterable[Known]) -> list[Known]:
    """Return the modules that can be called; containers cannot."""
    return [one for one in known if _can_be_called(one.module)]
