"""LoRA adapters: the merged model computes what the adapter beside the untouched base gives, module by module."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from glassengine.errors import CorruptError, UnknownNameError, UsageError
from glassengine.program import load_model
from glassengine.testing import models

pytest.importorskip("peft")

IDS = torch.randint(3, 250, (2, 7), generator=torch.Generator().manual_seed(3))
Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
GPT = "transformer.h.0.attn.c_attn"


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2


def save_adapter(directory: Path, tensors: Mapping[str, Tensor], base: str | Path = "base", **settings: Any) -> Path:
    """Write an adapter as peft does."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "lora_alpha": 6, **settings}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {f"base_model.model.{name}": value.contiguous() for name, value in tensors.items()},
        directory / "adapter_model.safetensors",
    )
    return directory


def lora(path: str, inputs: int, outputs: int, rank: int = 4) -> dict[str, Tensor]:
    seed = sum(path.encode())
    return {f"{path}.lora_A.weight": drawn(rank, inputs, seed=seed), f"{path}.lora_B.weight": drawn(outputs, rank)}


def beside(model: nn.Module, tensors: Mapping[str, Tensor], scaling: Mapping[str, float]) -> Tensor:
    """Return the logits of `model` with the two small products added to the results of its modules."""

    def added(path: str, module: nn.Module, args: tuple[Any, ...], result: Tensor) -> Tensor:
        if isinstance(module, nn.Embedding):
            a, b = (tensors[f"{path}.lora_embedding_{kind}"] for kind in "AB")
            return result + scaling[path] * (a.T[args[0]] @ b.T)
        a, b = (tensors[f"{path}.lora_{kind}.weight"] for kind in "AB")
        small = scaling[path] * ((args[0] @ a.T) @ b.T)
        magnitude = tensors.get(f"{path}.lora_magnitude_vector")
        if magnitude is None:
            return result + small
        weight: Any = module.weight
        bias: Any = module.bias if module.bias is not None else 0.0
        rows = weight if isinstance(module, nn.Linear) else weight.T
        sizes = torch.linalg.vector_norm(rows + scaling[path] * (b @ a), dim=1)
        return (result - bias + small) * magnitude / sizes + bias

    model = copy.deepcopy(model)
    for path in scaling:
        module = model.get_submodule(path)
        module.register_forward_hook(lambda module, args, result, path=path: added(path, module, args, result))
    with torch.no_grad():
        logits: Tensor = model(IDS).logits
    return logits


def logits_of(model: nn.Module, adapter: Path) -> Tensor:
    with torch.no_grad():
        found: Tensor = load_model(model, adapter=adapter).module(IDS).logits
    return found


