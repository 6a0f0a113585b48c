"""What is asked for: alias files, casts, and names from other listings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import glassengine as glass
from glassengine.engine import Engine, build_program
from glassengine.engine.store.manifest import FILE, read_manifest
from glassengine.engine.store.requests import OutputRequest, find_sites, read_requests
from glassengine.errors import UnknownNameError, UsageError
from glassengine.program import Program

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
