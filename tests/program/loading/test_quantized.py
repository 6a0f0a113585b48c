"""Quantized checkpoints: every format is read as its documentation says, and what is not read is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.program import load_model
from glassengine.program.loading.quantized import is_quantized, quantization_steps
from glassengine.program.loading.quantized_grid import unpack
from glassengine.testing import models
from tests.quantized import gptq_tensors, round_to_nearest, save_quantized

WEIGHT = "model.layers.0.mlp.up_proj.weight"


def edit(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the settings of the quantization."""
    config = json.loads((directory / "config.json").read_text())
    change(config["quantization_config"])
    (directory / "config.json").write_text(json.dumps(config))


def replace(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("gptq", {"bits": 2}),
        ("gptq", {"bits": 3}),
        ("gptq", {}),
        ("gptq", {"bits": 8}),
        ("gptq", {"version": 2}),
        ("awq", {}),
        ("compressed-tensors", {}),
        ("compressed-tensors", {"bits": 3}),
        ("torchao", {}),
        ("torchao", {"bits": 8}),
        ("bitsandbytes", {}),
        ("fp8", {}),
        ("fp8", {"group_size": 48}),
    ],
)
def test_every_weight_is_what_its_codes_stand_for(method: str, options: dict[str, Any], tmp_path: Path) -> None:
    expected = save_quantized(models.llama(), tmp_path, method, **options)
    loaded = load_model(tmp_path)
    parameters = dict(loaded.module.named_parameters())
    # One number of torchao's int4 is added, not subtracted before the product: float32 rounds once more.
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if (method, options) == ("torchao", {}) else {"rtol": 0.0, "atol": 0.0}
    for name, value in expected.items():
        torch.testing.assert_close(parameters[name].data, value, **tolerance)
    untouched = models.llama().get_parameter("model.layers.0.input_layernorm.weight")
    assert torch.equal(parameters["model.layers.0.input_layernorm.weight"], untouched)
    assert loaded.metadata["quantization"] == {"method": method, "num_weights": 14}
    assert len(expected) == 14 and loaded.dtype == "float32" and loaded.kind == "causal_lm"


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "torchao", "bitsandbytes", "fp8"])
def test_rounding_to_nearest_is_within_half_a_step(method: str, tmp_path: Path) -> None:
    model = models.llama()
    expected = save_quantized(model, tmp_path, method)
    steps = quantization_steps(tmp_path)
    assert steps.keys() == expected.keys()
    for name, value in expected.items():
        step = steps[name].float()
        errors = ((value - model.get_parameter(name).data).abs() / step.abs())[step > 0]
        # Scales are stored in half precision, steps in bfloat16, scales of bitsandbytes in 8 bits.
        assert errors.max() < 0.56, name
        assert errors.square().mean().sqrt() > 0.2, name


def test_groups_of_inputs_in_any_order(tmp_path: Path) -> None:
    """GPTQ with act-order: `g_idx` is no ramp."""
    expected = save_quantized(models.llama(), tmp_path, "gptq")
    order = torch.arange(64).reshape(2, 32).T.flatten()  # inputs of the two groups alternate

    def shuffle(tensors: dict[str, Tensor]) -> None:
        name = WEIGHT.removesuffix("weight")
        codes = unpack(tensors[f"{name}qweight"].T, 4, 64)[:, order]
        shifts = torch.arange(8) * 4
        packed = (codes.reshape(len(codes), -1, 8).long() << shifts).sum(-1)
        tensors[f"{name}qweight"] = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int().T.contiguous()
        tensors[f"{name}g_idx"] = tensors[f"{name}g_idx"][order]

    replace(tmp_path, shuffle)
    assert torch.equal(load_model(tmp_path).module.get_parameter(WEIGHT).data, expected[WEIGHT][:, order])


