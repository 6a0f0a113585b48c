"""What recording costs: every input and result of every module, against the plain forward in the same run.

Every round runs each contestant once, so that what else the machine does falls on all of them alike; ratios are the
median of the rounds' ratios. *Burst*: one forward whose tensors fit the ring, in an opened recording; what the thread
needs afterwards to bring them to disk is shown as the drain. Beside each recorded forward, before or behind it, runs a
plain one of a model that has the same weights and no hooks. *Sustained*: forwards back to back, until the last byte is
in the file, against the larger of the plain forwards and the time that writing as many bytes takes on this disk, which
is measured in the same round.
"""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

import glassengine as glass
from benchmarks.report import THREADS, keep, surroundings

LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
ROUNDS = 9
BURST_ROUNDS = 20
STEPS_OF_A_ROUND = 2
SUSTAINED_STEPS = 60
SMALL_STEPS = 100


def main() -> None:
    torch.set_num_threads(THREADS)
    large, large_ids = _model(LARGE, 32000, 128)
    small, small_ids = _model(SMALL, 256, 32)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory, torch.no_grad():
        rows = [
            *_single(large, large_ids, Path(directory)),
            *_sustained(large, large_ids, Path(directory)),
            *_small(small, small_ids, Path(directory)),
            *_reading(Path(directory)),
        ]
    busy = f"load average of the last five minutes: {os.getloadavg()[1]:.1f}, of which up to {THREADS + 1} are ours"
    keep("recording", "\n".join([*(__doc__ or "").strip().splitlines(), "", surroundings(), busy, "", *rows]))


