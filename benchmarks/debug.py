"""What looking costs: decode time of one model against the number of tensors recorded at each step, interleaved.

Two questions are asked apart. Engines built with more and more debug outputs and looked at in full: what a debug build
costs. The engine with every output and `--debug` of fewer: what a glob costs where everything could be looked at; only
what was asked for is copied.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers

import glassengine as glass
from benchmarks.decode import CONFIG, PROMPT_LENGTH
from benchmarks.report import THREADS, keep, surroundings

NEW_TOKENS = 32
ROUNDS = 5
BUILDS: dict[str, tuple[str, ...]] = {
    "no debug outputs": (),
    "1 site": ("model.layers.3.mlp",),
    "8 sites": ("model.layers.?.mlp",),
    "all layers": ("model.layers.?", "model.layers.?.self_attn:out[0]", "model.layers.?.mlp"),
    "all sites": ("*",),
}
PATTERNS: dict[str, list[str]] = {
    "1 site": ["model.layers.3.mlp"],
    "8 sites": ["model.layers.?.mlp"],
    "all sites": ["*"],
}


def main() -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    prompt = torch.randint(0, CONFIG["vocab_size"], (1, PROMPT_LENGTH))
    with tempfile.TemporaryDirectory() as directory:
        engines = {}
        for label, outputs in BUILDS.items():
            path = Path(directory) / label.replace(" ", "-")
            engines[label] = glass.build(
                model, path, backend="inductor", add_output=outputs, max_batch_size=1, max_seq_len=128
            )
        everything = engines["all sites"]
        runs: dict[str, tuple[glass.engine.Engine, bool | list[str]]] = {}
        for label, engine in engines.items():
            runs[f"built {label}"] = (engine, [e.name for e in engine.manifest.added_outputs] or False)
        runs["built all sites, --debug off"] = (everything, False)
        for label, patterns in PATTERNS.items():
            runs[f"built all sites, --debug {label}"] = (everything, patterns)
        times, sizes = _interleave(runs, prompt)
    keep("debug", _text(times, sizes))


def _interleave(
    runs: dict[str, tuple[glass.engine.Engine, bool | list[str]]], prompt: torch.Tensor
) -> tuple[dict[str, list[float]], dict[str, tuple[int, int]]]:
    """Return (seconds per token of every round, (tensors, bytes) looked at in one decode step), by name."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    sizes: dict[str, tuple[int, int]] = {}
    for round_index in range(1 + ROUNDS):  # the first round warms up
        for name, (engine, debug) in runs.items():
            session = engine.session(1, PROMPT_LENGTH + NEW_TOKENS, debug=debug)
            logits = session.prefill(prompt)
            start = time.perf_counter()
            for _ in range(NEW_TOKENS):
                logits = session.advance(logits[:, -1:].argmax(-1))
            if round_index:
                times[name].append((time.perf_counter() - start) / NEW_TOKENS)
            buffers = session.debug_buffers.values()
            sizes[name] = (len(buffers), sum(value.nbytes for value in buffers))
    return times, sizes


def _text(times: dict[str, list[float]], sizes: dict[str, tuple[int, int]]) -> str:
    medians = {name: statistics.median(values) for name, values in times.items()}
    plain = medians["built no debug outputs"]
    lines = [
        "Looking: Llama, hidden 512, intermediate 1536, 8 layers, 8 / 2 heads, vocabulary 32000, float32, inductor",
        f"batch 1, prompt {PROMPT_LENGTH}, {NEW_TOKENS} decode steps, {ROUNDS} interleaved rounds, medians",
        surroundings(),
        "",
        f"{'':36s} {'tensors':>8s} {'kB/step':>8s} {'ms/token':>8s} {'to no debug':>12s}",
    ]
    for name, median in medians.items():
        count, size = sizes[name]
        lines.append(f"{name:36s} {count:8d} {size / 1e3:8.0f} {median * 1e3:8.2f} {median / plain:12.2f}")
    return "\n".join(lines)
