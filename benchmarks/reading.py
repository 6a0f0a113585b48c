"""Reading recordings: a million steps opened, a hundred thousand tensors of a step shown, thousands of steps compared.

Times are of the processor, of one thread, because others use the machine; the time that passed is beside. The limit of
opening is what reading the bytes of the index and their checksums takes (`zlib`, in one go).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import keep, surroundings
from glassengine.compare.compare import compare
from glassengine.recording.layout import layout
from glassengine.recording.layout import records as frames
from glassengine.recording.layout.layout import Location
from glassengine.recording.layout.tensors import describe
from glassengine.recording.reader import Recording
from glassengine.recording.write.writer import RecordingWriter
from glassengine.writing import crc32

STEPS = 1_000_000
SHOWN = 100_000
COMPARED = 10_000


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = [f"{'':44}{'processor':>10}{'passed':>10}{'a unit':>12}"]
        opened = many_steps(Path(folder) / "steps", STEPS)
        index = opened / layout.INDEX
        rows.append(row(f"open {STEPS:,} steps of two tensors", STEPS, lambda: Recording.open(opened)))
        rows.append(row("  of it: read the index and its checksum", STEPS, lambda: crc32(index.read_bytes())))
        rows.append(
            f"  the index has {index.stat().st_size / 1e6:.0f} MB; opening took {memory(opened):.0f} MB at most"
        )
        found = Recording.open(opened)
        rows.append(row("  make every entry", 2 * STEPS, lambda: sum(1 for _ in found.entries)))
        rows.append(row("  find one tensor by name and step", 1, lambda: found.entry("m.1", STEPS - 1)))
        given = many_steps(Path(folder) / "tokens", STEPS, tokens=True)
        rows.append(row("  of as many steps with a token each", STEPS, lambda: Recording.open(given)))
        wide = written(Path(folder) / "wide", 1, SHOWN, 0.0)
        rows.append(row(f"show a step of {SHOWN:,} tensors", SHOWN, lambda: show(wide)))
        rows.append(row("  once more, statistics known", SHOWN, lambda: show(wide)))
        x, same, near = (written(Path(folder) / n, COMPARED, 2, by) for n, by in (("x", 0.0), ("y", 0.0), ("z", 1e-6)))
        rows.append(row(f"compare {COMPARED:,} steps of two equal tensors", 2 * COMPARED, lambda: compare(x, same)))
        rows.append(row("  of two tensors that differ by rounding", 2 * COMPARED, lambda: compare(x, near)))
    keep("reading", "\n".join([surroundings(), f"load average {os.getloadavg()[0]:.1f}", "", *rows]))


def many_steps(path: Path, steps: int, tokens: bool = False) -> Path:
    """Make a recording of many steps: its index frame by frame, the shard without taking room on the disk."""
    descriptions = tuple(describe(f"m.{number}", torch.zeros(4)) for number in range(2))
    with RecordingWriter(path, metadata={}) as writer:
        group = writer.group(descriptions, 0)
        zeros = bytes(group.nbytes)
        writer.store_block(group, 0, memoryview(zeros), crc32(zeros))
        writer.end_step(0)
    size, checksum = layout.aligned(group.nbytes), crc32(zeros)
    with (path / layout.INDEX).open("ab") as file:
        for step in range(1, steps):
            file.write(frames.block_frame(0, step, Location(0, size * step, checksum)))
            if tokens:
                file.write(frames.token_frame(0, step, step % 32_000))
            file.write(frames.commit_frame(step, 2, 0, None))
    os.truncate(path / layout.shard_name(0, sealed=True), layout.HEADER_BYTES + size * steps)
    manifest = json.loads((path / layout.MANIFEST).read_text())
    (path / layout.MANIFEST).write_text(json.dumps({**manifest, "num_steps": steps, "num_tensors": 2 * steps}))
    return path


def written(path: Path, steps: int, tensors: int, by: float) -> Path:
    with RecordingWriter(path, metadata={}) as writer:
        for step in range(steps):
            for number in range(tensors):
                writer.write(f"m.{number}", step, torch.full((4,), 1.0 + step) * (1 + by))
            writer.commit(step)
    return path


def show(path: Path) -> None:
    from glassengine.cli import main as cli

    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main(["show", str(path)])


def memory(path: Path) -> float:
    """Return by how many MB opening makes a process larger that has loaded the modules."""
    code = (
        "import re, sys; from pathlib import Path; from glassengine.recording.reader import Recording\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) / 1e3\n"
        "before = peak(); Recording.open(sys.argv[1]); print(peak() - before)"
    )
    return float(subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True).stdout)


def row(name: str, count: int, run: Callable[[], Any]) -> str:
    best = (float("inf"), float("inf"))
    for _ in range(3 if count == STEPS else 1):
        start, busy = time.perf_counter(), time.process_time()
        run()
        best = min(best, (time.process_time() - busy, time.perf_counter() - start))
    return f"{name:44}{best[0]:9.2f}s{best[1]:9.2f}s{best[0] / count * 1e6:10.2f}us"
