"""vLLM itself, in the interpreter that GLASS_SERVING_PYTHON names: `make test-serving`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import glassengine as glass
from glassengine.commands import record_served
from glassengine.plugins.serving.vllm.candidate import INSIDE
from glassengine.plugins.serving.vllm.inside.glassengine_vllm_run import ENVIRONMENT
from glassengine.results import Comparison
from glassengine.testing.checkpoints import save_small

PYTHON = os.environ.get("GLASS_SERVING_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="make test-serving installs the engines, and names their interpreter"
)

LONG, SHORT = [(i * 37 + 11) % 250 + 5 for i in range(70)], [7, 99, 3, 200, 41, 17, 5, 88, 120]
AT_ONCE = ["together"]
BOTH = ["alone", "together"]
# family -> mistake -> ways of running, step of the first divergence, where it is
PLANTS: dict[str, dict[str, tuple[list[str], int, str]]] = {
    "llama": {
        "rope_base": (BOTH, 0, "model.rotary_emb/mul.0|model.layers.0.self_attn/add."),
        "swapped_gate": (BOTH, 0, "model.layers.1.mlp.gate_proj/linear.0"),
        "eps": (BOTH, 0, "model.layers.1.post_attention_layernorm/"),
        "norm_plus_one": (BOTH, 0, "model.layers.0.input_layernorm/mul.1"),
        "attention_scale": (BOTH, 0, "model.layers.1.self_attn/"),
        "unpermuted_queries": (BOTH, 0, "model.layers.0.self_attn.q_proj/linear.0"),
        "keys_for_values": (BOTH, 0, "model.layers.1.self_attn.k_proj/linear.0"),
        "scaled_block": (BOTH, 0, "model.layers.0.mlp.down_proj/linear.0"),
        "lost_residual": (BOTH, 0, "model.layers.1/add.0"),
        "embedding_row": (BOTH, 0, "model.embed_tokens/embedding.0"),
        "head_rows": (BOTH, 0, "lm_head/linear.0"),
        # It writes in the wrong place in step 1, and the attention of that step reads there.
        "cache_slot": (BOTH, 1, "model.layers.0.self_attn/"),
        "chunk_positions": (AT_ONCE, 0, "model.layers.0.self_attn/add."),
        "exchanged_rows": (AT_ONCE, 1, "model.layers.1.self_attn/"),
        "exchanged_logits": (AT_ONCE, 0, "lm_head/linear.0"),
        "stale_prefix": (AT_ONCE, 0, "model.layers.0.self_attn/"),
    },
    "qwen2": {"missing_bias": (BOTH, 0, "model.layers.1.self_attn.q_proj/linear.0")},
    "qwen3": {"query_norm_eps": (BOTH, 0, "model.layers.1.self_attn.q_norm/")},
    "mistral": {"window_ignored": (BOTH, 0, "model.layers.1.self_attn/")},
    "gemma3": {},
    "mixtral": {
        "scaled_experts": (BOTH, 0, "model.layers.1.mlp"),
        "router_rows": (BOTH, 0, "model.layers.0.mlp.gate/linear.0"),
    },
    "qwen3-moe": {},
    "phi3": {},
    "gpt2": {
        "another_gelu": (BOTH, 0, "transformer.h.0.mlp.act/"),
        "gpt2_positions": (BOTH, 0, "transformer.wpe/embedding.0"),
    },
}


def judged(
    family: str, folder: Path, plants: dict[str, list[str]], *, label: str = "", **options: Any
) -> Iterator[tuple[str, str, Comparison, str]]:
    """Run a model with each mistake in each way, and yield mistake, way, what is found, and where it is said to be."""
    from tests.serving_engines.store import record

    checkpoint = save_small(family, folder / "checkpoint")
    record(PYTHON, checkpoint, folder / "raw", plants, [LONG, SHORT], **options)
    for name, ways in plants.items():
        for way in ways:
            found = glass.check(checkpoint, candidate=folder / "raw" / name / way)
            first = found.first_divergence
            at = f"step {first.step} {first.site}" if first is not None else found.verdict
            # The table of benchmarks/results/serving.txt.
            print(f"{family:10} {name:20} {way:10} {at}  {label}".rstrip())  # noqa: T201
            if name == "healthy":
                assert found.ok and found.coverage == 1.0 and not found.origins, (way, at, found.not_ok_because)
            yield name, way, found, at


@pytest.mark.parametrize("family", PLANTS)
def test_right_ones_raise_no_alarm_and_planted_mistakes_are_named(family: str, tmp_path: Path) -> None:
    plants = {"healthy": BOTH, **{name: ways for name, (ways, _, _) in PLANTS[family].items()}}
    unnamed = []
    for name, way, found, at in judged(family, tmp_path, plants):
        if name == "healthy":
            continue
        _, step, places = PLANTS[family][name]
        first = found.first_divergence
        if found.ok or first is None or first.step != step or not first.site.startswith(tuple(places.split("|"))):
            unnamed.append(f"{name}, {way}: {at}")
    assert not unnamed


# Mistakes that are smaller than its roundings are not in it.
IN_BFLOAT16 = ["healthy", "rope_base", "swapped_gate", "attention_scale", "keys_for_values", "lost_residual"]
IN_BFLOAT16 += ["cache_slot"]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_bfloat16_raises_no_alarm_and_mistakes_are_named_in_it(family: str, tmp_path: Path) -> None:
    plants = dict.fromkeys(IN_BFLOAT16 if family == "llama" else IN_BFLOAT16[:1], BOTH)
    for name, _, found, at in judged(family, tmp_path, plants, label="bfloat16", dtype="bfloat16"):
        if name != "healthy":
            _, step, places = PLANTS[family][name]
            first = found.first_divergence
            assert first is not None and first.step == step and first.site.startswith(tuple(places.split("|"))), at


def test_a_recording_and_a_server_in_service_are_judged(tmp_path: Path) -> None:
    checkpoint = save_small("llama", tmp_path / "checkpoint")
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps({"input_ids": [SHORT]}))
    given = {"inputs": str(ids), "max_new_tokens": 3, "python": PYTHON}
    record_served(f"vllm:{checkpoint}", tmp_path / "recorded", **given, dtype="bfloat16", as_deployed=True)
    assert glass.check(checkpoint, candidate=tmp_path / "recorded").ok
    with served(checkpoint, tmp_path / "served", tmp_path / "log") as url:
        for prompt in (SHORT, LONG, SHORT[:5]):
            body = {"model": str(checkpoint), "prompt": prompt, "max_tokens": 3, "temperature": 0}
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())  # noqa: S310
            request.add_header("content-type", "application/json")
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 (of this machine)
                assert json.load(answer)["usage"]["completion_tokens"] == 3
    found = glass.check(checkpoint, candidate=tmp_path / "served")
    assert found.ok and found.coverage == 1.0, found.not_ok_because
    assert len(found.inputs) == 3, "each request is a case"


@contextmanager
def served(checkpoint: Path, folder: Path, log: Path) -> Iterator[str]:
    """Serve a checkpoint with the plug-in and nothing else of ours; yield where."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(INSIDE), "GLASSENGINE_VLLM_RECORD": str(folder)}
    # As a server runs: the model in a process of its own. The wheel for processors has no working `vllm` command.
    env = {name: value for name, value in env.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    line = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint), "--port", str(port)]
    line += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "128", "--skip-tokenizer-init"]
    with log.open("wb") as said:
        server = subprocess.Popen([*line, "--host", "127.0.0.1"], env=env, stdout=said, stderr=said)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            assert server.poll() is None, log.read_text()[-3000:]
            with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):  # noqa: S310
                break
            time.sleep(1)
        yield url
    finally:
        server.terminate()
        server.wait(60)


