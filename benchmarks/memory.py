"""Memory and time of judging, and of reading one tensor of, recordings that are larger than the memory they may take.

Two recordings of that many bytes each are written (`python -m benchmarks memory [GIGABYTES]`, 2 by default), the second
with rounding-sized differences in every other tensor. `glass compare` judges them in a process of its own, whose most
resident memory is what counts, mapped files included. Another process reads one tensor in the middle.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.report import keep, surroundings
from glassengine.recording.write.writer import RecordingWriter

LIMIT_BYTES = 1 << 30
TENSOR_BYTES = 64 << 20
TENSORS_PER_STEP = 8

_MOST = "(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) << 10)"
_COMPARE = f"""
import json, re, sys, time
from glassengine.cli.main import main
start = time.perf_counter()
status = main(["compare", *sys.argv[1:], "--json", "/dev/null"])
print(json.dumps({{"status": status, "seconds": time.perf_counter() - start, "most": {_MOST}}}))
"""
_READ = f"""
import json, re, sys, time
import torch, glassengine
before = {_MOST}
start = time.perf_counter()
recording = glassengine.Recording.open(sys.argv[1])
opened = time.perf_counter()
entry = recording.entries[len(recording.entries) // 2]
recording.tensor(entry)
print(json.dumps({{"open": opened - start, "read": time.perf_counter() - opened, "more": {_MOST} - before}}))
"""


def main(arguments: list[str]) -> None:
    gigabytes = float(arguments[0]) if arguments else 2.0
    num_steps = max(1, round(gigabytes * 1e9 / TENSOR_BYTES / TENSORS_PER_STEP))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        paths = [Path(directory, name) for name in ("baseline", "candidate")]
        for path, noise in zip(paths, (0.0, 1e-7), strict=True):
            _write(path, num_steps, noise)
        judged = _run(_COMPARE, *paths)
        read = _run(_READ, paths[0])
    size = num_steps * TENSORS_PER_STEP * TENSOR_BYTES
    rows = [
        f"two recordings of {size / 1e9:.1f} GB, {num_steps * TENSORS_PER_STEP} tensors of {TENSOR_BYTES >> 20} MiB",
        f"  glass compare: {judged['seconds']:.1f} s, {2 * size / judged['seconds'] / 1e9:.2f} GB/s of both sides",
        f"  most resident memory {judged['most'] / 1e6:.0f} MB, to stay under {LIMIT_BYTES / 1e6:.0f} MB",
        f"  opening {read['open'] * 1e3:.0f} ms, reading and verifying one tensor {read['read'] * 1e3:.0f} ms,",
        f"  for which the process grows by {read['more'] / 1e6:.0f} MB",
    ]
    keep("memory", "\n".join([*(__doc__ or "").strip().splitlines(), "", surroundings(), "", *rows]))
    assert judged["status"] == 0 and judged["most"] < LIMIT_BYTES


def _write(path: Path, num_steps: int, noise: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(TENSOR_BYTES // 4)
    with RecordingWriter(path, metadata={"dtype": "float32"}) as writer:
        for step in range(num_steps):
            for index in range(TENSORS_PER_STEP):
                values[: 1 << 10] = float(step * TENSORS_PER_STEP + index)
                writer.write(f"layers.{index}", step, values * (1 + noise) if index % 2 else values.clone())
            writer.commit(step)


def _run(code: str, *arguments: Path) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