@pytest.mark.parametrize(
    ("family", "tensors", "settings", "scaling"),
    [
        ("llama", lora(Q, 64, 64) | lora(V, 64, 32), {}, {Q: 1.5, V: 1.5}),
        ("llama", lora(Q, 64, 64) | lora(V, 64, 32), {"use_rslora": True}, {Q: 3.0, V: 3.0}),
        # peft asks whether it is true; what it divides by must be a number, but a whole one may be written as 6.0.
        ("llama", lora(Q, 64, 64), {"use_rslora": 1, "use_dora": 0, "lora_alpha": 6.0}, {Q: 3.0}),
        (
            "llama",
            lora(Q, 64, 64, 2) | lora(V, 64, 32, 8),
            {"rank_pattern": {"q_proj": 2, "v_proj": 8}, "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 5, "k": 1}},
            {Q: 2.5, V: 0.75},
        ),
        ("gpt2", lora(GPT, 64, 192), {"fan_in_fan_out": True}, {GPT: 1.5}),
        ("gpt2", lora(GPT, 64, 192), {}, {GPT: 1.5}),
        ("llama", lora(Q, 64, 64) | {f"{Q}.lora_magnitude_vector": 1 + drawn(64)}, {"use_dora": True}, {Q: 1.5}),
        ("gpt2", lora(GPT, 64, 192) | {f"{GPT}.lora_magnitude_vector": 1 + drawn(192)}, {"use_dora": True}, {GPT: 1.5}),
        (
            "llama",
            {"model.embed_tokens.lora_embedding_A": drawn(4, 256), "model.embed_tokens.lora_embedding_B": drawn(64, 4)},
            {},
            {"model.embed_tokens": 1.5},
        ),
    ],
    ids=["linear", "rslora", "numbers", "patterns", "Conv1D", "Conv1D-unsaid", "DoRA", "DoRA-Conv1D", "embedding"],
)
def test_merged_is_what_the_adapter_does_beside_the_base(
    family: str, tensors: dict[str, Tensor], settings: dict[str, Any], scaling: dict[str, float], tmp_path: Path
) -> None:
    model = models.CAUSAL_LMS[family]()
    before = copy.deepcopy(model.state_dict())
    found = logits_of(model, save_adapter(tmp_path, tensors, **settings))
    torch.testing.assert_close(found, beside(model, tensors, scaling), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert (found - model(IDS).logits).abs().max() > 0.1  # it does something
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_scaling_is_in_one_weight_exactly(tmp_path: Path) -> None:
    model, tensors = models.llama(), lora(Q, 64, 64)
    merged = load_model(model, adapter=save_adapter(tmp_path, tensors)).module
    a, b = (tensors[f"{Q}.lora_{kind}.weight"].double() for kind in "AB")
    expected = model.get_parameter(f"{Q}.weight").double() + 6 / 4 * b @ a
    torch.testing.assert_close(merged.get_parameter(f"{Q}.weight").double(), expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(expected, model.get_parameter(f"{Q}.weight").double(), atol=0.1)


def test_modules_that_were_trained_whole_and_biases(tmp_path: Path) -> None:
    model = models.gpt2()
    head, bias = drawn(256, 64), drawn(192)
    names = ("lm_head.modules_to_save.default.weight", "lm_head.weight")
    for index, name in enumerate(names):  # old and new names of peft
        tensors = lora(GPT, 64, 192) | {name: head, f"{GPT}.base_layer.bias": bias}
        directory = save_adapter(tmp_path / str(index), tensors, modules_to_save=["lm_head"], bias="lora_only")
        merged = load_model(model, adapter=directory).module
        assert torch.equal(merged.get_parameter("lm_head.weight"), head)
        assert torch.equal(merged.get_parameter(f"{GPT}.bias"), bias)
        # GPT-2 ties its embeddings to the head: they stay what they were.
        assert torch.equal(
            merged.get_parameter("transformer.wte.weight"), model.get_parameter("transformer.wte.weight")
        )


def test_a_bias_of_the_adapter_itself_is_scaled(tmp_path: Path) -> None:
    model, bias = models.gpt2(), drawn(192)
    tensors = lora(GPT, 64, 192) | {f"{GPT}.lora_B.bias": bias}
    merged = load_model(model, adapter=save_adapter(tmp_path / "a", tensors, lora_bias=True)).module
    torch.testing.assert_close(merged.get_parameter(f"{GPT}.bias"), model.get_parameter(f"{GPT}.bias") + 1.5 * bias)
    tensors = lora(Q, 64, 64) | {f"{Q}.lora_B.bias": drawn(64)}
    with pytest.raises(UsageError, match=r"another model[\s\S]*base layer has no bias"):
        load_model(models.llama(), adapter=save_adapter(tmp_path / "b", tensors, lora_bias=True))


def test_a_tied_head_alone_is_changed(tmp_path: Path) -> None:
    model = models.llama(tie_word_embeddings=True)
    model.tie_weights()
    tensors = lora("lm_head", 64, 256)
    found = logits_of(model, save_adapter(tmp_path, tensors))
    torch.testing.assert_close(found, beside(model, tensors, {"lm_head": 1.5}), rtol=1e-4, atol=1e-4)


def test_half_precision_is_rounded_once(tmp_path: Path) -> None:
    model, tensors = models.llama().bfloat16(), lora(Q, 64, 64)
    directory = save_adapter(tmp_path, {name: value.half() for name, value in tensors.items()})
    merged = load_model(model, adapter=directory).module.get_parameter(f"{Q}.weight")
    a, b = (tensors[f"{Q}.lora_{kind}.weight"].half().float() for kind in "AB")
    expected = model.get_parameter(f"{Q}.weight").float() + 1.5 * (b @ a)
    assert torch.equal(merged, expected.bfloat16())


# -- a MODEL that is an adapter ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters") / "base"
    models.llama().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("named", ["absolute", "../base"])
def test_an_adapter_names_its_base(base: Path, named: str) -> None:
    tensors = lora(Q, 64, 64)
    directory = save_adapter(base.parent / f"adapter-{named[0]}", tensors, base if named == "absolute" else named)
    alone, both = load_model(directory), load_model(base, adapter=directory)
    assert torch.equal(alone.module.get_parameter(f"{Q}.weight"), both.module.get_parameter(f"{Q}.weight"))
    assert Path(str(alone.directory)).resolve() == base.resolve()
    assert alone.metadata["adapter"] == both.metadata["adapter"] == str(directory)
    assert alone.metadata["fingerprint"] == both.metadata["fingerprint"] != load_model(base).metadata["fingerprint"]
    assert load_model(directory, weights=False).module.get_parameter(f"{Q}.weight").device.type == "meta"


def test_a_base_that_is_named_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "harm.py").write_text(f"def model():\n    open({str(tmp_path / 'ran')!r}, 'w')\n")
    for number, named in enumerate((f"{tmp_path}/harm.py:model", "os:getcwd", "", None)):
        directory = save_adapter(tmp_path / str(number), lora(Q, 64, 64))
        config = json.loads((directory / "adapter_config.json").read_text())
        (directory / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": named}))
        with pytest.raises(UsageError, match=rf"adapter {directory} names [\s\S]*MODEL --adapter {directory}"):
            load_model(directory)
    assert not (tmp_path / "ran").exists()
    gone = save_adapter(tmp_path / "gone", lora(Q, 64, 64), tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"base of the adapter .* is not there\n.*nowhere"):
        load_model(gone)
    with pytest.raises(UsageError, match="two adapters"):
        load_model(save_adapter(tmp_path / "two", {}, tmp_path), adapter=gone)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, r"only LoRA is[\s\S]*IA3[\s\S]*merge_and_unload"),
        ({"init_lora_weights": "pissa_niter_4"}, r"changed the base[\s\S]*pissa"),
        ({"init_lora_weights": "loftq"}, r"changed the base[\s\S]*loftq"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "setting target_parameters is unknown"),
        ({"trainable_token_indices": [1]}, "setting trainable_token_indices is unknown"),
        ({"layer_replication": [[0, 2]]}, "setting layer_replication is unknown"),
        ({"something_of_tomorrow": {"a": 1}}, "setting something_of_tomorrow is unknown"),
    ],
)
def test_unmerged_adapters_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        load_model(models.llama(), adapter=save_adapter(tmp_path, lora(Q, 64, 64), **settings))


