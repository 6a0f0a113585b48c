"""Decides which module calls count as steps (entry points, shape inference, recomputation), and reads their token ids.

Entry points are modules that are called by themselves: ahead of a forward (an encoder), or with what came out of one. A
serving engine computes logits after the model's own forward, of some rows of its result. Whether a module does that is
decided once, by what it gets. Calls within a backward have activations back that were not kept (checkpointing): values
are recorded once, by the first call; where that ran without a graph, only the second one sees gradients.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.capture.calls.names import KnownModule, OpenCalls
from glassengine.capture.calls.observed_call import is_interruption
from glassengine.capture.calls.tensor_trees import is_computed_later, tensors_in, values_now

_MAX_ROWS = 64
"""Rows that are looked up in the result of a forward."""


class EntryPoints:
    """Tells which modules continue a forward that has ended."""

    def __init__(self, known: Collection[KnownModule]) -> None:
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


def callable_ones(known: Iterable[KnownModule]) -> list[KnownModule]:
    """Return the modules that can be called; containers cannot."""
    return [one for one in known if _can_be_called(one.module)]


Watch = Callable[[Tensor, str, OpenCalls], None]


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

    def before(self, known: KnownModule, forward: OpenCalls | None, args: Any, kwargs: Any) -> None:
        """Note that a call begins again, which `forward` made first."""
        self.num_calls[known.paths[0]] += 1
        self._look(known, forward, ":in", (args, kwargs))

    def after(self, known: KnownModule, forward: OpenCalls | None, result: Any) -> None:
        """Note its result."""
        self._look(known, forward, ":out", (result,))

    def _look(self, known: KnownModule, forward: OpenCalls | None, port: str, trees: tuple[Any, ...]) -> None:
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


_PIPELINING = "torch.distributed.pipelining"


def is_shape_inference_call(root: nn.Module, args: Any, kwargs: Any) -> bool:
    """Return whether a call of `root`, or of a part of it, is made for the shapes of its results alone.

    Such calls get tensors without values while the model has values, or uninitialized memory: the stages of a
    pipeline of torch tell each other shapes that way, ahead of the first microbatch.
    """
    try:
        given = [tensor for tree in (args, kwargs) for _, tensor in tensors_in("", tree)]
    except Exception as error:
        if is_interruption(error):
            raise
        return False
    if given and all(_has_no_values(tensor) for tensor in given):
        return not any(_has_no_values(parameter) for parameter in root.parameters())
    return _PIPELINING in sys.modules and _infers_shapes(sys._getframe(1))


def _has_no_values(tensor: Tensor) -> bool:
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"


def _infers_shapes(frame: FrameType | None) -> bool:
    while frame is not None:
        if "inference" in frame.f_code.co_name and frame.f_globals.get("__name__", "").startswith(_PIPELINING):
            return True
        frame = frame.f_back
    return False


def first_argument(root: nn.Module) -> str | None:
    """Return the name of the first argument of a model's forward, where it has one."""
    try:
        return next(iter(inspect.signature(root.forward).parameters), None)
    except (TypeError, ValueError):
        return None


def token_ids(args: Any, kwargs: Any, first: str | None) -> list[list[int]]:
    """Return what each row of the batch was given, without padding; nothing where the model reads no tokens.

    Serving engines pass the tokens of all rows concatenated: only a single row is then known.
    """
    ids = kwargs.get("input_ids")
    if ids is None and args and first == "input_ids":
        ids = args[0]
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        return []
    if is_computed_later(ids):
        ids = values_now(ids, "the token ids of a recording")
    if type(ids) is not Tensor:
        return []
    if ids.dim() == 1 and _is_one_row(ids, kwargs.get("positions", args[1] if len(args) > 1 else None)):
        return [ids.tolist()]
    if ids.dim() != 2:
        return []
    rows: list[list[int]] = ids.tolist()
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= ids.shape[1] > 0:
        seen = mask[:, -ids.shape[1] :].tolist()
        rows = [[token for token, valid in zip(*pair, strict=True) if valid] for pair in zip(rows, seen, strict=True)]
    return rows


def _is_one_row(ids: Tensor, positions: Any) -> bool:
    """Whether the positions of `ids` follow one another."""
    if not isinstance(positions, Tensor) or positions.shape != ids.shape or positions.is_floating_point():
        return False
    return bool((torch.diff(positions) == 1).all())
