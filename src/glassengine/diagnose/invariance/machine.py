"""Measures which operations of this machine give a row of a batch other bits than alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassengine import environment
from glassengine.diagnose.invariance.ways import largest_difference, same_bits

_BATCHES = (2, 3, 4, 5, 8, 16, 17)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Operation = Callable[[Tensor], Tensor]


def described() -> dict[str, Any]:
    """Return what bitwise equality depends on."""
    return {
        "cpu": environment.cpu_name(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "mkl": torch.backends.mkl.is_available(),  # type: ignore[no-untyped-call]
        "onednn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        **{name: version for name, version in environment.versions().items() if version},
    }


def _operations(dtype: torch.dtype) -> Iterator[tuple[str, tuple[int, ...], Operation]]:
    """Yield (name, shape of a row, function of rows)."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        found: Tensor = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        return found.to(dtype)

    wide, square, keys = drawn(1024, 256), drawn(256, 256), drawn(4, 160, 64)
    weight, kernel = drawn(256).abs() + 1, drawn(16, 8, 3)
    yield "linear, 1 token a row", (256,), lambda x: F.linear(x, wide)
    yield "linear, 5 tokens a row", (5, 256), lambda x: F.linear(x, wide)
    yield "linear, 64 tokens a row", (64, 256), lambda x: F.linear(x, wide)
    yield "matmul, 1 token a row", (256,), lambda x: x @ square
    yield "matmul of a batch (bmm)", (5, 256), lambda x: torch.bmm(x, square.expand(len(x), -1, -1))
    yield "sdpa, causal, 33 tokens", (4, 33, 64), lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)
    yield "sdpa, one query, 160 keys", (4, 1, 64), lambda x: _decoded(x, keys)
    yield "attention written out, 33 tokens", (4, 33, 64), _written_out
    yield "conv1d", (8, 32), lambda x: F.conv1d(x, kernel, padding=1)
    yield "layer_norm", (5, 256), lambda x: F.layer_norm(x, (256,), weight)
    yield "rms_norm", (5, 256), lambda x: F.rms_norm(x, (256,), weight)
    yield "softmax", (5, 257), lambda x: torch.softmax(x, -1)
    yield "sum, mean", (5, 257), lambda x: x.sum(-1) + x.mean(-1)
    for name, function in (("silu", F.silu), ("gelu", F.gelu), ("rsqrt", _rsqrt)):
        yield f"{name}, 32 elements a row", (32,), function
        yield f"{name}, 91 elements a row", (7, 13), function


def _decoded(x: Tensor, keys: Tensor) -> Tensor:
    own = keys.expand(len(x), -1, -1, -1)
    return F.scaled_dot_product_attention(x, own, own)


def _written_out(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.transpose(-1, -2) * 0.125, -1) @ x


def _rsqrt(x: Tensor) -> Tensor:
    return torch.rsqrt(x.abs() + 0.1)


def batch_table() -> list[dict[str, Any]]:
    """Return, for each operation, dtype and number of threads, in which batches a row has other bits than alone."""
    before = torch.get_num_threads()
    rows = []
    try:
        for threads in sorted({1, before}):
            torch.set_num_threads(threads)
            for dtype in _DTYPES:
                for name, shape, function in _operations(dtype):
                    rows.append({"operation": name, "dtype": str(dtype).removeprefix("torch."), "threads": threads})
                    rows[-1] |= _measured(function, shape, dtype)
    finally:
        torch.set_num_threads(before)
    return rows


def _measured(function: Operation, shape: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn((max(_BATCHES), *shape), generator=generator).to(dtype)
    differs, relative = [], 0.0
    with torch.no_grad():
        for size in _BATCHES:
            whole = function(pool[:size])
            for place in {0, size - 1}:
                alone = function(pool[place : place + 1])[0]
                if not same_bits(alone, whole[place]):
                    differs.append(size)
                    difference = largest_difference(alone, whole[place]) or 0.0
                    relative = max(relative, difference / float(alone.abs().max()))
    return {"differs_at": list(dict.fromkeys(differs)), "relative": relative}
