"""Prefill and decode of a Llama: engines of every back-end beside transformers, torch.compile and other runtimes.

Every round runs each contestant once, so that what else the machine does falls on all of them alike. Prefill ends with
the first token; a token's time is the mean between two tokens after it, choosing included. "roofline" is the share of
what the memory (decode: weights and caches read once) or the processor (prefill: products of all layers, and of the
last token's logits) allows at the speeds measured in the same rounds. Runtimes that are not installed are left out, and
said so: `pip install onnxruntime-genai openvino-genai llama-cpp-python gguf`. benchmarks/README.md says who is ahead
where, and why.

`python -m benchmarks decode [MODEL] [--backends NAME[:TYPE]...] [--cases BATCHxPROMPT...]`; TYPE is one that
`glass build --quantize` knows, as in gguf:Q8_0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import glassengine as glass
from benchmarks.peers import PEERS, Generate, Timed, some_tokenizer
from benchmarks.report import THREADS, bandwidth, keep, surroundings

SMALL = {
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
BILLION = SMALL | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
MODELS = {"small": (SMALL, "float32"), "1b": (BILLION, "bfloat16"), "1b_float32": (BILLION, "float32")}
CASES = ((1, 16), (8, 16), (1, 512), (8, 512))
NEW_TOKENS = 24
ROUNDS = 5
BASELINE = "transformers"
BACKENDS = ("inductor", "onnxruntime", "openvino")
LAYERS = "model.layers.?"
RECORDED = ", layers recorded"


@dataclass
class Results:
    """Times of every round by contestant, what the machine can do in each, and what is to be said beside them."""

    times: dict[str, list[Timed]] = field(default_factory=dict)
    speeds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] = ()) -> None:
    """Measure one model in all cases, and write a file such as results/decode.txt or decode_1b_2_threads.txt."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks decode", description=__doc__)
    parser.add_argument("model", nargs="?", default="small", choices=MODELS)
    parser.add_argument("--backends", nargs="*", default=BACKENDS)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--cases", nargs="*", type=_case, default=CASES, metavar="BATCHxPROMPT")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--no-recorded", action="store_true", help="leave out the engines that record their layers")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    settings, dtype = MODELS[options.model]
    config = transformers.LlamaConfig(**settings, dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=getattr(torch, dtype)
    ).eval()
    text = [
        f"Llama, {options.model}: {_described(settings)}, {dtype}",
        f"{NEW_TOKENS} new tokens, {options.rounds} interleaved rounds, medians",
        surroundings(),
    ]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        contestants, notes = _contestants(model, Path(directory), dtype, options)
        for batch, prompt in options.cases:
            prompts = torch.randint(3, settings["vocab_size"], (batch, prompt))
            results = _interleave(contestants, prompts, options.rounds, dtype)
            text += ["", *_table(results, model, batch, prompt, dtype)]
            keep(_name(options), "\n".join([*text, "", *notes]))


def _name(options: argparse.Namespace) -> str:
    """Return the name of the file of results."""
    model = "" if options.model == "small" else f"_{options.model}"
    return f"decode{model}" + ("" if options.threads == 1 else f"_{options.threads}_threads")


def _case(text: str) -> tuple[int, int]:
    batch, prompt = text.split("x")
    return int(batch), int(prompt)


def _described(settings: dict[str, Any]) -> str:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    return ", ".join(f"{name} {settings[name]}" for name in names)


