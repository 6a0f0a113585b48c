"""What a watch over a training run costs: steps of a transformer of hidden 512, watched and not, in turns.

4 layers (attention of 8 heads, feed-forward of 2048), a batch of 8 x 128, float32, AdamW, gradients clipped. Each
contestant has a model of its own with the same weights, and every round runs one step of each, so that what else the
machine does falls on all of them alike; ratios are the median of the rounds' ratios to the plain step of the round.
*processor* counts the time of all threads of the process, which other programs on the machine change least; *wall* is
what a user waits. The watch holds the values of the last step and of 2 before it for its triggers.
"""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import glassengine as glass
from benchmarks.report import keep, surroundings

HIDDEN, LAYERS, BATCH, LENGTH = 512, 4, 8, 128
ROUNDS, WARM_UP = 15, 6
CONTESTANTS: dict[str, dict[str, Any] | None] = {
    "plain step": None,
    "watch: inputs and results": {},
    "watch: and gradients": {"gradients": True},
    "watch: and optimizer (parameters, state)": {"gradients": True, "optimizer": True},
}


def main(arguments: Sequence[str] = ()) -> None:
    threads = [int(text) for text in arguments] or [1, 2]
    rows = [line for count in threads for line in _table(count)]
    busy = f"load average of the last five minutes: {os.getloadavg()[1]:.1f}, of which up to {max(threads)} are ours"
    keep("watch", "\n".join([*(__doc__ or "").strip().splitlines(), "", surroundings(), busy, "", *rows]))


def _table(threads: int) -> Iterator[str]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layers = [
        torch.nn.TransformerEncoderLayer(HIDDEN, 8, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(LAYERS)
    ]
    model = torch.nn.Sequential(*layers)
    batch = torch.randn(BATCH, LENGTH, HIDDEN)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory, contextlib.ExitStack() as stack:
        steps = {
            name: _contestant(copy.deepcopy(model), batch, options, Path(directory) / str(number), stack)
            for number, (name, options) in enumerate(CONTESTANTS.items())
        }
        names = list(CONTESTANTS)
        for number in range(WARM_UP + ROUNDS):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                begin = time.perf_counter(), time.process_time()
                steps[name]()
                if number >= WARM_UP:
                    times[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    yield f"{threads} thread{'s' * (threads > 1)}, {ROUNDS} rounds"
    plain = times["plain step"]
    for name, found in times.items():
        ratios = [
            statistics.median(one[kind] / base[kind] for one, base in zip(found, plain, strict=True)) for kind in (0, 1)
        ]
        wall, processor = (statistics.median(one[kind] for one in found) * 1e3 for kind in (0, 1))
        yield (f"  {name:42} wall {wall:8.1f} ms {ratios[0]:6.3f}   processor {processor:8.1f} ms {ratios[1]:6.3f}")


def _contestant(
    model: torch.nn.Module,
    batch: torch.Tensor,
    options: dict[str, Any] | None,
    directory: Path,
    stack: contextlib.ExitStack,
) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    if options is not None:
        told = {**options, "optimizer": optimizer if options.get("optimizer") else None}
        stack.enter_context(glass.record(model, directory, watch=True, **told))

    def step() -> None:
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
