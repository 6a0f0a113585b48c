"""Memory and time of build, run and check against the size of the model.

Models have the shape of Llama-3.2-1B, with random weights in bfloat16 that are made here; its hidden size of 2048 and
smaller ones (`python -m benchmarks size 512 768 1024 1536`; `--layers` takes fewer of them). Every command runs in a
process of its own. Its most resident memory is that of the process and all it starts, mapped files included, looked at
every 50 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.plot import fit_line, panels
from benchmarks.report import RESULTS, keep, surroundings

HIDDEN = (512, 768, 1024, 1536)
GIGABYTE = 1e9
MODES = ("build", "run", "check")
NEW_TOKENS = 8

_MAKE = """
import sys, torch, transformers
hidden, layers, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
config = transformers.LlamaConfig(
    hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, head_dim=64,
    num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 256), vocab_size=128256,
    tie_word_embeddings=True, max_position_embeddings=131072, rms_norm_eps=1e-5, dtype="bfloat16",
    bos_token_id=128000, eos_token_id=128001, rope_parameters=dict(
        rope_type="llama3", rope_theta=500000.0, factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0,
        original_max_position_embeddings=8192))
torch.manual_seed(0)
transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
"""


@dataclass(frozen=True)
class Ran:
    """One command: seconds it took, bytes that it and its children had resident at most, and what it printed."""

    seconds: float
    peak_bytes: int
    output: str


def main(arguments: Sequence[str]) -> None:
    """Measure every size, and write results/size.txt and results/size.svg."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks size", description=__doc__)
    parser.add_argument("hidden", type=int, nargs="*", default=HIDDEN, help="hidden sizes, multiples of 256")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--name", default="size", help="of the files under results/")
    options = parser.parse_args(arguments)
    rows = []
    for hidden in options.hidden:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
            rows.append(_measure(hidden, options.layers, options.backend, Path(directory)))
        keep(options.name, _text(rows, options))
        if len(rows) > 1:
            (RESULTS / f"{options.name}.svg").write_text(_plot(rows, options))


@dataclass(frozen=True)
class Row:
    """One size: bytes of weights, and what each mode took."""

    hidden: int
    weights_bytes: int
    ran: dict[str, Ran]


def _measure(hidden: int, layers: int, backend: str, directory: Path) -> Row:
    model, engine = directory / "model", directory / "engine"
    run([sys.executable, "-c", _MAKE, str(hidden), str(layers), str(model)])
    glass = [sys.executable, "-m", "glassengine.cli"]
    build = [*glass, "build", str(model), str(engine), "--backend", backend, "--max-seq-len", "2048"]
    plan = json.loads(run([*build, "--dry-run", "--json"]).output)
    ids = directory / "ids.json"
    ids.write_text(json.dumps([list(range(100, 116))]))
    ran = {
        "build": run(build),
        "run": run([*glass, "run", str(engine), "--input-ids", str(ids), "--max-new-tokens", str(NEW_TOKENS)]),
    }
    shutil.rmtree(engine)
    ran["check"] = run([*glass, "check", str(model), "--backend", backend])
    return Row(hidden, plan["weights_bytes"], ran)


def run(command: Sequence[str]) -> Ran:
    """Run a command to its end, which must be a good one.

    Raises:
        subprocess.CalledProcessError: It ended otherwise.
    """
    start = time.perf_counter()
    most = 0
    # A pipe would fill up while nobody reads it.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        try:
            while process.poll() is None:
                most = max(most, resident_bytes(process.pid))
                time.sleep(0.05)
        finally:
            process.kill()
        seconds = time.perf_counter() - start
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command), text)
    return Ran(seconds, most, text)


def resident_bytes(pid: int) -> int:
    """Return the bytes that a process and its descendants have resident; 0 for one that is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return 0
    own = re.search(r"VmRSS:\s+(\d+)", status)
    return (int(own[1]) << 10 if own else 0) + sum(map(resident_bytes, children))


def _text(rows: Sequence[Row], options: argparse.Namespace) -> str:
    lines = [
        *(__doc__ or "").strip().splitlines(),
        "",
        surroundings(),
        f"back-end {options.backend}, {options.layers} layers, load average {os.getloadavg()[0]:.0f}",
        "",
        f"{'hidden':>6s} {'weights':>8s}  {'mode':6s} {'seconds':>8s} {'measured':>9s}",
    ]
    for row in rows:
        for mode, ran in row.ran.items():
            lines.append(
                f"{row.hidden:6d} {row.weights_bytes / GIGABYTE:5.2f} GB  {mode:6s} {ran.seconds:8.1f} "
                f"{ran.peak_bytes / GIGABYTE:6.2f} GB"
            )
    if len(rows) > 1:
        lines += ["", "lines fitted to them, per gigabyte of weights:"]
        for mode in MODES:
            memory, seconds = (fit_line(points) for points in (_peaks(rows, mode), _seconds(rows, mode)))
            lines.append(
                f"  {mode:6s} {memory.intercept:5.2f} GB + {memory.slope:5.2f} GB (R2 {memory.r_squared:.3f}), "
                f"{seconds.intercept:6.1f} s + {seconds.slope:6.1f} s (R2 {seconds.r_squared:.3f})"
            )
    return "\n".join(lines)


def _plot(rows: Sequence[Row], options: argparse.Namespace) -> str:
    memory = {mode: _peaks(rows, mode) for mode in MODES}
    seconds = {mode: _seconds(rows, mode) for mode in MODES}
    about = f"{options.backend}, bfloat16, {options.layers} layers"
    charts = [(f"most memory: {about}", "GB resident", memory), (f"time: {about}", "seconds", seconds)]
    return panels(charts, "GB of weights")


def _peaks(rows: Sequence[Row], mode: str) -> list[tuple[float, float]]:
    return [(row.weights_bytes / GIGABYTE, row.ran[mode].peak_bytes / GIGABYTE) for row in rows]


def _seconds(rows: Sequence[Row], mode: str) -> list[tuple[float, float]]:
    return [(row.weights_bytes / GIGABYTE, row.ran[mode].seconds) for row in rows]
