"""What snapshots cost: armed and never firing, asking the environment, and writing beside the disk's own speed.

The forward pass is that of the other benchmarks' Llama. Plain and armed runs take turns, so that what else the machine
does falls on all of them alike. The disk is measured in the same rounds, by writes of 8 MiB of the same bytes, with
and without waiting for the device at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import glassengine as glass
from benchmarks.decode import CONFIG
from benchmarks.report import THREADS, keep, surroundings
from glassengine.executable.graph import observers
from glassengine.executable.run.executable import Executable

PROMPT_LENGTH = 64
ROUNDS = 15
RUNS = 4
CHUNK = 8 << 20
TENSORS = 16
TENSOR_BYTES = 16 << 20
WRITES = 5

WRONG = ("nonfinite", "error")
ARMED = {
    "armed, keep_inputs=reference": "reference",
    "armed, keep_inputs=device": "device",
    "armed, keep_inputs=host": "host",
}


def main() -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        forward = _interleave(_compiled(model), Path(directory))
        decode = _interleave(_engine(model, Path(directory, "engine")), Path(directory))
        rates = _rates(Path(directory))
    looking = min(timeit.repeat(observers, number=20_000, repeat=7)) / 20_000
    keep("snapshots", _text(forward, decode, rates, looking))


def _compiled(model: torch.nn.Module) -> Callable[[], None]:
    ids = torch.randint(0, CONFIG["vocab_size"], (1, PROMPT_LENGTH))
    compiled = torch.compile(model, backend="glass", options={"backend": "inductor"})

    def run() -> None:
        with torch.no_grad():
            compiled(input_ids=ids, use_cache=False)

    run()
    return run


def _engine(model: torch.nn.Module, directory: Path) -> Callable[[], None]:
    engine = glass.build(model, directory, backend="inductor", max_batch_size=1, max_seq_len=256)
    ids = torch.randint(0, CONFIG["vocab_size"], (1, PROMPT_LENGTH))
    session = engine.session(1, 256)
    session.prefill(ids)
    token = ids[:, -1:]

    def run() -> None:
        if session.position > 240:
            session.position = PROMPT_LENGTH
        session.advance(token)

    return run


def _interleave(run: Callable[[], None], directory: Path) -> dict[str, float]:
    """Return name -> median seconds of one run."""
    times: dict[str, list[float]] = {}
    for round_index in range(1 + ROUNDS):  # the first round warms up
        for name in ("plain", *ARMED):
            armed = (
                glass.snapshots.take(directory / "dump", on=WRONG, keep_inputs=ARMED[name])
                if name in ARMED
                else contextlib.nullcontext()
            )
            with armed:
                run()
                start = time.perf_counter()
                for _ in range(RUNS):
                    run()
                elapsed = time.perf_counter() - start
            if round_index:
                times.setdefault(name, []).append(elapsed / RUNS)
    return {name: statistics.median(values) for name, values in times.items()}


def _rates(directory: Path) -> dict[str, list[float]]:
    """Return name -> bytes per second of each round: the disk alone, and a snapshot of the same bytes."""
    names = tuple(f"x{index}" for index in range(TENSORS))
    tensors = [torch.randn(TENSOR_BYTES // 4) for _ in names]
    executable = Executable("copy", lambda arguments: [], names, ())
    content = [memoryview(tensor.numpy()).cast("B") for tensor in tensors]
    rates: dict[str, list[float]] = {}

    def timed(name: str, write: Callable[[], Path]) -> None:
        start = time.perf_counter()
        target = write()
        cached = time.perf_counter() - start
        for path in target.iterdir():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        synced = time.perf_counter() - start
        rates.setdefault(name, []).append(TENSORS * TENSOR_BYTES / cached)
        rates.setdefault(f"{name}, on the device", []).append(TENSORS * TENSOR_BYTES / synced)
        shutil.rmtree(target)

    def plain() -> Path:
        target = directory / "plain"
        target.mkdir()
        with (target / "file").open("wb", buffering=0) as file:
            for data in content:
                for start in range(0, len(data), CHUNK):
                    file.write(data[start : start + CHUNK])
        return target

    def snapshot() -> Path:
        with glass.snapshots.take(directory / "dump", min_free_bytes=0) as taking:
            executable.run(list(tensors))
        return taking.written[-1]

    for round_index in range(1 + WRITES):
        timed("disk", plain)
        timed("snapshot", snapshot)
        if not round_index:
            rates.clear()
    return rates


def _text(forward: dict[str, float], decode: dict[str, float], rates: dict[str, list[float]], looking: float) -> str:
    lines = [
        "Snapshots: Llama, hidden 512, intermediate 1536, 8 layers, 8 / 2 heads, vocabulary 32000, float32, inductor",
        f"batch 1, {ROUNDS} interleaved rounds of {RUNS} runs, medians; load average {os.getloadavg()[0]:.1f}",
        surroundings(),
    ]
    titles = (f"torch.compile, forward of {PROMPT_LENGTH} tokens", "engine, decode step, cache of 256")
    for title, times in zip(titles, (forward, decode), strict=True):
        lines += ["", f"{title:40s} {'ms':>8s} {'to plain':>9s}"]
        lines += [f"{name:40s} {value * 1e3:8.2f} {value / times['plain']:9.3f}" for name, value in times.items()]
    size = TENSORS * TENSOR_BYTES >> 20
    lines += ["", f"{f'writing {size} MiB, {WRITES} rounds':40s} {'MB/s':>8s} {'to disk':>9s}"]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, value in medians.items():
        disk = medians[name.replace("snapshot", "disk")]
        lines.append(f"{name:40s} {value / 1e6:8.0f} {value / disk:9.2f}")
    lines += ["", f"asking the environment, at each execution: {looking * 1e6:.2f} us"]
    return "\n".join(lines)