def without(name: str) -> Callable[[], dict[str, Tensor]]:
    return lambda: {key: value for key, value in lora(Q, 64, 64).items() if name not in key}


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        (without("lora_A"), CorruptError, r"lacks a matrix\n.*q_proj"),
        (lambda: lora(Q, 64, 64) | lora("model.layers.9.q_proj", 64, 64), UnknownNameError, "1 of 2 modules"),
        (lambda: lora(Q, 32, 64), UsageError, r"another model[\s\S]*size mismatch for .*q_proj.*4, 32.*4, 64"),
        (lambda: {"lm_head.weight": drawn(300, 64)}, UsageError, r"another model: lm_head.weight\n.*300"),
        (lambda: {f"{Q}.bias": drawn(64)}, UsageError, r"sets .*q_proj.bias, which this model does not have"),
        (
            lambda: {f"{Q}.lora_A.weight": drawn(4, 64), f"{Q}.lora_B.weight": drawn(64, 3)},
            UsageError,
            r"another model[\s\S]*size mismatch for .*q_proj",
        ),
        (dict, CorruptError, "is empty"),
        (lambda: lora("model.layers.0.mlp.act_fn", 64, 64), UsageError, r"another model[\s\S]*is not supported"),
    ],
)
def test_an_adapter_that_does_not_fit(
    tensors: Callable[[], dict[str, Tensor]], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        load_model(models.llama(), adapter=save_adapter(tmp_path, tensors()))


def test_without_peft_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    adapter = save_adapter(tmp_path, lora(Q, 64, 64))
    for weights in (True, False):
        with pytest.raises(UsageError, match=r"which is not installed[\s\S]*glassengine\[lora\]"):
            load_model(models.llama(), adapter=adapter, weights=weights)


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path, lora(Q, 64, 64))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(UsageError, match=r"has no weights\n.*adapter_model.bin\n.*adapter_model.safetensors"):
        load_model(models.llama(), adapter=adapter)


