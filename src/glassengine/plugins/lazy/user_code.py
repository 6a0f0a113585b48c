"""Finds the running line of user code, and the names of parameters and buffers by its variables."""

from __future__ import annotations

import os
import sys
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from glassengine.plugins.lazy.graphs import Pending
from glassengine.plugins.lazy.tensor import LazyTensor
from glassengine.plugins.lazy.values import LazyMemory

NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<frozen")
"""Where files begin that are no code of the user."""


def user_line() -> str:
    """Return "file:line" of the innermost code outside of torch and of this package; "" where there is none."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if not frame.f_code.co_filename.startswith(NOT_USERS):
            return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
    return ""


def names_of(made_by: Pending) -> dict[int, tuple[str, str]]:
    """Return the names of parameters and buffers among the leaves, as the modules of the user's code call them."""
    wanted = {id(value) for value in made_by.leaves}
    names: dict[int, tuple[str, str]] = {}
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename.startswith(NOT_USERS):
            continue
        for variable, module in _variables(frame):
            if not isinstance(module, torch.nn.Module):
                continue
            for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
                for name, tensor in tensors:
                    if type(tensor) is LazyTensor and type(tensor._lazy) is LazyMemory:
                        value = tensor._lazy.value
                        if id(value) in wanted:
                            names.setdefault(id(value), (f"{variable}.{name}", kind))
    return names


def _variables(frame: FrameType) -> list[tuple[str, Any]]:
    """Return the variables that code sees, by name.

    Before Python 3.13 a function that runs keeps the copy of its variables that is made here, and with it tensors that
    it deletes later. The copy is emptied, unless the function itself asked for `locals()`.
    """
    if frame.f_code.co_name == "<module>":
        return list({**frame.f_globals, **frame.f_locals}.items())
    places = frame.f_locals
    found = list(places.items())
    own_references = 3  # of the frame, of this function, of the call below
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
        if sys.getrefcount(places) <= own_references:
            places.clear()
    return found
