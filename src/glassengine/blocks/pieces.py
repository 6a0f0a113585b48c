"""Tensors cut into aligned flat pieces in row-major order, and streams of such pieces in float64."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

# 64 Ki elements in float32 are 256 KiB: a pair of them and what is computed from it stay in or near an L2 cache. Half
# of it costs a tenth of the speed in calls; twice as much gains little where float32 will do and loses more elsewhere.
BLOCK_ELEMENTS = 1 << 16

Stream = Callable[[], Iterable[Tensor]]
"""Opens a fresh pass over the real float64 pieces of one tensor."""


def blocks(*tensors: Tensor, device: str | torch.device = "cpu") -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield `(start, pieces)`: flat pieces of at most `BLOCK_ELEMENTS` elements, row-major, on `device`.

    Args:
        tensors: One or more tensors of one common shape; any strides. Only a piece is ever copied.
        device: Where the pieces are wanted.

    Raises:
        ValueError: The shapes differ.
    """
    shape = tensors[0].shape
    for other in tensors[1:]:
        if other.shape != shape:
            raise ValueError(f"shapes differ: {list(shape)} and {list(other.shape)}")
    tensors = tuple(map(resolved, tensors))
    if all(tensor.is_contiguous() for tensor in tensors):
        parts = [flat(tensor) for tensor in tensors]
        if 0 < parts[0].numel() <= BLOCK_ELEMENTS:
            yield 0, tuple(part.to(device) for part in parts)
            return
        batch_elements = BLOCK_ELEMENTS << 8
        for start in range(0, parts[0].numel(), batch_elements):
            # Cut in batches: splitting is several times faster than slicing.
            batch = (torch.split(part[start : start + batch_elements], BLOCK_ELEMENTS) for part in parts)
            for index, cut in enumerate(zip(*batch, strict=True)):
                yield start + index * BLOCK_ELEMENTS, tuple(piece.to(device) for piece in cut)
        return
    if tensors[0].numel() == 0:
        return
    # Cut along the first dimension whose remainder fits, so that every piece is one row-major range.
    dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= BLOCK_ELEMENTS)
    inner = math.prod(shape[dim + 1 :])
    rows = max(1, BLOCK_ELEMENTS // inner)
    start = 0
    for outer in itertools.product(*(range(size) for size in shape[:dim])):
        for first in range(0, shape[dim], rows):
            count = min(rows, shape[dim] - first)
            yield (
                start,
                tuple(flat(tensor[outer].narrow(0, first, count).to(device)) for tensor in tensors),
            )
            start += count * inner


def resolved(tensor: Tensor) -> Tensor:
    """Return the values of `tensor` as they lie in memory, without its gradient."""
    return tensor.detach().resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor.detach()


def flat(tensor: Tensor) -> Tensor:
    """Return `tensor` as one dimension of stride 1; a copy only where it is not contiguous."""
    # Set explicitly: a single element passes for contiguous with any stride, and then cannot be viewed as bytes.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,))


def widen(piece: Tensor) -> Tensor:
    """Return `piece` as float64, or as complex128 when it is complex."""
    return piece.to(torch.complex128 if piece.is_complex() else torch.float64)


def real_stream(tensor: Tensor, *, device: str | torch.device = "cpu") -> Stream:
    """Return the stream of `tensor` in float64; complex elements are represented by their magnitude."""

    def stream() -> Iterator[Tensor]:
        for _, (piece,) in blocks(tensor, device=device):
            wide = widen(piece)
            yield wide.abs() if wide.is_complex() else wide

    return stream


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: the pieces are too small to share.

    On a loaded machine the threads of one short operation wait for each other hundreds of times longer than it takes.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def agree(b: Tensor, c: Tensor) -> Tensor:
    """Return where b and c are the same value, NaN and NaN included; a complex number in both of its parts."""
    if b.is_complex() or c.is_complex():
        wide = torch.promote_types(b.dtype, c.dtype)
        b, c = (torch.view_as_real(side.to(wide).resolve_conj()) for side in (b, c))
        return agree(b, c).all(-1)
    return (b == c) | (b.isnan() & c.isnan())


def subtract(b: Tensor, c: Tensor, wide_b: Tensor, wide_c: Tensor) -> Tensor:
    """Return c - b in float64; 64-bit integers are subtracted in halves, or neighbors above 2**53 look equal."""
    kinds = {b.dtype, c.dtype}
    if not kinds & {torch.int64, torch.uint64} or any(kind.is_complex for kind in kinds):
        return wide_c - wide_b
    (high_b, low_b), (high_c, low_c) = _halves(b), _halves(c)
    exact = (high_c - high_b).to(torch.float64) * 2.0**32 + (low_c - low_b).to(torch.float64)
    if any(kind.is_floating_point for kind in kinds):
        # Fractions would be lost in halves of unlike sign, and numbers with fractions are small.
        return torch.where(wide_b.abs() < 2.0**53, wide_c - wide_b, exact)
    return exact


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two numbers, exact in float64, of which the first times 2**32 and the second add up to each element."""
    if x.is_floating_point():
        wide = x.to(torch.float64)
        high = (wide / 2.0**32).trunc()
        return high, wide - high * 2.0**32
    if x.dtype == torch.uint64:
        bits = x.view(torch.int64)
        return (bits >> 32) & 0xFFFFFFFF, bits & 0xFFFFFFFF
    bits = x.to(torch.int64)
    return bits >> 32, bits & 0xFFFFFFFF
