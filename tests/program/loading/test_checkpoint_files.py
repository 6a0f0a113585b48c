"""Weights in several files, or tied, as users have them; files that an index names are those of its directory."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glassengine.errors import CorruptError, UsageError
from glassengine.program import load_model
from glassengine.program.loading.checkpoint_files import read_tensors, require_plain_files, weight_files
from glassengine.testing import models
from tests.quantized import save_quantized


def shard(directory: Path) -> list[str]:
    """Split the file of a checkpoint in three, by the rules of transformers."""
    tensors = load_file(directory / "model.safetensors")
    names = [f"model-{index + 1:05}-of-00003.safetensors" for index in range(3)]
    places = {name: names[index % 3] for index, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name, place in places.items() if place == file}, directory / file)
    (directory / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return names


def test_shards_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    expected = save_quantized(models.llama(), tmp_path, "gptq")
    names = shard(tmp_path)
    assert [path.name for path in weight_files(str(tmp_path))] == names
    loaded = load_model(tmp_path).module
    assert all(torch.equal(loaded.get_parameter(name), value) for name, value in expected.items())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_sharded_and_tied(family: str, tmp_path: Path) -> None:
    model = models.CAUSAL_LMS[family](tie_word_embeddings=True)
    model.tie_weights()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = load_model(tmp_path).module
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    ids = torch.tensor([[1, 5, 9]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_pytorch_files_are_read_without_running_what_is_in_them(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert torch.equal(read_tensors(weight_files(str(tmp_path)))["a"], torch.ones(2))

    class Harm:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"a": Harm()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CorruptError, match="would run code"):
        read_tensors(weight_files(str(tmp_path)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x", 7, ""])
def test_an_index_stays_in_its_directory(name: object, tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    (tmp_path / "model").mkdir()
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CorruptError):
        weight_files(str(tmp_path / "model"))


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no weights"):
        weight_files(str(tmp_path))
    save_quantized(models.llama(), tmp_path, "gptq")
    names = shard(tmp_path)
    whole = (tmp_path / names[1]).read_bytes()
    (tmp_path / names[1]).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptError, match=rf"not a safetensors file\n.*{names[1]}"):
        load_model(tmp_path)
    shutil.move(tmp_path / names[1], tmp_path / "elsewhere")
    with pytest.raises(CorruptError, match=r"not there\n.*" + names[1]):
        load_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CorruptError, match=r"is damaged\n.*index.json"):
        load_model(tmp_path)


def test_s6_a_pipe_among_the_files_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "sub").mkdir()
    (tmp_path / "model-00002-of-00002.safetensors").symlink_to(tmp_path / "config.json")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    require_plain_files(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"model\.safetensors is not a plain file"):
        require_plain_files(tmp_path)
    with pytest.raises(UsageError, match=r"model\.safetensors is not a plain file"):
        load_model(tmp_path)


def test_s4_s7_an_index_that_names_files_elsewhere_is_refused_before_a_library_reads_them(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for name in ("/dev/zero", "../model.safetensors", ""):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CorruptError, match="outside of its directory"):
            require_plain_files(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    require_plain_files(tmp_path)  # whether it is there is asked by who reads it
    index.write_text(json.dumps({"weight_map": {"a": "/dev/zero"}}))
    (tmp_path / "model.safetensors").touch()
    require_plain_files(tmp_path)  # which is read in its place
