"""Differences of torch tensors, in aligned flat pieces of row-major order.

`Totals.add` defines how two tensors differ, in torch and float64. On the CPU most pieces go through `arithmetic`
instead, which returns the same sums of a piece and declines the pieces it is not meant for.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glassengine.blocks.arithmetic import Arithmetic, DifferenceSums, RawDifference
from glassengine.blocks.paths import arithmetic_for

# 64 Ki elements in float32 are 256 KiB: a pair of them and what is computed from it stay in or near an L2 cache. Half
# of it costs a tenth of the speed in calls; twice as much gains little where float32 will do and loses more elsewhere.
BLOCK_ELEMENTS = 1 << 16


def blocks(
    *tensors: Tensor, device: str | torch.device = "cpu", most: int | None = None
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield `(start, pieces)`: flat pieces, row-major, on `device`.

    Args:
        tensors: One or more tensors of one common shape; any strides. Only a piece is ever copied.
        device: Where the pieces are wanted.
        most: Elements of a piece; `BLOCK_ELEMENTS` when None.
    """
    most = most or BLOCK_ELEMENTS
    shape = tensors[0].shape
    for other in tensors[1:]:
        if other.shape != shape:
            raise ValueError(f"shapes differ: {list(shape)} and {list(other.shape)}")
    tensors = tuple(map(resolved, tensors))
    if all(tensor.is_contiguous() for tensor in tensors):
        parts = [flat(tensor) for tensor in tensors]
        if 0 < parts[0].numel() <= most:
            yield 0, tuple(part.to(device) for part in parts)
            return
        batch_elements = most << 8
        for start in range(0, parts[0].numel(), batch_elements):
            # Cut in batches: splitting is several times faster than slicing.
            batch = (torch.split(part[start : start + batch_elements], most) for part in parts)
            for index, cut in enumerate(zip(*batch, strict=True)):
                yield start + index * most, tuple(piece.to(device) for piece in cut)
        return
    if tensors[0].numel() == 0:
        return
    # Cut along the first dimension whose remainder fits, so that every piece is one row-major range.
    dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= most)
    inner = math.prod(shape[dim + 1 :])
    rows = max(1, most // inner)
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


class Totals(DifferenceSums):
    """Running sums to which pieces are added."""

    def add(self, start: int, b: Tensor, c: Tensor, rtol: float, atol: float) -> None:
        """Add one pair of flat pieces that begins at flat position `start`."""
        wide_b = widen(b)
        if b.dtype == c.dtype and torch.equal(b.view(torch.uint8), c.view(torch.uint8)):
            squares = _dot(wide_b, wide_b)
            if math.isfinite(squares):
                # Bitwise the same and finite: most tensors of most comparisons; nothing else can change.
                self.num_finite += b.numel()
                self.num_nonzero += int(wide_b.count_nonzero())
                self.dot += squares
                self.baseline_squares += squares
                self.candidate_squares += squares
                return
        wide_c = widen(c)
        delta = subtract(b, c, wide_b, wide_c)
        error = delta.abs()
        self.num_finite += b.numel()
        if not math.isfinite(float(error.sum())):
            both = wide_b.isfinite() & wide_c.isfinite()
            mismatched = ~both & ~agree(wide_b, wide_c)
            if count := int(mismatched.count_nonzero()):
                first = int(mismatched.to(torch.uint8).argmax())
                self.add_mismatched(count, start + first, _magnitude(wide_b[first]), _magnitude(wide_c[first]))
            self.num_finite -= int((~both).sum())
            error, wide_b, wide_c = (torch.where(both, x, torch.zeros_like(x)) for x in (error, wide_b, wide_c))
        self._accumulate(start, error, wide_b, wide_c, rtol, atol)

    def _accumulate(self, start: int, error: Tensor, b: Tensor, c: Tensor, rtol: float, atol: float) -> None:
        size = b.abs()
        largest = float(error.amax())
        self.num_different += int(error.count_nonzero())
        self.sum_abs += float(error.sum())
        self.sum_squares += _dot(error, error)
        self.dot += _dot(b, c)
        self.baseline_squares += _dot(b, b)
        self.candidate_squares += _dot(c, c)
        if largest > self.max_abs:
            self.max_abs = largest
            if not self.num_mismatched:
                position = int(error.argmax())
                self.worst = start + position
                self.baseline_at_worst, self.candidate_at_worst = _magnitude(b[position]), _magnitude(c[position])
        if largest > atol:
            self.num_beyond += int((error > size * rtol + atol).count_nonzero())
        nonzero = int(size.count_nonzero())
        self.num_nonzero += nonzero
        relative = error / size if nonzero == size.numel() else error[size != 0] / size[size != 0]
        if nonzero:
            self.sum_rel += float(relative.sum())
            self.max_rel = max(self.max_rel, float(relative.amax()))


def _magnitude(value: Tensor) -> float:
    return float(value.abs() if value.is_complex() else value)


def _dot(x: Tensor, y: Tensor) -> float:
    if x.is_complex() or y.is_complex():
        return float(torch.vdot(x.to(torch.complex128), y.to(torch.complex128)).real)
    return float(torch.dot(x, y))


_SAME_IN_NUMPY = ("float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
_PLAIN = {
    **{getattr(torch, name): name for name in _SAME_IN_NUMPY},
    **dict.fromkeys((torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz), "float32"),
    **dict.fromkeys((torch.float8_e5m2, torch.float8_e5m2fnuz, torch.uint16), "float32"),
    torch.uint32: "float64",
}
"""Dtypes whose pieces `arithmetic` takes -> the dtype of numpy that holds them."""


def difference(
    baseline: Tensor, candidate: Tensor, *, rtol: float, atol: float, device: str | torch.device = "cpu"
) -> RawDifference:
    """Return the raw sums of `candidate - baseline` in one pass.

    Sums are good to 1e-6 relative (of tensors of fewer than 256 elements, or of a dtype that float32 does not hold:
    1e-12), and dot products to that of the product of the norms. Counts, `max_abs` and `worst` are exact.

    Args:
        baseline: Any dtype and strides.
        candidate: The same shape as `baseline`.
        rtol: Relative tolerance of `num_beyond`: elements with `|c - b| > atol + rtol * |b|`.
        atol: Absolute tolerance of `num_beyond`.
        device: Where the arithmetic runs; it must know float64.
    """
    if 0 < baseline.numel() <= BLOCK_ELEMENTS and torch.device(device).type == "cpu":
        same = _same(baseline, candidate)
        if same is not None:
            return same
    return _difference(baseline, candidate, rtol, atol, device)


def _same(b: Tensor, c: Tensor) -> RawDifference | None:
    """Return what `difference` does of two small tensors of one dtype that are equal and finite: most of most sides."""
    if b.dtype != c.dtype or b.shape != c.shape or not (b.is_cpu and c.is_cpu):
        return None
    raw, other = (flat(resolved(side)) for side in (b, c))
    if not torch.equal(raw.view(torch.uint8), other.view(torch.uint8)):
        return None
    values = widen(raw).numpy()
    squares = float(np.vdot(values, values).real)
    if not math.isfinite(squares):
        return None
    count = len(values)
    nothing = {"num_different": 0, "num_mismatched": 0, "num_beyond": 0, "sum_abs": 0.0, "sum_squares": 0.0}
    largest = {"max_abs": 0.0, "sum_rel": 0.0, "max_rel": 0.0, "worst": None}
    return RawDifference(
        num_elements=count,
        num_finite=count,
        num_nonzero=int(np.count_nonzero(values)),
        dot=squares,
        baseline_squares=squares,
        candidate_squares=squares,
        baseline_at_worst=None,
        candidate_at_worst=None,
        **nothing,  # type: ignore[arg-type]
        **largest,  # type: ignore[arg-type]
    )


@one_thread()
def _difference(
    baseline: Tensor, candidate: Tensor, rtol: float, atol: float, device: str | torch.device
) -> RawDifference:
    total: DifferenceSums | None = None
    dtypes = {_PLAIN.get(side.dtype) for side in (baseline, candidate)}
    quick: tuple[Arithmetic, ...] = ()
    if torch.device(device).type == "cpu" and None not in dtypes:
        known = {np.dtype(name) for name in dtypes if name is not None}
        quick = arithmetic_for(known, baseline.numel(), BLOCK_ELEMENTS, rtol, atol)
    with np.errstate(all="ignore"):
        for start, (b, c) in blocks(baseline, candidate, device=device, most=quick[0].capacity if quick else None):
            part, above = None, 0.0 if total is None else total.max_abs
            if quick:
                x, y = (_array(side, quick[0].bfloat16) for side in (b, c))
            for arithmetic in quick:
                if (part := arithmetic.partial(start, x, y, above=above)) is not None:
                    break
            if part is None:
                totals = part = Totals()
                totals.add(start, b, c, rtol, atol)
            if total is None:
                total = part
            else:
                total.merge(part)
    total = total or DifferenceSums()
    return RawDifference(baseline.numel(), **vars(total))


def _array(piece: Tensor, bfloat16: np.dtype[Any] | None) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a piece for `arithmetic`."""
    if piece.dtype == torch.bfloat16 and bfloat16 is not None:
        halves: np.ndarray[Any, np.dtype[Any]] = piece.view(torch.uint16).numpy()
        return halves.view(bfloat16)
    found: np.ndarray[Any, np.dtype[Any]] = piece.to(getattr(torch, _PLAIN[piece.dtype])).numpy()
    return found
