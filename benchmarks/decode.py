"""Decode of a small Llama, batch 1: both compiled back-ends against transformers.generate, interleaved in one run.

Every round runs each contestant once, so that what else the machine does falls on all of them alike. A token's time is
the mean time between two tokens of one run, choosing the token included; the prefill is left out. The recorded run
writes every decoder layer's output to disk as it goes; what is left to do when it closes its recording is shown apart.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import glassengine as glass
from benchmarks.report import THREADS, bandwidth, keep, surroundings

CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
    "bos_token_id": 1,
}
PROMPT_LENGTH = 16
NEW_TOKENS = 48
ROUNDS = 7
BASELINE = "transformers.generate"
BACKENDS = ("inductor", "onnxruntime")
LAYERS = "model.layers.?"

RECORDED = ", layers recorded"
CLOSING = "closing a recording"

Contestant = Callable[[], tuple[list[int], dict[str, float]]]
"""Generates once; returns the tokens and times in seconds: per decoded token, under its own name, and others."""


def main() -> None:
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    prompt = torch.randint(0, CONFIG["vocab_size"], (1, PROMPT_LENGTH))
    read = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes

    with tempfile.TemporaryDirectory() as directory:
        contestants: dict[str, Contestant] = {BASELINE: _transformers(model, prompt)}
        built = []
        for backend in BACKENDS:
            for label, outputs in ((backend, ()), (backend + RECORDED, (LAYERS,))):
                start = time.perf_counter()
                path = Path(directory) / label.replace(", ", "-").replace(" ", "-")
                engine = glass.build(
                    model, path, backend=backend, add_output=outputs, max_batch_size=1, max_seq_len=128
                )
                built.append(f"  {label:30s} {time.perf_counter() - start:6.1f} s")
                contestants[label] = _engine(label, engine, prompt, path / "recording" if outputs else None)
        times, speeds = _interleave(contestants)
    keep("decode", _text(times, speeds, read, built))


def _interleave(contestants: dict[str, Contestant]) -> tuple[dict[str, list[float]], list[float]]:
    """Return (times of every round by name, bytes per second read in each round)."""
    times: dict[str, list[float]] = {}
    speeds = []
    expected = None
    for round_index in range(1 + ROUNDS):  # the first round warms up
        speeds.append(bandwidth())
        for name, generate in contestants.items():
            tokens, seconds = generate()
            expected = expected or tokens
            if tokens != expected:
                raise SystemExit(f"{name} generates other tokens: {tokens} instead of {expected}")
            for label, value in seconds.items() if round_index else ():
                times.setdefault(label, []).append(value)
    return times, speeds


def _transformers(model: torch.nn.Module, prompt: torch.Tensor) -> Contestant:
    class Clock(transformers.StoppingCriteria):
        def __init__(self) -> None:
            self.ticks: list[float] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
            self.ticks.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def generate() -> tuple[list[int], dict[str, float]]:
        clock = Clock()
        with torch.inference_mode():
            ids = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                stopping_criteria=transformers.StoppingCriteriaList([clock]),
                pad_token_id=0,
            )
        return ids[0, PROMPT_LENGTH:].tolist(), {BASELINE: (clock.ticks[-1] - clock.ticks[0]) / (NEW_TOKENS - 1)}

    return generate


def _engine(label: str, engine: glass.engine.Engine, prompt: torch.Tensor, recording: Path | None) -> Contestant:
    def generate() -> tuple[list[int], dict[str, float]]:
        start = time.perf_counter()
        made = engine.generate(input_ids=prompt, max_new_tokens=NEW_TOKENS, record=recording, overwrite=True)
        rest = time.perf_counter() - start - made.prefill_s - made.decode_s
        times = {label: made.decode_s / (NEW_TOKENS - 1)}
        return list(made.token_ids[0]), times | ({CLOSING: rest} if recording else {})

    return generate


def _text(times: dict[str, list[float]], speeds: list[float], read: int, built: list[str]) -> str:
    medians = {name: statistics.median(values) for name, values in times.items()}
    closing = medians.pop(CLOSING)
    speed = statistics.median(speeds)
    lines = [
        "Decode: Llama, hidden 512, intermediate 1536, 8 layers, 8 / 2 heads, vocabulary 32000, float32",
        f"batch 1, prompt {PROMPT_LENGTH}, {NEW_TOKENS} new tokens, {ROUNDS} interleaved rounds, medians",
        surroundings(),
        "",
        f"{'':32s} {'ms/token':>8s} {'tokens/s':>8s} {'ratio':>6s} {'of bandwidth':>12s} {'to plain':>8s}",
    ]
    for name, median in medians.items():
        plain = medians[name.removesuffix(RECORDED)]
        lines.append(
            f"{name:32s} {median * 1e3:8.2f} {1 / median:8.0f} {medians[BASELINE] / median:6.2f} "
            f"{read / median / speed:12.0%} " + (f"{median / plain:8.2f}" if name.endswith(RECORDED) else "")
        )
    lines += [
        "",
        f"weights read per token: {read / 1e6:.1f} MB; reading a large tensor: {speed / 1e9:.1f} GB/s, "
        f"so at least {read / speed * 1e3:.2f} ms/token",
        f"closing a recording: {closing * 1e3:.0f} ms, once",
        "build and load:",
        *built,
    ]
    return "\n".join(lines)