# Of the graph that vLLM compiles, at the op: what a hook shows as one region is one operation here.
IN_GRAPH = {
    "attention_scale": (0, "model.layers.1.self_attn/"),
    "cache_slot": (1, "model.layers.0.self_attn/"),
    "rope_base": (0, "model.rotary_emb/"),
    "norm_plus_one": (0, "model.layers.0.input_layernorm/mul.1"),
}
OF_CHECKPOINT = {
    "rms_norm_eps": (1e-3, "model.layers.0.input_layernorm/add.0"),
    "rope_theta": (500000.0, "model.rotary_emb/"),
    "exchanged": (None, "model.layers.1.mlp.gate_proj/linear.0"),
    "scaled": (None, "model.layers.1.post_attention_layernorm/mul.1"),
}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_the_graph_that_it_compiles_raises_no_alarm_and_shows_the_op(family: str, tmp_path: Path) -> None:
    plants = {"healthy": BOTH, **(dict.fromkeys(IN_GRAPH, BOTH[:1]) if family == "llama" else {})}
    for name, _, found, at in judged(family, tmp_path, plants, label="graph", graph=True):
        if name == "healthy":
            assert max(one.op_by_op for one in found.granularity) > 0.3
            continue
        step, place = IN_GRAPH[name]
        first = found.first_divergence
        assert first is not None and first.step == step and first.site.startswith(place), at


@pytest.mark.parametrize("name", OF_CHECKPOINT)
def test_another_checkpoint_is_named_at_the_op(name: str, tmp_path: Path) -> None:
    right, other = save_small("llama", tmp_path / "right"), save_small("llama", tmp_path / "other")
    value, place = OF_CHECKPOINT[name]
    if value is None:
        weights = load_file(other / "model.safetensors")
        layer = "model.layers.1"
        if name == "exchanged":
            gate, up = (f"{layer}.mlp.{one}_proj.weight" for one in ("gate", "up"))
            weights[gate], weights[up] = weights[up], weights[gate]
        else:
            weights[f"{layer}.post_attention_layernorm.weight"] += 1
        save_file(weights, other / "model.safetensors", {"format": "pt"})
    else:
        config = json.loads((other / "config.json").read_text())
        of = config["rope_parameters"] if name == "rope_theta" else config
        assert name in of
        of[name] = value
        (other / "config.json").write_text(json.dumps(config))
    found = glass.check(right, candidate=f"vllm:{other}", python=PYTHON, steps=1)
    first = found.first_divergence
    assert not found.ok and first is not None and first.step == 0 and first.site.startswith(place), first
    print(f"llama      {name:20} alone      step 0 {first.site}  graph, checkpoint")  # noqa: T201 - as above


def test_the_command_runs_vllm_alone_and_at_once(tmp_path: Path) -> None:
    checkpoint = save_small("llama", tmp_path / "checkpoint")
    found = glass.check(checkpoint, candidate=f"vllm:{checkpoint}", python=PYTHON, steps=2)
    assert found.ok and found.coverage == 1.0 and found.verdict == "rounding", found.not_ok_because
    assert [level.name for level in found.levels] == ["program", "record", "record as deployed"]
