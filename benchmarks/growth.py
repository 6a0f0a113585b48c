"""How the time of hot paths grows: processor seconds at sizes over three decades, and the exponents fitted to them.

A path whose cost is its start has an exponent near 0; 1 is a cost for each unit. What is above 1.05 over the last
decade, where the start counts least, is marked. One thread; the least of three runs, as others use the machine.

Tensors of a step are above because the garbage collector looks at all objects again while their number grows: without
it the exponents are 1.02 and 1.07. Tokens of a generation are above where the old rows of the cache, which are compared
with those of the step before, take longer than the rest: the disk gets the new rows only.
"""

from __future__ import annotations

import itertools
import math
import os
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.reading import many_steps, written
from benchmarks.report import keep, surroundings
from glassengine.capture.record import record
from glassengine.compare.compare import compare
from glassengine.recording.reader import Recording
from glassengine.recording.write.writer import RecordingWriter

MOST = 1.05
COUNTS = (10, 100, 1_000, 10_000)
STEPS = (1_000, 10_000, 100_000, 1_000_000)
TOKENS = (3, 30, 300, 3_000)
RANKS = (1, 10, 100, 1_000)
ELEMENTS = (100_000, 1_000_000, 10_000_000, 100_000_000)

Prepared = Callable[[Path, int], Callable[[], Any]]


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    paths: dict[str, tuple[tuple[int, ...], Prepared]] = {
        "write tensors of a step": (COUNTS, lambda at, n: lambda: written(fresh(at), 1, n, 0.0)),
        "write steps of two tensors": (COUNTS, lambda at, n: lambda: written(fresh(at), n, 2, 0.0)),
        "record tokens of a generation": (TOKENS, lambda at, n: generated(fresh(at), n)),
        "open steps": (STEPS, lambda at, n: opened(many_steps(at / "x", n))),
        "compare tensors of a step": (COUNTS, lambda at, n: compared(*(written(at / c, 1, n, by) for c, by in SIDES))),
        "compare steps of two tensors": (
            COUNTS,
            lambda at, n: compared(*(written(at / c, n, 2, by) for c, by in SIDES)),
        ),
        "compare ranks of two tensors": (RANKS, lambda at, n: compared(*(of_ranks(at / c, n, by) for c, by in SIDES))),
        "compare elements of a tensor": (ELEMENTS, lambda at, n: compared(*(large(at / c, n, by) for c, by in SIDES))),
    }
    rows = [f"{'':32}{'sizes':>22}{'seconds':>36}{'fitted':>9}{'last':>7}"]
    for name, (sizes, prepare) in paths.items():
        seconds = [measured(prepare, size) for size in sizes]
        fitted = exponent(sizes, seconds)
        last = exponent(sizes[-2:], seconds[-2:])
        mark = "  above" if last > MOST else ""
        shown = "".join(f"{one:9.3f}" for one in seconds)
        rows.append(f"{name:32}{f'{sizes[0]:,} to {sizes[-1]:,}':>22}{shown}{fitted:9.2f}{last:7.2f}{mark}")
    keep("growth", "\n".join([*(__doc__ or "").strip().splitlines(), "", surroundings(), load(), "", *rows]))


SIDES = (("x", 0.0), ("y", 1e-6))


def exponent(sizes: tuple[int, ...], seconds: list[float]) -> float:
    """Return the slope of the line that fits the logarithms best."""
    x, y = (np.log(np.asarray(values, dtype=float)) for values in (sizes, seconds))
    return float(np.polyfit(x, y, 1)[0])


def measured(prepare: Prepared, size: int) -> float:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        run, best = prepare(Path(folder), size), math.inf
        for _ in range(3):
            busy = time.process_time()
            run()
            best = min(best, time.process_time() - busy)
    return best


def load() -> str:
    return f"load average {os.getloadavg()[0]:.1f}"


_numbers = itertools.count()


def fresh(at: Path) -> Path:
    return at / str(next(_numbers))


def opened(path: Path) -> Callable[[], Any]:
    return lambda: Recording.open(path)


def compared(x: Path, y: Path) -> Callable[[], Any]:
    return lambda: compare(x, y, jobs=1)


class GrowingLayer:
    """A layer of a cache as transformers has them."""

    keys: torch.Tensor


class Attention(torch.nn.Module):
    """Is given a cache that has one more row in each step, 4 kB of float32."""

    layer_idx = 0

    def forward(self, past_key_values: types.SimpleNamespace) -> None:
        """Do nothing: what a model computes is not measured here."""


def generated(path: Path, tokens: int) -> Callable[[], Any]:
    whole, layer = torch.randn(1, 8, tokens, 128), GrowingLayer()
    model, cache = torch.nn.Sequential(Attention()), types.SimpleNamespace(layers=[layer])

    def run() -> None:
        with record(model, path, overwrite=True):
            for number in range(tokens):
                layer.keys = whole[:, :, : number + 1]
                model(cache)

    return run


def of_ranks(path: Path, ranks: int, by: float) -> Path:
    for rank in range(ranks):
        with RecordingWriter(path / f"rank{rank}", metadata={}) as writer:
            for number in range(2):
                writer.write(f"m.{number}", 0, torch.full((4,), 1.0 + rank) * (1 + by))
            writer.commit(0)
    return path


def large(path: Path, elements: int, by: float) -> Path:
    values = torch.randn(elements // 100, 100, generator=torch.Generator().manual_seed(0))
    with RecordingWriter(path, metadata={}) as writer:
        writer.write("m", 0, values * (1 + by))
        writer.commit(0)
    return path
