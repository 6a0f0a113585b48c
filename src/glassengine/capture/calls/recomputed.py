"""Calls that a backward makes again, to have activations back that were not kept (activation checkpointing).

Values are recorded once, by the first call. Where that ran without a graph, only the second one sees gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from glassengine.capture.calls.interruption import is_interruption
from glassengine.capture.calls.leaves import tensors_in
from glassengine.capture.calls.names import Forward, Known

Watch = Callable[[Tensor, str, Forward], None]


class Recomputed:
    """Counts calls inside of backwards, and watches the gradients that only they see.

    Args:
        watch: Delivers the gradient of a tensor as a site of a step; None where gradients are not recorded.

    Attributes:
        num_calls: Path -> how many calls ran again.
    """

    def __init__(self, watch: Watch | None) -> None:
        self.num_calls: Counter[str] = Counter()
        self._watch = watch

    def before(self, known: Known, forward: Forward | None, args: Any, kwargs: Any) -> None:
        """Note that a call begins again, which `forward` made first."""
        self.num_calls[known.paths[0]] += 1
        self._look(known, forward, ":in", (args, kwargs))

    def after(self, known: Known, forward: Forward | None, result: Any) -> None:
        """Note its result."""
        self._look(known, forward, ":out", (result,))

    def _look(self, known: Known, forward: Forward | None, port: str, trees: tuple[Any, ...]) -> None:
        # Which of several calls runs again is unknown.
        path = known.paths[0]
        if self._watch is None or forward is None or len(known.paths) > 1 or forward.num_calls.get(path) != 1:
            return
        side = ":grad_in" if port == ":in" else ":grad_out"
        try:
            for tree in trees:
                for name, tensor in tensors_in(port, tree):
                    site = f"{path}{side}{name[len(port) :]}"
                    if tensor.requires_grad and site not in forward.watched_sites:
                        self._watch(tensor, site, forward)
        except Exception as error:
            if is_interruption(error):
                raise
