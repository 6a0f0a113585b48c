"""Checkpoints that do not fit their model: each planted difference is named, from the headers of the files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import glassengine as glass
from glassengine.prompt.loading import compare_loading, loaded
from glassengine.prompt.side import Loaded, OpenedSide, PromptSide

Weights = dict[str, Tensor]
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


class Side(PromptSide):
    """A side that has a checkpoint only."""

    def __init__(self, found: Loaded) -> None:
        self.opened, self._found = OpenedSide("test", None, has_weights=True), found

    def load(self) -> Loaded:
        return self._found


@pytest.fixture(scope="module")
def whole(root: Path) -> PromptSide:
    return Side(loaded(root / "examples/tiny-llama"))


def changed(
    root: Path, folder: Path, weights: Callable[[Weights], object] | None, config: dict[str, Any], sharded: bool = False
) -> Path:
    shutil.copytree(root / "examples/tiny-llama", folder, ignore=shutil.ignore_patterns("*.txt", "train.py"))
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, **config}))
    tensors = load_file(folder / "model.safetensors")
    if weights is not None:
        weights(tensors)
    save_file(tensors, folder / "model.safetensors")
    if sharded:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def renamed(old: str, new: str) -> Callable[[Weights], object]:
    def change(weights: Weights) -> None:
        for name in list(weights):
            weights[name.replace(old, new)] = weights.pop(name)

    return change


def headed(factor: float) -> Callable[[Weights], object]:
    return lambda weights: weights.update({HEAD: weights[TABLE] * factor})


@pytest.mark.parametrize(
    ("causes", "weights", "config"),
    [
        ([], None, {}),
        ([], renamed("model.", ""), {}),  # a checkpoint of the base model
        ([], headed(1), {}),
        (["random parameters"], lambda weights: weights.pop("model.norm.weight"), {}),
        (["random parameters"], None, {"num_hidden_layers": 6}),
        (["random parameters"], None, {"tie_word_embeddings": False}),
        (["random parameters", "unused parameters"], renamed("q_proj", "query"), {}),
        (["random parameters", "unused parameters"], renamed("model.", "wrong.model."), {}),
        (["unused parameters"], None, {"num_hidden_layers": 2}),
        (["unused parameters"], lambda weights: weights.update({"value_head.weight": torch.ones(2)}), {}),
        (["other shapes"], None, {"intermediate_size": 100}),
        (["untied weights"], headed(2), {}),
    ],
)
def test_a_planted_difference_of_loading_is_named(
    causes: list[str],
    weights: Callable[[Weights], object] | None,
    config: dict[str, Any],
    whole: PromptSide,
    root: Path,
    tmp_path: Path,
) -> None:
    theirs = Side(loaded(changed(root, tmp_path / "other", weights, config, sharded=bool(config))))
    found, number = compare_loading(whole, theirs)
    assert number > 60 and [one.cause for one in found if one.level == "wrong"] == causes, found
    assert all(one.detail.startswith("candidate: ") for one in found)


def test_unused_parameters_of_both_sides_are_a_note(whole: PromptSide) -> None:
    both = Side(Loaded(3, unexpected=["value_head.weight"]))
    assert [one.level for one in compare_loading(both, both)[0]] == ["note", "note"]
    assert [one.level for one in compare_loading(both, whole)[0]] == ["note"]
    assert [one.level for one in compare_loading(whole, both)[0]] == ["wrong"]
    layers = Side(Loaded(3, unexpected=["model.layers.7.norm.weight"]))
    assert [one.level for one in compare_loading(layers, whole)[0]] == ["wrong"]


def test_a_quantized_checkpoint_is_a_note(root: Path, tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "fp8"}}
    found, number = compare_loading(Side(loaded(changed(root, tmp_path / "other", None, config))), Side(Loaded(0)))
    assert number == 0 and [(one.level, one.cause) for one in found] == [("note", "not compared")]


def test_the_command_compares_parameters(root: Path, tmp_path: Path) -> None:
    other = changed(root, tmp_path / "other", renamed("q_proj", "query"), {})
    result = glass.check_prompt(str(root / "examples/tiny-llama"), str(other))
    assert not result.ok and result.compared["loading"] > 60
    assert [one.cause for one in result.findings] == ["random parameters", "unused parameters"]


def test_a_configuration_out_of_proportion_ends_within_bounds(root: Path, tmp_path: Path) -> None:
    other = changed(root, tmp_path / "other", None, {"num_hidden_layers": 10**7})
    result = glass.check_prompt(str(root / "examples/tiny-llama"), str(other))
    (one,) = [one for one in result.findings if one.part == "loading"]
    assert one.cause == "not compared" and "out of proportion" in one.detail
