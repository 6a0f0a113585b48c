"""Stores a tensor's description and bytes, or the reason why it has none."""

from __future__ import annotations

import functools
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from glassengine import blocks
from glassengine.errors import UsageError
from glassengine.recording.layout import layout
from glassengine.recording.layout.description import Description, Facts

_MAX_DESCRIPTIONS = 1 << 14


def describe(site: str, tensor: Tensor, **facts: Unpack[Facts]) -> Description:
    """Return what the records of `tensor` say in every step."""
    _check(site, tensor)
    return Description(site, dtype_name(tensor.dtype), tuple(tensor.shape), **facts)


class Descriptions:
    """The descriptions of tensors that come in every step, so that each is made once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Description] = {}

    def of(self, site: str, tensor: Tensor, **facts: Unpack[Facts]) -> Description:
        """Return what `describe` does, the same object for the same arguments."""
        _check(site, tensor)
        axes = facts.get("axes") or {}
        key = (site, tensor.dtype, tensor.shape, tuple(axes.items()), facts.get("node"), facts.get("sharding"))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MAX_DESCRIPTIONS:
                self._known.clear()
            found = self._known[key] = describe(site, tensor, **facts)
        return found


def _check(site: str, tensor: Tensor) -> None:
    if len(site.encode(errors="surrogatepass")) > layout.MAX_NAME_BYTES:
        got, expected = "a longer name", f"at most {layout.MAX_NAME_BYTES} bytes"
        raise UsageError(f"the tensor {site[:200]!r} cannot be recorded", got=got, expected=expected)
    obstacle = why_not(tensor)
    if obstacle is not None:
        raise UsageError(f"the tensor {site[:200]!r} cannot be recorded", got=obstacle, expected="a dense tensor")


def why_not(tensor: Tensor) -> str | None:
    """Return why the values of `tensor` cannot be recorded, or None."""
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.layout != torch.strided:
        return f"layout {tensor.layout}"
    if tensor.is_meta:
        return "a meta tensor, which has no values"
    if dtype_name(tensor.dtype) not in layout.STORED:
        return f"dtype {tensor.dtype}"
    if has_no_memory(tensor):
        return "a tensor without memory: its storage was freed, or never made"
    return None


def has_no_memory(tensor: Tensor) -> bool:
    """Return whether elements of `tensor` are nowhere: to read them would end the process."""
    return tensor.data_ptr() == 0 and tensor.numel() > 0


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of `tensor` in row-major order; a copy only where the tensor is elsewhere or not contiguous."""
    flat = blocks.flat(tensor.to("cpu").resolve_conj().resolve_neg())
    # Not `flat.numpy()`: afterwards torch refuses to resize the storage, and the model may want to.
    return memoryview(np.from_dlpack(flat.view(torch.uint8)))  # type: ignore[arg-type]  # a buffer at run time


def identity(tensor: Tensor) -> tuple[object, ...]:
    """Return what tells two live tensors of one step apart; equal for views that have the same bytes."""
    place = (str(tensor.device), tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return place if tensor.is_contiguous() else (*place, tensor.dtype, tensor.shape, tensor.stride())
