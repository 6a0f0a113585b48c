"""The changes that must not matter: two ways to run the same rows, and which parts of their tensors belong together.

`batch_table` measures which operations of this machine give a row of a batch other bits than alone.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from glassengine import environment
from glassengine.ops.traits import named
from glassengine.results.without_tensors import What

ALL = "all"
BATCHES = (2, 3, 4, 5, 8, 16, 17)
"""Numbers of rows: other kernels run for few rows, and remainders of blocks are split otherwise."""
SPARE = max(BATCHES)
"""Rows of the pool from here on are in no batch, so that they can take the place of others."""
Context = Callable[[], AbstractContextManager[Any]]
_WIDTH = 8
"""Numbers of a row from which on no two rows are the same by chance."""
_MOST_ROWS = 1 << 16
"""Rows that are searched for by their values."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Operation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Way:
    """How rows are run.

    Attributes:
        rows: Which rows of the pool, in order.
        cuts: Lengths of the calls of a sequence; of what is called once, one.
        left: Padding before each row.
        right: Padding after each row.
        filler: Token of the padding.
        earlier: What runs before, on the same module: nothing, other rows, or another row with the first call in
            common, whose cache is cut and used.
        is_next: Run on the module that the first side has used, not on a copy.
        seeded: Set the seeds of random numbers before.
        threads: Of torch; None for as many as there are.
        attention: "math" writes attention out; "eager" is the model's own code of that name.
        compiler: Back-end of torch.compile; None leaves the model alone.
        garbage: Value of memory that nothing was written to; None for what lies there.
        context: Setting that is tried.
    """

    rows: tuple[int, ...] = (0,)
    cuts: tuple[int, ...] = (1,)
    left: int = 0
    right: int = 0
    filler: int = 0
    earlier: Literal["", "rows", "prefix"] = ""
    is_next: bool = False
    seeded: bool = True
    threads: int | None = None
    attention: str | None = None
    compiler: str | None = None
    garbage: float | None = None
    context: Context = contextlib.nullcontext

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Put what concerns all of torch into effect."""
        before = torch.get_num_threads()
        state = torch.get_rng_state(), random.getstate()
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_num_threads, before)
            if self.threads is not None:
                torch.set_num_threads(self.threads)
            if self.seeded:
                seed()
                stack.callback(torch.set_rng_state, state[0])
                stack.callback(random.setstate, state[1])
            if self.attention == "math":
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(self.context())
            if self.garbage is not None:
                stack.enter_context(Garbage(self.garbage))
            yield


def seed() -> None:
    """Set the seeds that models draw from."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


