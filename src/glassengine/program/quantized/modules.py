"""Quantized weights of a module in memory, whichever library quantized it: what they stand for, and their steps.

    a tensor of a class of its own    torchao, quanto: `dequantize()`, codes and scales as its inner tensors
    a quantized tensor of torch       per tensor or per channel
    a module with packed parameters   torch.ao.nn.quantized: `weight()` and `bias()` are methods

The codes are those that values and scales say, so that a packed layout need not be known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from glassengine.errors import CorruptError
from glassengine.program.quantized.grid import expand, float8_grid, integer_grid

_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
_NONE = ("none", "None")


@dataclass(frozen=True)
class QuantizedModule:
    """What a quantized module computes with.

    Attributes:
        weights: Name in the unquantized module -> value, float32; biases of packed modules too.
        steps: Name of each quantized weight -> step of each element, as `Grid.step`.
        rounds_inputs: Whether inputs of products are quantized too, as far as is known.
        method: Classes of the quantized tensors and modules, for people.
    """

    weights: Mapping[str, Tensor]
    steps: Mapping[str, Tensor]
    rounds_inputs: bool
    method: str


@torch.no_grad()
def quantized_module(module: nn.Module) -> QuantizedModule | None:
    """Return the quantized weights of a module; None where it has none whose grid is known."""
    weights: dict[str, Tensor] = {}
    steps: dict[str, Tensor] = {}
    rounds_inputs, kinds = False, dict[str, None]()
    for path, part in module.named_modules():
        dot = f"{path}." if path else ""
        for name, leaf in _tensors(part):
            found = _read(leaf)
            if found is None:
                continue
            weights[dot + name], steps[dot + name] = found
            kinds[type(part if _is_packed(part) else leaf).__qualname__] = None
            rounds_inputs |= _is_packed(part) or _rounds_inputs(leaf)
        if _is_packed(part) and isinstance(bias := part.bias(), Tensor):
            weights[f"{dot}bias"] = bias.detach().float()
    return QuantizedModule(weights, steps, rounds_inputs, ", ".join(kinds)) if steps else None


def _is_packed(part: nn.Module) -> bool:
    return hasattr(part, "_packed_params") and callable(getattr(part, "weight", None)) and callable(part.bias)


def _tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from part.named_parameters(recurse=False)
    yield from part.named_buffers(recurse=False)
    if _is_packed(part):
        weight = part.weight()  # type: ignore[operator]
        if isinstance(weight, Tensor):
            yield "weight", weight


def _read(leaf: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return what a quantized tensor stands for, and its step; None where it is none, or of an unknown grid."""
    if leaf.is_quantized:
        value = leaf.dequantize().float()
        if leaf.qscheme() in _PER_CHANNEL:
            shape = [1] * leaf.dim()
            shape[leaf.q_per_channel_axis()] = -1
            return value, _step(value, leaf.q_per_channel_scales().float().reshape(shape))
        return value, _step(value, torch.tensor(leaf.q_scale()))
    if not is_traceable_wrapper_subclass(leaf) or not callable(getattr(leaf, "dequantize", None)):
        return None
    inner = dict(_inner(leaf))
    scale = next((t for name, t in inner.items() if "scale" in name and t.is_floating_point()), None)
    try:
        value = leaf.dequantize().float()
        if scale is None or value.shape != leaf.shape:
            return None
        scale = expand(scale.float(), tuple(leaf.shape))
        codes = next((t for t in inner.values() if t.is_floating_point() and t.itemsize == 1), None)
        if codes is not None:
            return value, float8_grid(codes, scale).step()
        return value, _step(value, scale)
    except (CorruptError, RuntimeError, NotImplementedError, AttributeError, ValueError):
        return None


def _step(value: Tensor, scale: Tensor) -> Tensor:
    codes = (value / scale).round()
    return integer_grid(codes, scale.expand(value.shape), None, int(codes.min()), int(codes.max())).step()


def _inner(leaf: Any) -> Iterator[tuple[str, Tensor]]:
    names, _ = leaf.__tensor_flatten__()
    for name in names:
        tensor = getattr(leaf, name)
        if is_traceable_wrapper_subclass(tensor):
            yield from _inner(tensor)
        else:
            yield name, tensor


def _rounds_inputs(leaf: Tensor) -> bool:
    """Whether what a tensor says of itself names a type of activations."""
    if not is_traceable_wrapper_subclass(leaf):
        return False
    context: Any = leaf.__tensor_flatten__()[1]
    says = context.items() if isinstance(context, Mapping) else ()
    return any("act" in str(key) and value is not None and str(value) not in _NONE for key, value in says)
