"""A configuration that describes more than its checkpoint has is refused before memory is taken for it."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from glassengine.errors import CorruptError, UsageError
from glassengine.program.loading import from_transformers
from glassengine.program.loading.from_transformers import bounded_by_checkpoint, require_countable
from glassengine.program.loading.load import load_model
from glassengine.testing import models
from glassengine.testing.checkpoints import VOCAB_SIZE, save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("proportion") / "model"
    save_checkpoint(
        models.llama(vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=1), folder
    )
    return folder


def with_config(checkpoint: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 10**8}, {"intermediate_size": 10**8}, {"hidden_size": 10**6, "head_dim": 4},
        {"num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 10**7},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
@pytest.mark.parametrize("quantized", [False, True])
def test_s4_weights_that_are_not_there_take_no_memory(
    changes: dict[str, Any], quantized: bool, checkpoint: Path, tmp_path: Path
) -> None:
    if quantized:
        changes |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    folder = with_config(checkpoint, tmp_path / "m", **changes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptError, match="out of proportion"):
        load_model(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize("weights", [True, False])
def test_s4_modules_that_have_no_weights_are_not_made(
    weights: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_transformers, "_MODULES", 1000)
    folder = with_config(checkpoint, tmp_path / "m", num_hidden_layers=100_000)
    with pytest.raises(CorruptError, match=r"more than 1,\d\d\d modules"):
        load_model(folder, weights=weights)


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_labels", "n_layer"])
@pytest.mark.parametrize("nested", [False, True])
def test_s4_a_configuration_that_counts_in_millions_is_refused(
    name: str, nested: bool, checkpoint: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {name: 10**9}
    folder = with_config(checkpoint, tmp_path / "m", **({"text_config": changes} if nested else changes))
    with pytest.raises(CorruptError, match=rf"{name} of 1,000,000,000"):
        load_model(folder, weights=False)


def test_what_is_in_proportion_is_loaded(checkpoint: Path, tmp_path: Path) -> None:
    assert load_model(checkpoint).generation.generates
    # Only names and shapes: any size of one tensor, as before.
    big = with_config(checkpoint, tmp_path / "big", vocab_size=10**8)
    assert load_model(big, weights=False).metadata["vocab_size"] == 10**8
    # Holes are said as holes, as before.
    holes = with_config(checkpoint, tmp_path / "holes", num_hidden_layers=2)
    with pytest.raises(UsageError, match="lacks weights"):
        load_model(holes)
    require_countable({"num_hidden_layers": 126, "vocab_size": 10**7, "layer_norm_eps": 1e-6, "labels": {"a": 3}}, "c")


def test_the_hooks_are_gone_afterwards(tmp_path: Path) -> None:
    with pytest.raises(CorruptError), bounded_by_checkpoint(tmp_path, weights=True), torch.device("meta"):
        nn.Linear(1 << 16, 1 << 16)
    nn.Linear(1 << 16, 1 << 16, device="meta")