def _model(config: dict[str, int], vocabulary: int, length: int) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    made = transformers.LlamaConfig(**config, vocab_size=vocabulary, num_key_value_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa").eval()
    return model, torch.randint(0, vocabulary, (1, length))


def _timed(model: torch.nn.Module, ids: torch.Tensor, count: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(count):
        model(input_ids=ids, use_cache=False)
    return time.perf_counter() - start


def _single(model: torch.nn.Module, ids: torch.Tensor, directory: Path) -> Iterator[str]:
    times: dict[str, list[float]] = {}
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    without_hooks = copy.deepcopy(model, weights)

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    def after_two_plain(contestant: torch.nn.Module) -> float:
        """Time a forward that follows on others: the first one after a pause is slower, recorded or not."""
        _timed(without_hooks, ids, 2)
        return _timed(contestant, ids)

    plain = "plain forward"
    contestants = [("burst, values", {}), ("burst, light statistics", {"values": False})]
    for index in range(1 + BURST_ROUNDS):
        path = directory / f"burst{index}"
        # In turns, because one leaves more behind for the disk than the other.
        for name, options in contestants if index % 2 else reversed(contestants):
            forwards, recorded, drains = [], [], []
            with glass.record(model, path, overwrite=True, **options) as recorder:
                for step in range(1 + STEPS_OF_A_ROUND):
                    if step % 2:
                        forwards.append(after_two_plain(without_hooks))
                    recorded.append(after_two_plain(model))
                    start = time.perf_counter()
                    recorder.wait()
                    drains.append(time.perf_counter() - start)
                    if not step % 2:
                        forwards.append(after_two_plain(without_hooks))
            if index:
                # In the first of its steps a recording learns what there is.
                note(plain, statistics.mean(forwards[1:]))
                note(name, statistics.mean(recorded[1:]))
                note(f"{name}: ratio", statistics.mean(recorded[1:]) / statistics.mean(forwards[1:]))
                note(f"{name}: drain", statistics.mean(drains[1:]))
        if index and index <= 3:
            for name, seconds in _peers(model, ids, directory / f"peer{index}"):
                note(name, seconds)
                note(f"{name}: ratio", seconds / statistics.mean(forwards))
    yield f"Llama, hidden 512, 8 layers, vocabulary 32000, 128 tokens; {BURST_ROUNDS} rounds"
    for name in times:
        if not name.endswith((": ratio", ": drain")):
            yield _row(name, times)


def _sustained(model: torch.nn.Module, ids: torch.Tensor, directory: Path) -> Iterator[str]:
    ratios, details = [], []
    for index in range(3):
        plain = _timed(model, ids, SUSTAINED_STEPS)
        path = directory / f"sustained{index}"
        start = time.perf_counter()
        with glass.record(model, path):
            _timed(model, ids, SUSTAINED_STEPS)
        recorded = time.perf_counter() - start
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        disk = num_bytes / _disk_rate(directory / "probe", num_bytes)
        ratios.append(recorded / max(plain, disk))
        details.append((recorded, plain, disk, num_bytes))
    recorded, plain, disk, num_bytes = details[ratios.index(statistics.median(ratios))]
    ratio = statistics.median(ratios)
    yield f"sustained, {SUSTAINED_STEPS} forwards, {num_bytes / 1e9:.2f} GB: {ratio:.2f} of max(plain, disk)"
    yield f"  recorded {recorded:.2f} s, plain {plain:.2f} s, writing as many bytes {disk:.2f} s"


def _small(model: torch.nn.Module, ids: torch.Tensor, directory: Path) -> Iterator[str]:
    times: dict[str, list[float]] = {}
    torch.set_num_threads(1)  # a second one makes so small a model slower
    os.sync()  # what was written before would still be on its way to the disk, on one of a few processors
    for index in range(1 + ROUNDS):
        for name, options in (("values", {}), ("light statistics", {"values": False})):
            _timed(model, ids, 10)
            plain = _timed(model, ids, SMALL_STEPS) / SMALL_STEPS
            with glass.record(model, directory / "small", overwrite=True, **options):
                _timed(model, ids, 10)
                recorded = _timed(model, ids, SMALL_STEPS) / SMALL_STEPS
            if index:
                times.setdefault("plain forward", []).append(plain)
                times.setdefault(name, []).append(recorded)
                times.setdefault(f"{name}: ratio", []).append(recorded / plain)
    torch.set_num_threads(THREADS)
    yield ""
    yield f"Llama, hidden 64, 2 layers, 32 tokens, 1 thread; {SMALL_STEPS} forwards back to back, {ROUNDS} rounds"
    for name in ("plain forward", "values", "light statistics"):
        yield _row(name, times)


def _reading(directory: Path) -> Iterator[str]:
    path = directory / "sustained0"
    opening, reading = [], []
    for _ in range(5):
        start = time.perf_counter()
        recording = glass.Recording.open(path)
        opening.append(time.perf_counter() - start)
        middle = [entry for entry in recording.entries if entry.step == SUSTAINED_STEPS // 2]
        entry = max(middle, key=lambda entry: entry.nbytes)
        start = time.perf_counter()
        recording.tensor(entry).sum()
        reading.append(time.perf_counter() - start)
    yield ""
    yield f"opening that recording of {len(recording.entries)} tensors: {statistics.median(opening) * 1e3:.0f} ms"
    yield f"reading one tensor of {entry.nbytes / 1e6:.2f} MB: {statistics.median(reading) * 1e3:.2f} ms"


def _disk_rate(path: Path, num_bytes: int) -> float:
    """Return bytes per second of writing as many bytes in large pieces."""
    piece = memoryview(torch.randn(4 << 20).numpy()).cast("B")
    left = num_bytes
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        while left > 0:
            left -= file.write(piece[: min(left, len(piece))])
    seconds = time.perf_counter() - start
    path.unlink()
    return num_bytes / seconds


def _peers(model: torch.nn.Module, ids: torch.Tensor, directory: Path) -> Iterator[tuple[str, float]]:
    with contextlib.suppress(ImportError):
        from transformers.model_debugging_utils import model_addition_debugger_context

        for use_repr in (True, False):
            start = time.perf_counter()
            with model_addition_debugger_context(model, str(directory), do_prune_layers=False, use_repr=use_repr):
                model(input_ids=ids, use_cache=False)
            yield f"transformers debugger, use_repr={use_repr}", time.perf_counter() - start
            for module in model.modules():
                vars(module).pop("forward", None)


def _row(name: str, times: dict[str, list[float]]) -> str:
    def median(label: str) -> float:
        return statistics.median(times[label])

    text = f"  {name:40s} {median(name) * 1e3:9.2f} ms"
    if f"{name}: ratio" in times:
        text += f"  {median(f'{name}: ratio'):6.2f} x"
    if f"{name}: drain" in times:
        text += f"  drain {median(f'{name}: drain') * 1e3:.0f} ms"
    return text