def test_experts_are_stacked_as_transformers_does(tmp_path: Path) -> None:
    """Checkpoints hold an expert's matrices one by one, the module holds them in one parameter; steps follow."""
    model = models.mixtral()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.2.w1"
    weight = tensors.pop(f"{name}.weight")
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    save_file(tensors | {f"{name}.weight": codes, f"{name}.weight_scale": scale}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": groups,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    stacked = load_model(tmp_path).module.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    original = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    half = len(codes)
    assert torch.equal(stacked[2, :half], codes * scale)
    assert torch.equal(stacked[2, half:], original[2, half:]) and torch.equal(stacked[0], original[0])
    step = quantization_steps(tmp_path)["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(step[2, :half].abs(), scale.bfloat16().expand(codes.shape))
    assert not step[0].any() and not step[2, half:].any()


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_layers_that_keep_their_inputs_first(prefix: str, tmp_path: Path) -> None:
    """GPT-2's Conv1D holds [inputs, outputs]; formats hold [outputs, inputs], also of a square matrix."""
    model: Any = models.gpt2()
    model.save_pretrained(tmp_path)
    tensors = {
        prefix + name.removeprefix("transformer."): value
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    weight = tensors.pop(f"{prefix}h.0.attn.c_proj.weight").T
    codes, scale, zero = round_to_nearest(weight, 8, 32)
    parts = gptq_tensors(codes, scale, zero, 8)
    tensors |= {f"{prefix}h.0.attn.c_proj.{name}": value for name, value in parts.items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    name = "transformer.h.0.attn.c_proj.weight"
    found = load_model(tmp_path).module.get_parameter(name)
    assert weight.shape[0] == weight.shape[1] and (found.T - weight).abs().max() < 0.01
    errors = (found - model.get_parameter(name)).abs() / quantization_steps(tmp_path)[name].float().abs()
    assert 0.4 < errors.quantile(0.95) < 0.6


def test_biases_that_have_no_place(tmp_path: Path) -> None:
    """Some packages write a bias of zeros beside every matrix."""
    save_quantized(models.llama(), tmp_path, "gptq")
    name = WEIGHT.replace("weight", "bias")
    replace(tmp_path, lambda tensors: tensors.update({name: torch.zeros(128)}))
    load_model(tmp_path)
    replace(tmp_path, lambda tensors: tensors.update({name: torch.ones(128)}))
    with pytest.raises(UsageError, match=r"biases that its model has no place for\n.*up_proj.bias"):
        load_model(tmp_path)


def test_dtype_is_that_of_the_checkpoint_or_the_one_asked_for(tmp_path: Path) -> None:
    model: Any = models.llama().half()
    model.config.dtype = torch.float16
    expected = save_quantized(model, tmp_path, "gptq")
    assert load_model(tmp_path).dtype == "float16"
    wide = load_model(tmp_path, dtype="float32").module.get_parameter(WEIGHT).data
    assert torch.equal(wide, expected[WEIGHT])
    assert torch.equal(load_model(tmp_path).module.get_parameter(WEIGHT).data, expected[WEIGHT].half())


def test_names_are_listed_without_weights(tmp_path: Path) -> None:
    save_quantized(models.llama(), tmp_path, "awq")
    (tmp_path / "model.safetensors").unlink()
    assert load_model(tmp_path, weights=False).module.get_parameter(WEIGHT).device.type == "meta"
    assert is_quantized(tmp_path) and not is_quantized(tmp_path / "nothing") and not is_quantized(models.llama())


def test_quantized_activations_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(models.llama(), tmp_path / "weights", "gptq")
    save_quantized(models.llama(), tmp_path / "both", "fp8")
    with caplog.at_level(logging.WARNING, "glassengine"):
        load_model(tmp_path / "weights")
        assert not caplog.records
        load_model(tmp_path / "both")
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'both'} also quantizes activations, which are not quantized here"
    ]


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("gptq", {"quant_method": "hqq"}, r"a format that is not read[\s\S]*hqq[\s\S]*gptq, awq[\s\S]*save_pretrained"),
        ("gptq", {"checkpoint_format": "marlin"}, r"GPTQ packing is not read[\s\S]*marlin"),
        ("awq", {"version": "gemv"}, r"AWQ packing is not read[\s\S]*gemv"),
        ("awq", {"bits": 3}, r"AWQ packing is not read[\s\S]*3 bits"),
        ("compressed-tensors", {"format": "marlin-24"}, r"compressed-tensors format is not read[\s\S]*marlin-24"),
        ("compressed-tensors", {"transform_config": {"R1": {}}}, "rotations"),
        ("compressed-tensors", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity"),
    ],
)
def test_unsupported_quantizations_are_refused(
    method: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_quantized(models.llama(), tmp_path, method)
    edit(tmp_path, lambda found: found.update(settings))
    with pytest.raises(UsageError, match=message):
        load_model(tmp_path)


def test_a_class_of_torchao_that_is_not_read(tmp_path: Path) -> None:
    save_quantized(models.llama(), tmp_path, "torchao")
    tensors = load_file(tmp_path / "model.safetensors")
    header = {WEIGHT: json.dumps({"_type": "Int4TilePackedTo4dTensor", "_data": {}})}
    save_file(tensors, tmp_path / "model.safetensors", header)
    with pytest.raises(UsageError, match=r"torchao class of .*up_proj.weight is not read[\s\S]*Int4TilePackedTo4d"):
        load_model(tmp_path)


def test_pickled_objects_are_not_read(tmp_path: Path) -> None:
    save_quantized(models.llama(), tmp_path, "torchao")
    (tmp_path / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"objects of torchao[\s\S]*safetensors"):
        load_model(tmp_path)


def cut(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:-1].contiguous()

    return change


@pytest.mark.parametrize(
    ("method", "part", "change"),
    [
        ("gptq", "qweight", cut),
        ("gptq", "qzeros", cut),
        ("gptq", "scales", cut),
        ("gptq", "g_idx", cut),
        ("gptq", "g_idx", lambda name: lambda tensors: tensors.update({name: torch.full((64,), -1).int()})),
        ("gptq", "scales", lambda name: lambda tensors: tensors.pop(name)),
        ("awq", "qzeros", cut),
        ("awq", "scales", cut),
        ("awq", "qweight", lambda name: lambda tensors: tensors.update({name: tensors[name].long()})),
        ("compressed-tensors", "weight_packed", cut),
        ("compressed-tensors", "weight_scale", cut),
        (
            "compressed-tensors",
            "weight_shape",
            lambda name: lambda tensors: tensors.update({name: torch.tensor([128, 1 << 50])}),
        ),
        ("torchao", "_weight_scale", cut),
        ("awq", "qweight", lambda name: lambda tensors: tensors.update({name: tensors[name].repeat(2, 1)})),
        ("bitsandbytes", "weight", cut),
        ("bitsandbytes", "weight.absmax", cut),
        ("bitsandbytes", "weight.quant_state.bitsandbytes__nf4", cut),
        ("fp8", "weight_scale_inv", cut),
    ],
)
def test_damage_is_found(method: str, part: str, change: Callable[[str], Any], tmp_path: Path) -> None:
    save_quantized(models.llama(), tmp_path, method)
    name = WEIGHT.removesuffix("weight") + part
    header = {WEIGHT: json.dumps({"_type": "Int4Tensor", "_data": {}})} if method == "torchao" else None
    tensors = load_file(tmp_path / "model.safetensors")
    change(name)(tensors)
    save_file(tensors, tmp_path / "model.safetensors", header)
    with pytest.raises(GlassError) as caught:
        load_model(tmp_path)
    assert isinstance(caught.value, CorruptError), caught.value


def test_settings_without_quantized_weights(tmp_path: Path) -> None:
    models.llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UsageError, match=r"holds no quantized weight\n.*remove quantization_config"):
        load_model(tmp_path)
