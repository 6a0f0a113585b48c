"""Measuring two tensors against each other on one core: bytes of both sides per second, beside what reading takes.

Every round measures each kind of pair once and reads one pair through, so that what else the machine does falls on
all of them alike. Processor time is given beside: where more runs than there are cores, the rest of the elapsed time
was spent waiting for one. Each kind of pair is measured by the plain path and by the one that numba compiles.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks.report import keep, surroundings
from glassengine.blocks import paths
from glassengine.blocks.arithmetic import Arithmetic
from glassengine.numerics.distances import measure
from glassengine.numerics.tolerance import tolerance

ELEMENTS = 1 << 25
ROUNDS = 9
READING = "reading both sides (torch.sum)"


def main() -> None:
    torch.set_num_threads(1)
    pairs = _pairs()
    first = pairs["float32, rounding"]
    contestants: dict[str, tuple[int, Callable[[], object]]] = {
        READING: (first[0].nbytes * 2, lambda: [side.sum() for side in first])
    }
    for name, (b, c) in pairs.items():
        contestants[name] = b.nbytes + c.nbytes, _on_path(Arithmetic, measuring(b, c))
        compiled = _on_path(paths.compiled_kind(), measuring(b, c))
        contestants[f"{name}, compiled"] = b.nbytes + c.nbytes, compiled
    growth = _peak_growth(contestants["float32, rounding"][1])
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for round_index in range(1 + ROUNDS):  # the first round warms up
        for name, (num_bytes, run) in contestants.items():
            start, busy = time.perf_counter(), time.process_time()
            run()
            if round_index:
                speeds[name].append(
                    (num_bytes / (time.perf_counter() - start), num_bytes / (time.process_time() - busy))
                )
    medians = {name: tuple(map(statistics.median, zip(*values, strict=True))) for name, values in speeds.items()}
    keep("measure", _text(medians, growth))


def _pairs() -> dict[str, tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    b, noise = torch.randn(ELEMENTS, generator=g), torch.randn(ELEMENTS, generator=g)
    c = b * (1 + 2e-7 * noise)
    half = b[: ELEMENTS // 2]
    mask = torch.where(half > 0, 0.0, -math.inf)
    pairs = {
        "float32, rounding": (b, c),
        "float32, bitwise equal": (b, b.clone()),
        "float32, nothing within tolerance": (b, noise),
        "float32, half of it zeros": (b.relu(), c.relu()),
        "float32, half of it -inf": (mask, mask.clone()),
        "float32 and bfloat16": (b, b.bfloat16()),
        "float32, squares out of range": (half * 1e30, c[: ELEMENTS // 2] * 1e30),
        "float64, rounding": (half.double(), half.double() * (1 + 1e-15)),
        "int64, some differ": ((half * 100).long(), (c[: ELEMENTS // 2] * 100).long()),
    }
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        rounded = b.to(dtype)
        name = str(dtype).removeprefix("torch.")
        pairs[f"{name}, rounding"] = rounded, (rounded * (1 + unit * noise.clamp(-2, 2))).to(dtype)
        pairs[f"{name}, some beyond tolerance"] = rounded, (rounded * (1 + 2 * unit * noise)).to(dtype)
    return pairs


def _on_path(kind: type[Arithmetic], run: Callable[[], object]) -> Callable[[], object]:
    def on_path() -> None:
        with mock.patch.object(paths, "compiled_kind", lambda: kind):
            run()

    return on_path


def measuring(b: Tensor, c: Tensor) -> Callable[[], object]:
    allowed = tolerance(*(str(side.dtype).removeprefix("torch.") for side in (b, c)))
    return lambda: measure(b, c, rtol=allowed.rtol, atol=allowed.atol)


def _peak_growth(run: Callable[[], object]) -> int | None:
    """Return by how many bytes the memory of the process grows at most while `run` runs; None where Linux is not."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    reset.write_text("5")  # forgets the peak so far

    def resident(key: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024

    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def _text(speeds: dict[str, tuple[float, ...]], growth: int | None) -> str:
    lines = [
        f"Measure: all figures of {ELEMENTS >> 20} Mi elements and their counterparts, one core",
        f"{ROUNDS} interleaved rounds, medians; bytes of both sides",
        surroundings(),
        "",
        f"{'':44s} {'GB/s':>8s} {'of reading':>10s} {'GB per s of processor':>22s}",
    ]
    for name, (speed, busy) in speeds.items():
        lines.append(f"{name:44s} {speed / 1e9:8.1f} {speed / speeds[READING][0]:10.0%} {busy / 1e9:22.1f}")
    if growth is not None:
        lines += ["", f"memory beside the tensors, at most: {growth / 2**20:.1f} MiB (float32, rounding)"]
    return "\n".join(lines)
