"""Rounds the activations of a quantized product: ggml and ONNX Runtime round them to 8 bit integers.

    F16, BF16   each number to the nearest
    Q8_0        blocks of 32: d = max |x| / 127, integers x / d, d itself rounded to float16
    Q8_1        the same, with the sum of each block rounded to float16
    Q8_K        blocks of 256: the number of largest size becomes -127, the scale is float32
    INT8_32     blocks of 32 (or 16, 64, 128, 256): d = max |x| / 127 in float32, as MatMulNBits of ONNX Runtime reads

So a product is as exact as one in float32, on what it really reads: for Q4_K, float64 sums of dequantized weights and
raw activations are off by 1.5e-2, of activations read so by 2e-7 (relative rms, all products of a small Llama).

Implementations round x / d in float32, by x * (127 / max) or by x / (max / 127): what lies within `_NEAR` of a half may
go either way, and the product is given room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_NEAR = 2.0**-12
"""Of a step; the two ways to divide differ by some 2^-17 of it."""
_U_HALF = 2.0**-11


@dataclass(frozen=True)
class Read:
    """What a product reads of a tensor.

    Attributes:
        values: Of the dtype of the tensor.
        slack: How far each may be another; 0 for most.
    """

    values: Tensor
    slack: Tensor


def _as_dtype(dtype: torch.dtype) -> Callable[[Tensor], Read]:
    def read(x: Tensor) -> Read:
        return Read(x.to(dtype).to(x.dtype), torch.zeros((), dtype=x.dtype).expand(x.shape))

    return read


def _integers(scaled: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is nearest, half to even, and the step where the other neighbor is as near."""
    near = ((scaled - scaled.floor()) - 0.5).abs() < _NEAR
    return scaled.round(), torch.where(near, step.abs(), torch.zeros_like(step))


def _q8_0(x: Tensor) -> Read:
    blocks = x.float().reshape(*x.shape[:-1], -1, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127.0 / largest, torch.zeros_like(largest))
    step = (largest / 127.0).to(torch.float16).float()
    integers, slack = _integers(blocks * inverse, step.expand(blocks.shape))
    return Read((integers * step).reshape(x.shape).to(x.dtype), slack.reshape(x.shape).to(x.dtype))


def _int8(block: int) -> Callable[[Tensor], Read]:
    def read(x: Tensor) -> Read:
        width = x.shape[-1]
        padded = torch.nn.functional.pad(x.float(), (0, -width % block))
        blocks = padded.reshape(*x.shape[:-1], -1, block)
        largest = blocks.abs().amax(-1, keepdim=True)
        inverse = torch.where(largest > 0, 127.0 / largest, torch.zeros_like(largest))
        step = largest / 127.0
        integers, slack = _integers(blocks * inverse, step.expand(blocks.shape))
        whole = (integers.double() * step.double()).reshape(padded.shape)[..., :width]
        return Read(whole.to(x.dtype), slack.reshape(padded.shape)[..., :width].to(x.dtype))

    return read


_BLOCKS = (16, 32, 64, 128, 256)


def _q8_1(x: Tensor) -> Read:
    found = _q8_0(x)
    sums = found.values.reshape(*x.shape[:-1], -1, 32).sum(-1, keepdim=True).abs() * _U_HALF
    more = sums.expand(*x.shape[:-1], -1, 32).reshape(x.shape)
    return Read(found.values, found.slack + more)


def _q8_k(x: Tensor) -> Read:
    blocks = x.float().reshape(*x.shape[:-1], -1, 256)
    place = blocks.abs().argmax(-1, keepdim=True)
    largest = blocks.gather(-1, place)
    inverse = torch.where(largest != 0, -127.0 / largest, torch.zeros_like(largest))
    step = torch.where(inverse != 0, 1.0 / inverse, torch.zeros_like(inverse))
    integers, slack = _integers(blocks * inverse, step.expand(blocks.shape))
    return Read((integers.clamp(max=127) * step).reshape(x.shape).to(x.dtype), slack.reshape(x.shape).to(x.dtype))


READERS: Mapping[str, Callable[[Tensor], Read]] = {
    "F16": _as_dtype(torch.float16),
    "BF16": _as_dtype(torch.bfloat16),
    "Q8_0": _q8_0,
    "Q8_1": _q8_1,
    "Q8_K": _q8_k,
    **{f"INT8_{block}": _int8(block) for block in _BLOCKS},
}
"""Type of the activations, as the engine calls it -> what a product reads of them."""

ROUNDOFF: Mapping[str, float] = {
    "F16": 2.0**-11,
    "BF16": 2.0**-8,
    "Q8_0": 2.0**-6,
    "Q8_1": 2.0**-6,
    "Q8_K": 2.0**-6,
    **{f"INT8_{block}": 2.0**-6 for block in _BLOCKS},
}
"""How far a number may be off by reading, of the size of those that are summed with it: what adds up over depth."""
