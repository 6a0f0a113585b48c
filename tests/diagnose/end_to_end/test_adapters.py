"""An adapter as the candidate of its base: `glass check BASE --candidate ADAPTER`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import glassengine as glass
from glassengine.errors import GlassError, UsageError
from glassengine.testing import models

pytest.importorskip("peft")

Q, GATE = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj"
IDS = {"input_ids": torch.tensor([[5, 17, 99, 3, 42]])}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "base"
    models.llama(num_hidden_layers=1).save_pretrained(directory)
    return directory


def adapter(directory: Path, site: str, shape: tuple[int, int], *, named: str = "", size: float = 0.2, **more: object):
    """Write a LoRA adapter of one module, as peft does."""
    directory.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": named, **more}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    drawn = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, shape[1], generator=drawn), size * torch.randn(shape[0], 2, generator=drawn))
    tensors = {f"base_model.model.{site}.lora_A.weight": a, f"base_model.model.{site}.lora_B.weight": b}
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def shape_of(site: str) -> tuple[int, int]:
    rows, columns = models.llama(num_hidden_layers=1).get_submodule(site).weight.shape  # type: ignore[union-attr]
    return int(rows), int(columns)


@pytest.mark.parametrize("site", [Q, GATE])
def test_f69_a_merged_adapter_leaves_its_base_where_it_changes_it(site: str, base: Path, tmp_path: Path) -> None:
    given = adapter(tmp_path / "adapter", site, shape_of(site), named=str(base))
    result = glass.check(base, candidate=given, inputs=IDS, steps=0)
    assert not result.ok and result.first_divergence is not None
    assert result.first_divergence.site == f"{site}/linear.0" and result.candidate == str(given)


@pytest.mark.parametrize("named", ["", "org/base", "copy"])
def test_f69_an_adapter_that_changes_nothing_is_its_base(named: str, base: Path, tmp_path: Path) -> None:
    if named == "copy":
        named = str(shutil.copytree(base, tmp_path / "copy"))
    given = adapter(tmp_path / "adapter", Q, shape_of(Q), named=named, size=0.0)
    assert glass.check(base, candidate=given, inputs=IDS, steps=0).ok


def test_f69_a_base_of_another_name_is_told(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = adapter(tmp_path / "adapter", Q, shape_of(Q), named="org/other", size=0.0)
    assert glass.check(base, candidate=given, inputs=IDS, steps=0).ok
    assert "names the base org/other; it is merged into" in caplog.text


def without(name: str) -> Callable[[Path], Path]:
    def made(place: Path) -> Path:
        (adapter(place, Q, shape_of(Q)) / name).unlink()
        return place

    return made


def of_other_base(place: Path) -> Path:
    other = models.llama(num_hidden_layers=1)
    other.lm_head.weight.data[0] += 1  # type: ignore[union-attr, operator]
    other.save_pretrained(place.parent / "other")
    return adapter(place, Q, shape_of(Q), named=str(place.parent / "other"))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda place: adapter(place, Q, (72, 64)), "the adapter is for another model"),
        (lambda place: adapter(place, "transformer.h.0.attn.c_attn", (8, 8)), "unknown module"),
        (lambda place: adapter(place, Q, shape_of(Q), peft_type="LOHA"), "only LoRA is"),
        (of_other_base, "is for another base"),
        (without("adapter_config.json"), "has no configuration"),
        (without("adapter_model.safetensors"), "has no weights"),
    ],
)
def test_f69_an_adapter_that_does_not_fit_is_named(
    made: Callable[[Path], Path], message: str, base: Path, tmp_path: Path
) -> None:
    given = made(tmp_path / "adapter")
    with pytest.raises(UsageError, match=message) as caught:
        glass.check(base, candidate=given, inputs=IDS, steps=0)
    assert isinstance(caught.value, GlassError) and "adapter" in str(caught.value)
