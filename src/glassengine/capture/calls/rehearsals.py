"""Forwards that compute nothing: a framework runs them to learn shapes. They do not count as steps."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import Tensor, nn

from glassengine.capture.calls.interruption import is_interruption
from glassengine.capture.calls.leaves import tensors_in

_PIPELINING = "torch.distributed.pipelining"


def is_rehearsal(root: nn.Module, args: Any, kwargs: Any) -> bool:
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