def _contestants(
    model: Any, directory: Path, dtype: str, options: argparse.Namespace
) -> tuple[dict[str, Generate], list[str]]:
    """Return what takes part, and why something does not or how long it took to build."""
    contestants = {BASELINE: _transformers(model), "torch.compile": _transformers(model, compiled=True)}
    notes = ["seconds to build and load:"]
    length = max(prompt for _, prompt in options.cases) + NEW_TOKENS
    sizes = {"max_batch_size": max(batch for batch, _ in options.cases), "max_seq_len": length}
    for backend in options.backends:
        for label, outputs in ((backend, ()), (backend + RECORDED, (LAYERS,))):
            if outputs and (options.no_recorded or backend == "openvino"):
                continue
            path = directory / label.replace(", ", "-").replace(" ", "-")
            start = time.perf_counter()
            try:
                name, _, kind = backend.partition(":")
                engine = glass.build(model, path, backend=name, quantize=kind or None, add_output=outputs, **sizes)
            except glass.GlassError as error:
                notes.append(f"  {label:30s} left out: {error.what}")
                continue
            notes.append(f"  {label:30s} {time.perf_counter() - start:6.1f}")
            contestants[label] = _engine(engine, path / "recording" if outputs else None)
    checkpoint = directory / "checkpoint"
    model.save_pretrained(checkpoint)
    some_tokenizer().save_pretrained(checkpoint)
    for name in options.peers:
        work = directory / name
        work.mkdir()
        start = time.perf_counter()
        try:
            contestants[name] = PEERS[name](checkpoint, work, dtype, options.threads)
        except Exception as error:  # of another's code: the table says why it is missing
            notes.append(f"  {name:30s} left out: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
            continue
        notes.append(f"  {name:30s} {time.perf_counter() - start:6.1f}")
    return contestants, notes


def _interleave(contestants: dict[str, Generate], prompts: torch.Tensor, rounds: int, dtype: str) -> Results:
    """Run every contestant once a round; one that fails is left out of the rounds after, with the reason."""
    results = Results()
    for number in range(1 + rounds):  # the first round warms up
        results.speeds.append(bandwidth())
        results.rates.append(_arithmetic(getattr(torch, dtype)))
        for name, generate in list(contestants.items()):
            try:
                found = generate(prompts, NEW_TOKENS)
            except Exception as error:  # of another's code, and only of this case
                results.notes.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
                print(f"{name}: {error}", file=sys.stderr)
                contestants = {key: value for key, value in contestants.items() if key != name}
                results.times.pop(name, None)
                continue
            if number:
                results.times.setdefault(name, []).append(found)
    return results


def _arithmetic(dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    """Return floating-point operations per second of a matrix product, best of `repeats`."""
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def _transformers(model: Any, *, compiled: bool = False) -> Generate:
    class Clock(transformers.StoppingCriteria):
        def __init__(self) -> None:
            self.ticks = [time.perf_counter()]

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
            self.ticks.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    options: dict[str, Any] = {}
    if compiled:
        # What its documentation recommends, on a CPU as well.
        settings = transformers.CompileConfig(dynamic=False, mode="default")
        settings._compile_all_devices = True
        options = {"cache_implementation": "static", "compile_config": settings}

    def generate(prompts: torch.Tensor, num_tokens: int) -> Timed:
        clock = Clock()
        with torch.inference_mode():
            ids = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=num_tokens,
                do_sample=False,
                stopping_criteria=transformers.StoppingCriteriaList([clock]),
                pad_token_id=0,
                **options,
            )
        start, first, *_, last = clock.ticks
        return Timed(ids[:, prompts.shape[1] :].tolist(), first - start, (last - first) / (num_tokens - 1))

    return generate


def _engine(engine: glass.engine.Engine, recording: Path | None) -> Generate:
    def generate(prompts: torch.Tensor, num_tokens: int) -> Timed:
        made = engine.generate(input_ids=prompts, max_new_tokens=num_tokens, record=recording, overwrite=True)
        return Timed([list(row) for row in made.token_ids], made.prefill_s, made.decode_s / (num_tokens - 1))

    return generate


def _table(results: Results, model: Any, batch: int, prompt: int, dtype: str) -> list[str]:
    speed, rate = statistics.median(results.speeds), statistics.median(results.rates)
    prefill_s, token_s = _bounds(model, batch, prompt, speed, rate)
    medians = {
        name: (statistics.median(t.prefill_s for t in times), statistics.median(t.token_s for t in times))
        for name, times in results.times.items()
    }
    lines = [
        f"batch {batch}, prompt {prompt}: load average {os.getloadavg()[0]:.0f}, memory {speed / 1e9:.1f} GB/s, "
        f"{dtype} products {rate / 1e9:.0f} Gflop/s",
        f"{'':30s} {'prefill ms':>10s} {'ratio':>6s} {'roofline':>8s} {'ms/token':>9s} {'ratio':>6s} {'roofline':>8s}"
        f" {'same tokens':>11s}",
    ]
    expected = results.times[BASELINE][-1].tokens
    for name, (first, later) in medians.items():
        lines.append(
            f"{name:30s} {first * 1e3:10.1f} {medians[BASELINE][0] / first:6.2f} {prefill_s / first:8.0%} "
            f"{later * 1e3:9.2f} {medians[BASELINE][1] / later:6.2f} {token_s / later:8.0%} "
            f"{_agreement(expected, results.times[name][-1].tokens):11.0%}"
        )
    return [*lines, *results.notes]


def _bounds(model: Any, batch: int, prompt: int, speed: float, rate: float) -> tuple[float, float]:
    """Return the least seconds of a prefill and of a decode step."""
    config = model.config
    inner = [parameter for name, parameter in model.named_parameters() if "layers." in name]
    head = model.get_output_embeddings().weight
    weights = sum(parameter.nbytes for parameter in inner) + head.nbytes
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * head.element_size()
    read = weights + batch * (prompt + NEW_TOKENS // 2) * values
    layers = sum(parameter.numel() for parameter in inner)
    first, later = (2 * batch * (tokens * layers + head.numel()) for tokens in (prompt, 1))
    return max(first / rate, weights / speed), max(later / rate, read / speed)


def _agreement(expected: list[list[int]], found: list[list[int]]) -> float:
    pairs = [pair for ours, theirs in zip(expected, found, strict=True) for pair in zip(ours, theirs, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)
