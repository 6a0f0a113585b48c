"""A gate for speed: ratios beside those kept in `results/check.json`, with the noise that both runs measured.

    python -m benchmarks check          compare; the exit status is 1 where a ratio is beyond what was kept
    python -m benchmarks check --keep   keep the ratios of this run

A ratio is the time of the processor over that of a yardstick of the same round, and its noise the standard error of
the median of the rounds. There are rounds until each noise is 2 % of its ratio, for eight minutes at most. Beyond is
more than four times both noises and 5 % above the kept ratio; a noise counts up to 5 % of its ratio, or a busy machine
would excuse anything. One thread. Ratios are kept for each processor: reading and computing differ among them by more
than a gate allows. The exit status is 2 on one for which none are kept. `--keep` draws `results/check.svg`, with limits
and other tools beside.
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

import glassengine as glass
from benchmarks import other_tools
from benchmarks.measure import measuring
from benchmarks.plot import Bar, bars
from benchmarks.report import RESULTS, surroundings
from glassengine import environment
from glassengine.compare.compare import compare
from glassengine.judge.sides.module import ModuleSide
from glassengine.numerics.tolerance import tolerance
from glassengine.program import export_program, load_model
from glassengine.recording.write.writer import RecordingWriter
from glassengine.testing import models
from glassengine.writing import crc32
from tests.corpus import corpus
from tests.corpus.right.variations import VARIATIONS

KEPT = RESULTS / "check.json"
ROUNDS, MOST_SECONDS = 7, 480.0
STEPS = 10
ELEMENTS, TENSORS = 1 << 22, 6
_NOISES, _SHARE, _QUIET = 4.0, 0.05, 0.02
PEER = "peer: "
"""Of what is measured beside, and no part of the gate."""
LIMITS = {
    "measure": 0.25,  # one pass over both sides
    "compare": 1.0,
    "judge": 3.0,  # the forward, the program in its own dtype and in float64, if that took no longer
    "record": 1.02,
}
"""First word of the name -> the ratio that nothing can be below, by estimate."""

Contestants = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]
"""Name -> yardstick and what is measured."""


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        found = ratios({**measured(), **compared(Path(folder)), **judged(), **recorded(Path(folder))})
    print(surroundings())
    all_kept = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    processor = environment.cpu_name()
    if "--keep" in arguments:
        all_kept[processor] = found
        KEPT.write_text(json.dumps(all_kept, indent=1) + "\n")
        KEPT.with_suffix(".svg").write_text(chart(found))
    kept = all_kept.get(processor, {})
    slower = []
    print(f"{'':36}{'kept':>10}{'now':>10}{'allowed':>10}")
    for name, (ratio, noise) in found.items():
        before, its_noise = kept.get(name, (ratio, noise))
        of_both = min(noise, _SHARE * ratio) + min(its_noise, _SHARE * before)
        allowed = before * (1 + _SHARE) + _NOISES * of_both
        slower += [name] if ratio > allowed and not name.startswith(PEER) else []
        print(f"{name:36}{before:10.2f}{ratio:10.2f}{allowed:10.2f}{'  slower' if name in slower else ''}")
    if not kept:
        known = ", ".join(all_kept) or "none"
        print(f"No ratios are kept for {processor}, but for {known}. Run the last release here with --keep first.")
    return 1 if slower else 0 if kept else 2


def ratios(contestants: Contestants) -> dict[str, tuple[float, float]]:
    """Return the median ratio of each contestant, and its noise; the first round warms up."""
    each: dict[str, list[float]] = {name: [] for name in contestants}
    number, start = 0, time.monotonic()
    found: dict[str, tuple[float, float]] = {}
    while number <= ROUNDS or not (is_quiet(found) or time.monotonic() - start > MOST_SECONDS):
        for name, (yardstick, run) in contestants.items():
            ratio = seconds(run) / seconds(yardstick)
            each[name] += [ratio] if number else []
        number += 1
        found = {name: with_noise(values) for name, values in each.items() if values}
    return found


def is_quiet(found: dict[str, tuple[float, float]]) -> bool:
    return all(noise <= _QUIET * ratio for ratio, noise in found.values())


def with_noise(values: list[float]) -> tuple[float, float]:
    """Return the median and its standard error: 1.2533 times the deviation, which is 1.4826 times the median one."""
    middle = statistics.median(values)
    return middle, 1.86 * statistics.median(abs(value - middle) for value in values) / math.sqrt(len(values))


def chart(found: dict[str, tuple[float, float]]) -> str:
    rows = [
        Bar(name.removeprefix(PEER), ratio, LIMITS.get(name.split()[0]), is_peer=name.startswith(PEER))
        for name, (ratio, _) in found.items()
    ]
    return bars("Processor time over that of a yardstick: reading, or a plain forward", rows)


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
        allowed = tolerance(name, name)
        tools = other_tools.comparing(b, c, allowed.rtol, allowed.atol)
        found.update((f"{PEER}{tool}, {name}", (read, run)) for tool, run in tools.items())
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


def bench_of_llama() -> corpus.Bench:
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 4096}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 512}
    model = load_model(models.llama(**sizes, **heads), dtype="float32")
    case = corpus.padded_case(4096, size=128, steps=0, batch=1)
    return corpus.Bench("llama-256/float32", model, export_program(model), case)


def judged() -> Contestants:
    """Judging a forward at module outputs and op by op, against the forward."""
    bench = bench_of_llama()
    module, case = bench.model.module, bench.case

    def plain() -> None:
        with torch.no_grad():
            module(case.input_ids)

    def of(make: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
        return plain, lambda: corpus.run(bench, [make()], case)

    other = VARIATIONS[1]
    return {
        "judge at module outputs": of(lambda: ModuleSide(module, bench.program)),
        "judge an equal port": of(lambda: corpus.interpreted(bench, bench.program)),
        "judge other kernels": of(lambda: corpus.varied(bench, bench.program, other, worth_a_bound=1.6)),
    }


def recorded(folder: Path) -> Contestants:
    """Recording forwards, with the work of the thread that writes, against the forwards."""
    bench = bench_of_llama()
    module, ids = bench.model.module, bench.case.input_ids

    def forwards() -> None:
        with torch.no_grad():
            for _ in range(STEPS):
                module(ids, use_cache=False)

    def recording(**options: Any) -> Callable[[], None]:
        def run() -> None:
            with glass.record(module, folder / "run", overwrite=True, **options):
                forwards()

        return run

    found = {
        "record values": recording(),
        "record light statistics": recording(values=False),
        "record no step but the first": recording(steps=range(1)),
    }
    tools = other_tools.recording(module, ids, STEPS, folder)
    found.update((f"{PEER}{tool}", run) for tool, run in tools.items())
    return {name: (forwards, run) for name, run in found.items()}
