"""What running through an executable costs: one small operation, beside plain torch.compile and plain eager code.

The graph is `x + 1` on eight numbers, so that nothing but the way into it is measured. Medians of interleaved rounds.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import glassengine as glass
from benchmarks.report import keep, surroundings
from glassengine.executable.counters import registry
from glassengine.frontends.eager_debug import eager_debug

CALLS = 1000
ROUNDS = 15
LIMIT_ON_US, LIMIT_OFF_US = 30, 10


@contextlib.contextmanager
def metrics(enabled: bool) -> Iterator[None]:
    before, registry.enabled = registry.enabled, enabled
    try:
        yield
    finally:
        registry.enabled = before


def compiled(backend: str, options: dict[str, str] | None = None) -> Callable[[torch.Tensor], Any]:
    torch._dynamo.reset()

    def add(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    function = torch.compile(add, backend=backend, options=options)
    function(torch.zeros(8))
    return function


def by_operation(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def time_us(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> float:
    """Return microseconds of one call, the mean of a round."""
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        function(x)
    return (time.perf_counter_ns() - start) / CALLS / 1000


def main() -> None:
    os.environ["GLASS_CACHE_DIR"] = tempfile.mkdtemp(prefix="glass-benchmark-")
    x = torch.zeros(8)
    plain, plain_eager = compiled("inductor"), compiled("aot_eager")
    inductor, eager = compiled("glass", {"backend": "inductor"}), compiled("glass", {"backend": "eager"})
    rows: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[], Any], str]] = {
        "eager code": (by_operation, contextlib.nullcontext, ""),
        "eager code, mark_step after it": (
            lambda x: (by_operation(x), glass.compat.mark_step()),
            contextlib.nullcontext,
            "",
        ),
        "eager debug, back-end eager": (by_operation, lambda: eager_debug("eager"), "eager code"),
        "eager debug, back-end inductor": (by_operation, lambda: eager_debug("inductor"), "eager code"),
        "torch.compile inductor": (plain, contextlib.nullcontext, ""),
        "glass inductor, metrics off": (inductor, lambda: metrics(False), "torch.compile inductor"),
        "glass inductor, metrics on": (inductor, lambda: metrics(True), "torch.compile inductor"),
        "torch.compile aot_eager": (plain_eager, contextlib.nullcontext, ""),
        "glass eager, metrics off": (eager, lambda: metrics(False), "torch.compile aot_eager"),
        "glass eager, metrics on": (eager, lambda: metrics(True), "torch.compile aot_eager"),
    }
    times: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(ROUNDS + 1):
        for name, (function, context, _) in rows.items():
            with context():
                taken = time_us(function, x)
            if number:  # the first round warms up
                times[name].append(taken)
    medians = {name: sorted(taken)[len(taken) // 2] for name, taken in times.items()}
    lines = [
        "Microseconds of one execution of a graph of one operation, x + 1 on 8 numbers.",
        f"Medians of {ROUNDS} interleaved rounds of {CALLS} calls; more than the row it stands beside in brackets.",
        "",
    ]
    for name, taken in medians.items():
        beside = rows[name][2]
        more = f"   (+{taken - medians[beside]:.1f} beside {beside})" if beside else ""
        lines.append(f"  {name:<32s}{taken:8.1f}{more}")
    cost_on, cost_off = (
        medians[f"glass inductor, metrics {state}"] - medians["torch.compile inductor"] for state in ("on", "off")
    )
    lines += [
        "",
        f"metrics on: +{cost_on:.1f} us, at most {LIMIT_ON_US}: {'ok' if cost_on <= LIMIT_ON_US else 'too slow'}",
        f"metrics off: +{cost_off:.1f} us, at most {LIMIT_OFF_US}: {'ok' if cost_off <= LIMIT_OFF_US else 'too slow'}",
        "",
        surroundings(),
    ]
    keep("executable", "\n".join(lines))
