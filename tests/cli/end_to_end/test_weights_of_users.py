"""Weights as users have them, through the commands: sharded and tied, with an adapter, quantized, in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import glassengine as glass
from glassengine.cli.main import main
from glassengine.testing import models
from glassengine.testing.checkpoints import save_checkpoint
from tests.quantized import save_quantized

IDS = [[1, 5, 9, 7]]
HEAD = "base_model.model.model.layers.0.mlp.up_proj.lora_"


def adapter_tensors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 64, generator=generator), torch.randn(128, 2, generator=generator)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a quantized checkpoint with tied embeddings, in several files."""
    directory = tmp_path_factory.mktemp("weights") / "base"
    save_quantized(tied(), directory, "gptq")
    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    places = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, directory / file)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    return directory


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    """Return an adapter that names its base."""
    pytest.importorskip("peft")
    directory = base.parent / "adapter"
    directory.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "../base"}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    a, b = adapter_tensors()
    save_file({f"{HEAD}A.weight": a, f"{HEAD}B.weight": b}, directory / "adapter_model.safetensors")
    return directory


def tied() -> Any:
    model: Any = models.llama(num_hidden_layers=1, tie_word_embeddings=True)
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Return what the model gives with everything put together by hand, [1, 4, V]."""
    model, (a, b) = tied(), adapter_tensors()
    expected = save_quantized(tied(), tmp_path_factory.mktemp("by hand"), "gptq")
    with torch.no_grad():
        for name, value in expected.items():
            model.get_parameter(name).copy_(value)
        model.model.layers[0].mlp.up_proj.weight += 2 * (b @ a)
        made: torch.Tensor = model(torch.tensor(IDS)).logits
    return made


def test_an_engine_of_it(base: Path, adapter: Path, logits: torch.Tensor, tmp_path: Path) -> None:
    arguments = [str(base), "--adapter", str(adapter), "-o", str(tmp_path / "e"), "--backend", "eager", "--quiet"]
    assert main(["build", *arguments]) == 0
    engine = glass.load(tmp_path / "e")
    session = engine.session(1, 8)
    found = session.prefill(torch.tensor(IDS), torch.ones(1, 4, dtype=torch.int64))
    torch.testing.assert_close(found[:, -1], logits[:, -1], rtol=1e-4, atol=1e-4)
    assert engine.manifest.model["adapter"] == str(adapter)
    assert engine.manifest.model["quantization"] == {"method": "gptq", "num_weights": 7}
    assert json.loads((tmp_path / "e" / "generation_config.json").read_text())["eos_token_id"] == [7, 8]
    assert "quantization_config" not in json.loads((tmp_path / "e" / "config.json").read_text())


def test_record_and_sites(base: Path, adapter: Path, logits: torch.Tensor, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps({"input_ids": IDS}))
    for number, arguments in enumerate(([str(base), "--adapter", str(adapter)], [str(adapter)])):
        path = tmp_path / str(number)
        assert main(["record", *arguments, "-o", str(path), "--inputs", str(tmp_path / "ids.json"), "--quiet"]) == 0
        found = glass.Recording.open(path).tensor("lm_head", 0)
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)


def test_check_climbs_with_what_users_have(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(adapter), "--backend", "eager", "--steps", "0", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("ok: ")
    assert main(["sites", str(adapter), "lm_head", "--quiet"]) == 0


def test_bfloat16_where_there_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The flag that helps is named before anything is converted."""
    directory = save_checkpoint(models.llama(num_hidden_layers=1).bfloat16(), tmp_path / "b", tokenizer=False)
    arguments = ["build", str(directory), "-o", str(tmp_path / "e"), "--backend", "onnxruntime", "--quiet"]
    assert main(arguments) == 3
    message = capsys.readouterr().err
    assert "'onnxruntime' cannot run bfloat16 models" in message and "hint: --dtype float32" in message
    assert not (tmp_path / "e").exists()