class Garbage(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills memory that was asked for without values."""

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if named(func._schema.name.partition("::")[2]).is_unwritten and result.is_floating_point():
            result.fill_(self._value)
        return result


@dataclass(frozen=True)
class InvarianceWay:
    """Two ways that must give the same, in words."""

    words: str
    first: Way
    second: Way

    def under(self, context: Context) -> InvarianceWay:
        """Return the variant with a setting on both sides."""
        return self.changed(context=context)

    def changed(self, **both: Any) -> InvarianceWay:
        """Return the variant with both ways changed."""
        return replace(self, first=replace(self.first, **both), second=replace(self.second, **both))

    @property
    def views(self) -> list[tuple[int, PartMapping]]:
        """For each call of the second way the call of the first one, and how their tensors are aligned."""
        a, b = self.first, self.second
        found, start = [], 0
        ends = [sum(a.cuts[: i + 1]) for i in range(len(a.cuts))]
        for size in b.cuts:
            call = next(i for i, end in enumerate(ends) if start < end)
            begin = ends[call] - a.cuts[call]
            # Padding stands in the first call alone.
            pads = [(way.left + way.right if where == 0 else 0) for way, where in ((a, begin), (b, start))]
            lefts = [(way.left if where == 0 else 0) for way, where in ((a, begin), (b, start))]
            tokens = PositionSpan((a.cuts[call] + pads[0], size + pads[1]), (start - begin + lefts[0], lefts[1]), size)
            ends_at = ends[call] + a.left + a.right, start + size + b.left + b.right
            keys = PositionSpan(ends_at, (a.left, b.left), start + size)
            found.append((call, PartMapping((len(a.rows), len(b.rows)), self._rows(), _needed(tokens), _needed(keys))))
            start += size
        return found

    def _rows(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """Return the places of the rows that both ways have."""
        a, b = self.first.rows, self.second.rows
        if a == b:
            return None
        shared = [row for row in a if row in b]
        return [a.index(row) for row in shared], [b.index(row) for row in shared]


def _needed(span: PositionSpan) -> PositionSpan | None:
    return None if span.sizes[0] == span.sizes[1] and span.starts == (0, 0) else span


def variants_of(
    what: What, *, length: int, decodes: bool, one_token: bool, prime: int, least: int
) -> Iterator[InvarianceWay]:
    """Yield the variants of a change.

    Args:
        what: The change.
        length: Tokens of a row; 1 of what is called once.
        decodes: Whether it generates: the last two tokens are steps of their own.
        one_token: Whether every call after the first has one token.
        prime: A number of rows that no weight of the model has as a size.
        least: Fewest rows of a batch: "alone" is a row with others that no other batch has.
    """
    whole = (length - 2, 1, 1) if decodes else (length,)
    one = Way(rows=(0, *range(SPARE, SPARE + least - 1)), cuts=whole)
    if what == "run":
        yield InvarianceWay("the same call again", replace(one, seeded=False), replace(one, seeded=False, is_next=True))
        for value in (3.0, 1e4):
            words = "the same call with other values in memory that nothing was written to"
            yield InvarianceWay(words, replace(one, garbage=-value), replace(one, garbage=value))
        for _ in range(2):
            again = replace(one, rows=tuple(range(8)), seeded=False)
            yield InvarianceWay("a batch of 8, again", again, replace(again, is_next=True))
    elif what == "batch":
        for number in BATCHES:
            for place in dict.fromkeys((0, number // 2, number - 1)) if number >= least else ():
                others = (*range(1, place + 1), 0, *range(place + 1, number))
                yield InvarianceWay(f"alone, and at place {place} of {number}", one, replace(one, rows=others))
    elif what == "order":
        rows = tuple(range(prime))
        for words, order in (("reversed", rows[::-1]), ("rotated", (*rows[3:], *rows[:3]))):
            yield InvarianceWay(f"{prime} rows, {words}", replace(one, rows=rows), replace(one, rows=tuple(order)))
    elif what == "padding":
        if not decodes:
            whole = (length,)
        plain = Way(cuts=whole)
        for number in (1, 7, 24):
            yield InvarianceWay(f"{number} tokens of padding on the left", plain, replace(plain, left=number))
            right = Way(cuts=(length,))
            yield InvarianceWay(f"{number} tokens of padding on the right", right, replace(right, right=number))
    elif what == "length":
        yield from _lengths(length, one_token)
    elif what == "cache":
        yield InvarianceWay("from scratch, and after other requests", one, replace(one, earlier="rows"))
        if decodes and not one_token:
            parts = Way(cuts=(length // 2, length - length // 2))
            words = "its own cache, and the prefix of another request"
            yield InvarianceWay(words, parts, replace(parts, earlier="prefix"))
    elif what == "threads":
        for number in (1, 8):
            single = replace(one, rows=tuple(range(number)), threads=1)
            yield InvarianceWay(f"1 thread and 2, {number} rows", single, replace(single, threads=2))
    elif what == "compile":
        own = Way(cuts=(length,))
        yield InvarianceWay("as written, and compiled", own, replace(own, compiler="inductor"))
    elif what == "attention":
        for name, words in (("math", "attention written out by torch"), ("eager", "the model's own attention")):
            yield InvarianceWay(f"as it is, and {words}", one, replace(one, attention=name))


def _lengths(length: int, one_token: bool) -> Iterator[InvarianceWay]:
    singles = Way(cuts=(1,) * length)
    whole = Way(cuts=(length,))
    for size in (length // 2, 5, 16):
        if size < length and not one_token:
            cuts = (size,) * (length // size) + ((length % size,) if length % size else ())
            yield InvarianceWay(f"whole, and in chunks of {size}", whole, replace(whole, cuts=cuts))
    yield InvarianceWay("whole, and token by token", whole, singles)


@dataclass(frozen=True)
class PositionSpan:
    """A range of positions on both sides.

    Attributes:
        sizes: Of the dimension, on both sides.
        starts: Where the range begins.
        length: Of the range.
    """

    sizes: tuple[int, int]
    starts: tuple[int, int]
    length: int

    def of(self, tensor: Tensor, axis: int, side: int) -> Tensor:
        """Return the range of one side."""
        return tensor.narrow(axis, self.starts[side], self.length)


@dataclass(frozen=True)
class PartMapping:
    """Which part of the tensors of one call belongs to which part of those of another.

    Attributes:
        batch: Numbers of rows, on both sides.
        rows: Rows that belong together; None where all do, in order.
        tokens: Positions of the call that belong together.
        keys: Positions of the sequence up to the end of the call, likewise.
    """

    batch: tuple[int, int] = (1, 1)
    rows: tuple[Sequence[int], Sequence[int]] | None = None
    tokens: PositionSpan | None = None
    keys: PositionSpan | None = None

    def aligned(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the parts that belong together, of one shape; None where shapes do not say which."""
        if a.dim() != b.dim():
            return None
        axis = 0
        while axis < a.dim():
            sizes = a.shape[axis], b.shape[axis]
            if self.rows is not None and sizes == self.batch:
                a, b = (one.index_select(axis, torch.tensor(rows)) for one, rows in zip((a, b), self.rows, strict=True))
            elif span := next(
                (one for one in (self.tokens, self.keys) if one is not None and one.sizes == sizes), None
            ):
                a, b = span.of(a, axis, 0), span.of(b, axis, 1)
            elif axis == 0 and self._is_folded(sizes):
                a, b = (one.reshape(rows, -1, *one.shape[1:]) for one, rows in zip((a, b), self.batch, strict=True))
                continue
            elif sizes[0] != sizes[1]:
                return None
            axis += 1
        return a, b

    def _is_folded(self, sizes: tuple[int, int]) -> bool:
        """Whether rows and positions, or rows and heads, are one dimension."""
        if self.batch == (1, 1) or any(not rows or size % rows for size, rows in zip(sizes, self.batch, strict=True)):
            return False
        parts = sizes[0] // self.batch[0], sizes[1] // self.batch[1]
        is_span = any(one is not None and one.sizes == parts for one in (self.tokens, self.keys))
        return parts != (1, 1) and (is_span or (parts[0] == parts[1] and self.rows is not None))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape hold the same bits; zeros of either sign are the same, and NaN is NaN."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def same_under(view: PartMapping, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Whether all results of a call that belong together hold the same bits."""
    pairs = [view.aligned(x, after[name]) for name, x in before.items()]
    return all(pair is None or same_bits(*pair) for pair in pairs)


def largest_difference(a: Tensor, b: Tensor) -> float | None:
    """Return the largest difference of two tensors; None where they cannot be subtracted."""
    if a.shape != b.shape or not a.numel():
        return None
    if a.is_complex() or b.is_complex():
        return float((a - b).abs().max())
    return float((a.double() - b.double()).abs().max())


def matching_rows(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return which rows of two matrices hold the same bits, where every row of the smaller one is in the other.

    Experts get the rows of a batch in an order of their own.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1] or a.shape[1] < _WIDTH or a.dtype is not b.dtype:
        return None
    if not 0 < len(a) <= _MOST_ROWS or not 0 < len(b) <= _MOST_ROWS:
        return None
    known = {row.tobytes(): i for i, row in enumerate(_rows(b))}
    found = [known.get(row.tobytes()) for row in _rows(a)]
    pairs = [(i, j) for i, j in enumerate(found) if j is not None]
    if len(pairs) < min(len(a), len(b)):
        return None
    return torch.tensor([i for i, _ in pairs]), torch.tensor([j for _, j in pairs])


def _rows(tensor: Tensor) -> Sequence[memoryview]:
    return list(tensor.detach().contiguous().view(torch.uint8).numpy().reshape(len(tensor), -1))


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
    for name, function in (("silu", F.silu), ("gelu", F.gelu), ("rsqrt", lambda x: torch.rsqrt(x.abs() + 0.1))):
        yield f"{name}, 32 elements a row", (32,), function
        yield f"{name}, 91 elements a row", (7, 13), function


def _decoded(x: Tensor, keys: Tensor) -> Tensor:
    own = keys.expand(len(x), -1, -1, -1)
    return F.scaled_dot_product_attention(x, own, own)


def _written_out(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.transpose(-1, -2) * 0.125, -1) @ x


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
    pool = torch.randn((max(BATCHES), *shape), generator=generator).to(dtype)
    differs, relative = [], 0.0
    with torch.no_grad():
        for size in BATCHES:
            whole = function(pool[:size])
            for place in {0, size - 1}:
                alone = function(pool[place : place + 1])[0]
                if not same_bits(alone, whole[place]):
                    differs.append(size)
                    difference = largest_difference(alone, whole[place]) or 0.0
                    relative = max(relative, difference / float(alone.abs().max()))
    return {"differs_at": list(dict.fromkeys(differs)), "relative": relative}
