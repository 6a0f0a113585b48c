"""One pass over one or two tensors, in blocks that fit a CPU cache.

Pipeline: `blocks` cuts tensors of one shape into aligned flat pieces in row-major order, `widen` brings a piece to
float64, and `difference`, `moments` and `lower_median` accumulate over the pieces. Invariants: never more than one
piece per tensor exists in float64, whatever the tensor's size or strides; every dtype that can be widened is allowed,
in any combination; empty tensors and non-finite elements have defined results.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# 64 Ki elements in float64 are 512 KiB: two of them and a temporary stay in a typical L2 cache.
BLOCK_ELEMENTS = 1 << 16

# Up to this many float64 values (8 MiB) are gathered to select a median; beyond, histograms narrow the search first.
_SELECT_ELEMENTS = 1 << 20

Stream = Callable[[], Iterable[Tensor]]
"""Opens a fresh pass over the real float64 pieces of one tensor."""


@dataclass(frozen=True)
class Moments:
    """Counts and central moments of a stream; `min`, `max`, `mean` and `m2` are over its `num_finite` elements."""

    num_elements: int
    num_finite: int
    num_nan: int
    min: float
    max: float
    mean: float
    m2: float


@dataclass(frozen=True)
class Difference:
    """Raw sums of candidate - baseline; sums and counts are over elements that are finite on both sides.

    `num_mismatched` counts elements that are not finite and do not agree (NaN agrees with NaN, an infinity with the
    same infinity); they are also in `num_different` and `num_beyond`. `worst` is the flat row-major position of the
    first mismatched element or else of the largest `|c - b|`, and None when nothing differs.
    """

    num_elements: int
    num_finite: int
    num_different: int
    num_mismatched: int
    num_beyond: int
    sum_abs: float
    sum_squares: float
    max_abs: float
    num_nonzero: int
    sum_rel: float
    max_rel: float
    dot: float
    baseline_squares: float
    candidate_squares: float
    worst: int | None
    baseline_at_worst: float | None
    candidate_at_worst: float | None


def blocks(*tensors: Tensor, device: str | torch.device = "cpu") -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield `(start, pieces)`: flat pieces of at most `BLOCK_ELEMENTS` elements, row-major, on `device`.

    Args:
        tensors: One or more tensors of one common shape; any strides. Only a piece is ever copied.
        device: Where the pieces are wanted.
    """
    shape = tensors[0].shape
    tensors = tuple(tensor.detach().resolve_conj().resolve_neg() for tensor in tensors)
    if all(tensor.is_contiguous() for tensor in tensors):
        parts = [flat(tensor) for tensor in tensors]
        for start in range(0, parts[0].numel(), BLOCK_ELEMENTS):
            yield start, tuple(part[start : start + BLOCK_ELEMENTS].to(device) for part in parts)
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


def flat(tensor: Tensor) -> Tensor:
    """Return `tensor` as one dimension of stride 1; a copy only where it is not contiguous."""
    # Set explicitly: a single element passes for contiguous whatever its stride, and then cannot be viewed as bytes.
    return tensor.contiguous().reshape(-1).as_strided((tensor.numel(),), (1,))


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


def error_stream(baseline: Tensor, candidate: Tensor, *, relative: bool, device: str | torch.device = "cpu") -> Stream:
    """Return the stream of `|c - b|`, or of `|c - b| / |b|` over elements with `b != 0`.

    Elements that agree (NaN and NaN, the same infinity) have error 0.
    """

    def stream() -> Iterator[Tensor]:
        for _, (b, c) in blocks(baseline, candidate, device=device):
            wide_b, wide_c = widen(b), widen(c)
            error = _subtract(b, c, wide_b, wide_c).abs()
            error[_agree(wide_b, wide_c)] = 0.0
            if relative:
                nonzero = wide_b != 0
                error = error[nonzero] / wide_b[nonzero].abs()
            yield error

    return stream


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: the pieces are too small to share.

    On a loaded machine the threads of one short operation wait for each other hundreds of times longer than it takes.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@_one_thread()
def moments(stream: Stream) -> Moments:
    """Return counts, extremes, mean and sum of squared deviations of `stream` in one pass."""
    num_elements = num_finite = num_nan = 0
    low, high, mean, m2 = math.inf, -math.inf, 0.0, 0.0
    for block in stream():
        num_elements += block.numel()
        if not math.isfinite(block.sum().item()):
            num_nan += int(block.isnan().sum())
            block = block[block.isfinite()]
        count = block.numel()
        if count == 0:
            continue
        smallest, largest = (float(value) for value in block.aminmax())
        low, high = min(low, smallest), max(high, largest)
        # Chan's update: block moments are merged, so a large common offset does not cancel.
        block_mean = float(block.mean())
        deviation = block - block_mean
        shift = block_mean - mean
        total = num_finite + count
        m2 += float(torch.dot(deviation, deviation)) + shift * shift * num_finite * count / total
        mean += shift * count / total
        num_finite = total
    return Moments(num_elements, num_finite, num_nan, low, high, mean, m2)