@pytest.mark.parametrize(
    "settings", [{"r": 10**12}, {"rank_pattern": {"(a+)+b": 10**12}}, {"target_modules": "(a+)+b"},
                 {"megatron_core": "harm"}, {"exclude_modules": "(a+)+b"}, {"layers_pattern": "(a+)+b"}]
)  # fmt: skip
def test_a_file_decides_neither_over_code_nor_over_memory_or_time(settings: dict[str, Any], tmp_path: Path) -> None:
    model, tensors = models.llama(), lora(Q, 64, 64)
    found = logits_of(model, save_adapter(tmp_path, tensors, **settings))
    torch.testing.assert_close(found, beside(model, tensors, {Q: 1.5}), rtol=1e-4, atol=1e-4)


def test_what_is_trained_stays_trained(tmp_path: Path) -> None:
    model = models.llama()
    model.lm_head.requires_grad_(False)
    merged = load_model(model, adapter=save_adapter(tmp_path, lora(Q, 64, 64))).module
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in merged.named_parameters()} == before
    assert [type(module) for module in merged.modules()] == [type(module) for module in model.modules()]


def test_damaged_adapters(tmp_path: Path) -> None:
    model, tensors = models.llama(), lora(Q, 64, 64)
    with pytest.raises(CorruptError, match=r"lacks a matrix\n.*lora_magnitude_vector"):
        load_model(model, adapter=save_adapter(tmp_path / "dora", tensors, use_dora=True))
    for pattern in ("(a+)+b", "(", "[z"):
        directory = save_adapter(tmp_path / "p", tensors, alpha_pattern={pattern: 3})
        with pytest.raises(CorruptError, match=re.escape(pattern)):
            load_model(model, adapter=directory)
    with pytest.raises(CorruptError, match=r"lora_alpha|scaling"):
        load_model(model, adapter=save_adapter(tmp_path / "alpha", tensors, lora_alpha="many"))
    directory = save_adapter(tmp_path / "cut", tensors)
    (directory / "adapter_config.json").write_text("{")
    with pytest.raises(CorruptError, match=r"adapter_config\.json is damaged"):
        load_model(model, adapter=directory)
    directory = save_adapter(tmp_path / "none", tensors)
    (directory / "adapter_model.safetensors").unlink()
    with pytest.raises(UsageError, match="has no weights"):
        load_model(model, adapter=directory)
    with pytest.raises(UnknownNameError, match=r"unknown adapter[\s\S]*nearest: .*none"):
        load_model(model, adapter=tmp_path / "nope")
    with pytest.raises(UsageError, match="no adapter"):
        load_model(model, adapter=tmp_path / "none" / "nope", weights=False)
