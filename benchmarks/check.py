"""A gate for speed: ratios beside those kept in `results/check.json`, with the noise that both runs measured.

    python -m benchmarks check          compare; the exit status is 1 where a ratio is beyond what was kept
    python -m benchmarks check --keep   keep the ratios of this run

A ratio is the time of the processor over that of a yardstick of the same round, and its noise the standard error of
the median of the rounds. Beyond is more than four times both noises and 5 % above the kept ratio. One thread.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import measuring
from benchmarks.report import RESULTS, surroundings
from glassengine.compare.compare import compare
from glassengine.judge.sides.module import ModuleSide
from glassengine.program import export_program, load_model
from glassengine.recording.write.writer import RecordingWriter
from glassengine.testing import models
from glassengine.writing.checksums import crc32
from tests.corpus import corpus

KEPT = RESULTS / "check.json"
ROUNDS = 7
ELEMENTS, TENSORS = 1 << 22, 6
_NOISES, _SHARE = 4.0, 0.05

Contestants = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]
"""Name -> yardstick and what is measured."""


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        found = ratios({**measured(), **compared(Path(folder)), **judged()})
    print(surroundings())
    if "--keep" in arguments:
        KEPT.write_text(json.dumps(found, indent=1) + "\n")
    kept = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    slower = []
    print(f"{'':36}{'kept':>10}{'now':>10}{'allowed':>10}")
    for name, (ratio, noise) in found.items():
        before, its_noise = kept.get(name, (ratio, noise))
        allowed = before * (1 + _SHARE) + _NOISES * (noise + its_noise)
        slower += [name] if ratio > allowed else []
        print(f"{name:36}{before:10.2f}{ratio:10.2f}{allowed:10.2f}{'  slower' if name in slower else ''}")
    return 1 if slower else 0


def ratios(contestants: Contestants) -> dict[str, tuple[float, float]]:
    """Return the median ratio of each contestant, and its noise; the first round warms up."""
    each: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(1 + ROUNDS):
        for name, (yardstick, run) in contestants.items():
            ratio = seconds(run) / seconds(yardstick)
            each[name] += [ratio] if number else []
    found = {}
    for name, values in each.items():
        middle = statistics.median(values)
        # Of a median of normal numbers: 1.2533 times their deviation, which is 1.4826 times the median one.
        found[name] = middle, 1.86 * statistics.median(abs(value - middle) for value in values) / math.sqrt(ROUNDS)
    return found


def seconds(run: Callable[[], Any]) -> float:
    busy = time.process_time()
    run()
    return max(time.process_time() - busy, 1e-6)


def sides() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    b, noise = (torch.randn(ELEMENTS // 1024, 1024, generator=g) for _ in range(2))
    whole = (b * 100).long()
    return {
        "float32": (b, b * (1 + 2e-7 * noise)),
        "bfloat16": (b.bfloat16(), (b * (1 + 2**-8 * noise)).bfloat16()),
        "int64": (whole, whole + (noise.abs() > 2)),
    }


def measured() -> Contestants:
    """Measuring two tensors, against reading both four times: one time is too short for the clock."""
    found: Contestants = {}
    for name, (b, c) in sides().items():
        bits = [side.view(torch.int16 if side.element_size() == 2 else torch.int32) for side in (b, c)]

        def read(bits: list[torch.Tensor] = bits) -> None:
            for side in bits * 4:
                side.max()

        found[f"measure {name}"] = read, measuring(b, c)
    return found


def compared(folder: Path) -> Contestants:
    """Comparing two recordings, against reading both and their checksums."""
    found: Contestants = {}
    for name, pair in sides().items():
        paths = [folder / f"{name}.{side}" for side in "bc"]
        for path, tensor in zip(paths, pair, strict=True):
            with RecordingWriter(path, metadata={}) as writer:
                for number in range(TENSORS):
                    writer.write(f"m.{number}", 0, tensor.roll(number))
                writer.commit(0)

        def read(paths: list[Path] = paths) -> None:
            for path in paths:
                for shard in path.glob("shard-*"):
                    crc32(shard.read_bytes())

        found[f"compare {name}"] = read, lambda paths=paths: compare(*paths, jobs=1)  # type: ignore[misc]
    return found


def judged() -> Contestants:
    """Judging a forward at module outputs, against the forward."""
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 4096}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 512}
    model = load_model(models.llama(**sizes, **heads), dtype="float32")
    case = corpus.padded_case(4096, size=128, steps=0, batch=1)
    bench = corpus.Bench("llama-256/float32", model, export_program(model), case)

    def plain() -> None:
        with torch.no_grad():
            model.module(case.input_ids)

    return {
        "judge at module outputs": (plain, lambda: corpus.run(bench, [ModuleSide(model.module, bench.program)], case))
    }
