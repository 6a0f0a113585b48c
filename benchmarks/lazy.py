"""What recording an operation on lazy tensors costs, beside calling it in eager code.

Two programs: additions of eight numbers, and a training step of a Llama of two small layers with AdamW, in which nearly
all time is the way into the operations. "A fake tensor for each" is the plainest tracer by `__torch_dispatch__`, as a
prototype of 130 lines was: it computes each result on fake tensors and keeps what was called. Medians of interleaved
rounds; what runs at the end of a step is not counted with the recording, and is a row of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import glassengine as glass
from benchmarks.report import keep, surroundings
from glassengine.plugins.lazy.graphs import pending
from glassengine.plugins.lazy.values import pending_memories
from glassengine.testing import models

CALLS = 500
ROUNDS = 15
LIMIT_US = 30


class Prototype(TorchDispatchMode):
    """Keeps each call, with its results on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.fake:
            made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs, made))
        return made


def additions(x: torch.Tensor) -> None:
    for _ in range(CALLS):
        x = x + 1


class Training:
    """A Llama of two layers and its optimizer."""

    def __init__(self, is_lazy: bool) -> None:
        torch.manual_seed(0)
        self.model = models.llama(num_hidden_layers=2)
        self.ids = torch.randint(5, 60, (1, 4))
        if is_lazy:
            self.ids = self.ids.to(glass.lazy.device())
            glass.lazy.module(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()
        self.optimizer.step()


def microseconds(function: Callable[[], Any]) -> float:
    start = time.thread_time_ns()
    function()
    return (time.thread_time_ns() - start) / 1000


def main() -> None:
    torch.set_num_threads(1)
    x = torch.zeros(8)
    with glass.lazy.mode(backend="eager"):
        lazy_x = glass.lazy.tensor(x)
        eager, lazy = Training(False), Training(True)
        for _ in range(3):  # the state of the optimizer, and what is foreseen once
            eager.step()
            lazy.step()
            glass.mark_step()
        lazy.step()
        num_ops = len(pending([memory.value for memory in pending_memories()]).calls)
        glass.mark_step()
        prototype = Prototype()
        fake_x = prototype.fake.from_tensor(x)
        times: dict[str, list[float]] = {}

        def note(name: str, function: Callable[[], Any], count: int) -> None:
            times.setdefault(name, []).append(microseconds(function) / count)

        def traced() -> None:
            with prototype:
                additions(fake_x)

        for _ in range(ROUNDS):
            note("an addition, eager", lambda: additions(x), CALLS)
            note("an addition, lazy", lambda: additions(lazy_x), CALLS)
            note("an addition, a fake tensor for each", traced, CALLS)
            prototype.calls.clear()
            note("a training step, eager", eager.step, num_ops)
            note("a training step, lazy", lazy.step, num_ops)
            note("its end: key, look-up, run by eager code", glass.mark_step, num_ops)
    medians = {name: statistics.median(found) for name, found in times.items()}
    lines = [f"Microseconds of processor time an operation; {num_ops} operations in a training step; one thread.", ""]
    for name, value in medians.items():
        base = medians[f"{name.rpartition(',')[0]}, eager"] if "," in name and not name.startswith("its") else 0.0
        above = f"{value - base:8.1f} above eager" if base and value != base else ""
        lines.append(f"{name:45} {value:8.1f} {above}".rstrip())
    lines += ["", f"Wanted: at most {LIMIT_US} above eager."]
    keep("lazy", "\n".join([surroundings(), "", *lines]))


if __name__ == "__main__":
    main()
