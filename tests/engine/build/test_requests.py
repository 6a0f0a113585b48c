"""What is asked for: alias files, casts, and names from other listings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.engine import Engine, build_program
from glassengine.engine.build.requests import OutputRequest, find_sites, read_requests, require_agreement
from glassengine.engine.manifest import FILE, read_manifest
from glassengine.errors import UnknownNameError, UsageError
from glassengine.program import Program, load_model
from glassengine.program.export.export import export_causal_lm
from glassengine.testing import models

QKV = "LLaMAForCausalLM/transformer/layers/1/attention/qkv/multiply_collect_L272/matmul_L1048/cast_L855/CAST_0"
PLUGIN = "LLaMAForCausalLM/transformer/layers/1/attention/wrapper_L561/gpt_attention_L5154/PLUGIN_V2_GPTAttention_0"


def test_alias_file(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    path.write_text(json.dumps({"layers.*.mlp": "mlp", "mm_default": "q", "re:a=b": "c"}))
    assert read_requests(["lm_head", f"@{path}", "x=y:float32"]) == [
        OutputRequest("lm_head"),
        OutputRequest("layers.*.mlp", "mlp"),
        OutputRequest("mm_default", "q"),
        OutputRequest("re:a=b", "c"),
        OutputRequest("x", "y", "float32"),
    ]
    path.write_text(json.dumps({"layers.*.mlp": "mlp"}))
    engine = build_program(program, tmp_path / "e", backend="eager", outputs=[f"@{path}"])
    assert list(engine.added_outputs) == ["mlp_0", "mlp_1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a JSON object"), ('["a"]', "not a JSON object"), ('[["a", "b"]]', "not a JSON object"),
        ('{"a": 1}', "not a JSON object"), ('{"a": ""}', "not a JSON object"), ('{"a": "b", "a": "c"}', "twice"),
        ("[" * 100_000, "not a JSON object"),
    ],
)  # fmt: skip
def test_damaged_alias_file(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "names.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        read_requests([f"@{tmp_path / 'names.json'}"])


def test_missing_alias_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read") as caught:
        read_requests([f"@{tmp_path / 'nothing.json'}"])
    assert caught.value.hint == "--add-output @FILE.json"


def test_cast_on_reading_is_recorded(program: Program, engine: Engine, tmp_path: Path) -> None:
    requests = ["layers.0.mlp=own", "layers.0.mlp=half:bfloat16", "model.layers.0.self_attn/view.0=v:float64"]
    built = build_program(program, tmp_path / "e", backend="eager", outputs=requests)
    manifest, intact, _ = read_manifest(tmp_path / "e")
    assert intact
    assert [(entry.name, entry.dtype, entry.cast_from) for entry in manifest.added_outputs] == [
        ("own", "float32", None), ("half", "bfloat16", "float32"), ("v", "float64", "float32"),
    ]  # fmt: skip
    session = built.session(1, 8, debug=True)
    session.prefill(torch.tensor([[3, 4, 5]]))
    buffers = session.debug_buffers
    assert buffers["own"].dtype is torch.float32 and buffers["v"].dtype is torch.float64
    assert torch.equal(buffers["half"], buffers["own"].bfloat16())


def test_cast_of_a_module(tmp_path: Path) -> None:
    inputs = {"input": torch.randn(2, 4)}
    engine = glass.build(
        torch.nn.Linear(4, 4), tmp_path / "e", backend="eager", inputs=inputs, add_output=["linear=x:float16"]
    )
    results = engine(**inputs)
    assert torch.equal(results["x"], results["output"].half())


def test_engines_from_before_casts_are_read(engine: Engine, copy: Path) -> None:
    data = json.loads((copy / FILE).read_text())
    assert [entry.pop("cast_from") for entry in data["added_outputs"]] == [None] * len(data["added_outputs"])
    (copy / FILE).write_text(json.dumps(data))
    assert read_manifest(copy)[0] == engine.manifest


@pytest.mark.parametrize(
    ("name", "expected", "hint"),
    [
        ("linear/MatMul_0", "a part of linear (model.layers.0.self_attn.q_proj/linear.0)", "--add-output linear"),
        ("shared/Shape_3", "serves several", "the layer that uses it"),
        ("cpp_fused_add_mul_0:3", "the kernel computes", "--add-output NODE"),
        ("aoti_torch_cpu__linear_pointwise:14", "the kernel computes", "<backend>_network_def.py"),
        (QKV, "layer 1, nearest first: model.layers.1.self_attn.q_proj/linear.0 (linear_7)", "glass sites"),
        (PLUGIN, "model.layers.1.self_attn/scaled_dot_product_attention.0", "glass sites"),
        ("a/b/layers/77/c", "names", "glass sites"),
    ],
)
def test_names_of_other_listings(program: Program, name: str, expected: str, hint: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        find_sites(program.sites, name)
    assert name in str(caught.value)
    assert expected in str(caught.value) and hint in str(caught.value)


def test_layer_called_like_its_node_is_taken(program: Program) -> None:
    assert [site.name for site in find_sites(program.sites, "linear")] == ["model.layers.0.self_attn.q_proj/linear.0"]


def test_unmatched_entry_of_the_variable_is_an_error(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTLLM_ADD_OUTPUT", json.dumps({QKV: "mm_default"}))
    with pytest.raises(UnknownNameError, match=r"model\.layers\.1\.self_attn\.q_proj/linear\.0"):
        glass.build(checkpoint, tmp_path / "e", backend="eager")
    assert not (tmp_path / "e").exists()


_GPT_NEO = {
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 64,
    "window_size": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _gpt_neo(kinds: list[str]) -> Any:
    settings = {**_GPT_NEO, "attention_types": [[kinds, 1]]}
    return models.from_config("GPTNeoForCausalLM", "GPTNeoConfig", settings)


def test_a_window_that_is_counted_from_the_end_of_the_cache(tmp_path: Path) -> None:
    # Its local attention cuts its mask by the length of the cache, which is that of the text in transformers alone.
    with pytest.raises(UsageError, match=r"would not generate[\s\S]*glass check .* names the operation"):
        glass.build(_gpt_neo(["global", "local"]), tmp_path / "engine", backend="eager")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_check_does_not_ask_and_tells_where() -> None:
    found = glass.check(_gpt_neo(["global", "local"]), backend="eager", steps=1)
    assert found.first_divergence is not None
    assert found.first_divergence.site.startswith("transformer.h.1.attn")


def test_rounding_is_no_reason() -> None:
    # Rounding to bfloat16 is large, and may choose another expert.
    model = load_model(models.mixtral(), dtype="bfloat16")
    program = export_causal_lm(model.module, metadata=model.metadata)
    require_agreement(model, program, 96)
    _spoil(program)
    with pytest.raises(UsageError, match="would not generate"):
        require_agreement(model, program, 96)


def _spoil(program: Program) -> None:
    """Add two values of the first layer instead of multiplying them."""
    node = next(
        node for node in program.graph.nodes if node.target is torch.ops.aten.mul.Tensor and len(node.args) == 2
    )
    assert isinstance(node.args[1], torch.fx.Node)
    node.target = torch.ops.aten.add.Tensor
    program.exported.graph_module.recompile()


def test_a_model_that_counts_its_positions_anew_in_each_step_is_told_them() -> None:
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
    }
    model = load_model(models.from_config("BambaForCausalLM", "BambaConfig", settings))
    require_agreement(model, export_causal_lm(model.module, metadata=model.metadata), 32)
