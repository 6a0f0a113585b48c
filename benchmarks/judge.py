"""What judging costs: a forward of a Llama of hidden size 512 and 8 layers, observed and judged, against a plain one.

Judged are the untouched model at its module outputs, and an implementation with kernels of its own op by op. Both need
the reference: the program in float64, in its own dtype, and twice with noise. One thread, and time of the processor:
what else the machine does is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.report import keep, surroundings
from glassengine.judge.sides.module import ModuleSide
from glassengine.program import export_program, load_model
from glassengine.testing import models
from tests.corpus import corpus
from tests.corpus.right.variations import VARIATIONS

TOKENS = 128
ROUNDS = 3
LIMIT = 10.0


def main() -> None:
    torch.set_num_threads(1)
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "vocab_size": 8192}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 512}
    model = load_model(models.llama(**sizes, **heads), dtype="float32")
    case = corpus.padded_case(8192, size=TOKENS, steps=0, batch=1)
    bench = corpus.Bench("llama-512/float32", model, export_program(model), case)

    def plain() -> None:
        with torch.no_grad():
            model.module(case.input_ids)

    def judged(make: Callable[[], Any]) -> Callable[[], None]:
        return lambda: corpus.run(bench, [make()], case)

    contestants = {
        "plain forward": plain,
        "judged at module outputs": judged(lambda: ModuleSide(model.module, bench.program)),
        "judged op by op": judged(lambda: corpus.varied(bench, bench.program, VARIATIONS[1], worth_a_bound=1.6)),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(1 + ROUNDS):  # the first round warms up
        for name, run in contestants.items():
            start = time.process_time()
            run()
            if number:
                times[name].append(time.process_time() - start)
    medians = {name: statistics.median(found) for name, found in times.items()}
    base = medians["plain forward"]
    lines = [f"Judging a forward of {TOKENS} tokens, medians of {ROUNDS} interleaved rounds", surroundings(), ""]
    lines += [f"{name:28s} {seconds * 1e3:8.0f} ms {seconds / base:6.1f} x" for name, seconds in medians.items()]
    lines += ["", f"wanted: at most {LIMIT:.0f} x"]
    keep("judge", "\n".join(lines))