@_one_thread()
def lower_median(stream: Stream, num_finite: int) -> float:
    """Return the exact lower median of the finite elements of `stream`, in bounded memory.

    The convention is that of `torch.median`: an element of the tensor, never an average of two.

    Args:
        stream: The pieces; read once when small, up to five times when large.
        num_finite: How many finite elements it has, at least 1.
    """
    rank = (num_finite - 1) // 2
    prefix, shift, count = 0, 64, num_finite
    while count > _SELECT_ELEMENTS and shift > 0:
        # Radix selection: each pass fixes 16 more bits of the answer's key.
        shift -= 16
        histogram = torch.zeros(1 << 16, dtype=torch.int64)
        for _, keys in _keys_below(stream, prefix, shift + 16):
            histogram += torch.bincount((keys >> shift) & 0xFFFF, minlength=1 << 16).cpu()
        cumulative = histogram.cumsum(0)
        digit = int(torch.searchsorted(cumulative, rank, right=True))
        count = int(histogram[digit])
        rank -= int(cumulative[digit]) - count
        prefix = (prefix << 16) | digit
    if shift == 0:
        key = torch.tensor(prefix - (1 << 64) if prefix >= 1 << 63 else prefix, dtype=torch.int64)
        return float(_flip(key ^ torch.iinfo(torch.int64).min).view(torch.float64))
    kept = torch.cat([values for values, _ in _keys_below(stream, prefix, shift)])
    return float(kept.kthvalue(rank + 1).values)


@_one_thread()
def difference(
    baseline: Tensor, candidate: Tensor, *, rtol: float, atol: float, device: str | torch.device = "cpu"
) -> Difference:
    """Return the raw sums of `candidate - baseline` in one pass.

    Args:
        baseline: Any dtype and strides.
        candidate: The same shape as `baseline`.
        rtol: Relative tolerance of `num_beyond`: elements with `|c - b| > atol + rtol * |b|`.
        atol: Absolute tolerance of `num_beyond`.
        device: Where the arithmetic runs; it must know float64.
    """
    total = _Totals()
    for start, (b, c) in blocks(baseline, candidate, device=device):
        total.add(start, b, c, rtol, atol)
    return Difference(baseline.numel(), **vars(total))


class _Totals:
    """The running sums behind `difference`; the attributes are the fields of `Difference` but `num_elements`."""

    def __init__(self) -> None:
        self.num_finite = self.num_different = self.num_mismatched = self.num_beyond = self.num_nonzero = 0
        self.sum_abs = self.sum_squares = self.max_abs = self.sum_rel = self.max_rel = 0.0
        self.dot = self.baseline_squares = self.candidate_squares = 0.0
        self.worst: int | None = None
        self.baseline_at_worst: float | None = None
        self.candidate_at_worst: float | None = None

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
        delta = _subtract(b, c, wide_b, wide_c)
        error = delta.abs()
        self.num_finite += b.numel()
        if not math.isfinite(float(error.sum())):
            both = wide_b.isfinite() & wide_c.isfinite()
            self._mismatch(start, wide_b, wide_c, ~both & ~_agree(wide_b, wide_c))
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
                self._worst_at(start, int(error.argmax()), b, c)
        if largest > atol:
            self.num_beyond += int((error > size * rtol + atol).count_nonzero())
        nonzero = int(size.count_nonzero())
        self.num_nonzero += nonzero
        relative = error / size if nonzero == size.numel() else error[size != 0] / size[size != 0]
        if nonzero:
            self.sum_rel += float(relative.sum())
            self.max_rel = max(self.max_rel, float(relative.amax()))

    def _mismatch(self, start: int, b: Tensor, c: Tensor, mismatched: Tensor) -> None:
        count = int(mismatched.count_nonzero())
        if count and not self.num_mismatched:
            self._worst_at(start, int(mismatched.to(torch.uint8).argmax()), b, c)
        self.num_mismatched += count
        self.num_different += count
        self.num_beyond += count

    def _worst_at(self, start: int, position: int, b: Tensor, c: Tensor) -> None:
        self.worst = start + position
        self.baseline_at_worst, self.candidate_at_worst = (
            float(x[position].abs() if x.is_complex() else x[position]) for x in (b, c)
        )


def _dot(x: Tensor, y: Tensor) -> float:
    if x.is_complex() or y.is_complex():
        return float(torch.vdot(x.to(torch.complex128), y.to(torch.complex128)).real)
    return float(torch.dot(x, y))


def _agree(b: Tensor, c: Tensor) -> Tensor:
    return (b == c) | (b.isnan() & c.isnan())


def _subtract(b: Tensor, c: Tensor, wide_b: Tensor, wide_c: Tensor) -> Tensor:
    """Return c - b in float64; 64-bit integers are subtracted in halves, or neighbours above 2**53 look equal."""
    kinds = {b.dtype, c.dtype}
    if kinds & {torch.int64, torch.uint64} and not any(kind.is_floating_point or kind.is_complex for kind in kinds):
        (high_b, low_b), (high_c, low_c) = _halves(b), _halves(c)
        return (high_c - high_b).to(torch.float64) * 2.0**32 + (low_c - low_b).to(torch.float64)
    return wide_c - wide_b


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.uint64:
        bits = x.view(torch.int64)
        return (bits >> 32) & 0xFFFFFFFF, bits & 0xFFFFFFFF
    bits = x.to(torch.int64)
    return bits >> 32, bits & 0xFFFFFFFF


def _flip(bits: Tensor) -> Tensor:
    """Map float64 bits to int64 keys in the order of the values; its own inverse."""
    return bits ^ ((bits >> 63) & torch.iinfo(torch.int64).max)


def _keys_below(stream: Stream, prefix: int, shift: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the finite values whose key starts with `prefix` (all bits above `shift`), and their keys."""
    for block in stream():
        values = block if math.isfinite(block.sum().item()) else block[block.isfinite()]
        # With the sign bit inverted the keys are unsigned: digits of 16 bits count up from the smallest value.
        keys = _flip(values.view(torch.int64)) ^ torch.iinfo(torch.int64).min
        if shift < 64:
            wanted = ((keys >> shift) & ((1 << (64 - shift)) - 1)) == prefix
            values, keys = values[wanted], keys[wanted]
        yield values, keys
