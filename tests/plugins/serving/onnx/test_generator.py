"""The loop of onnxruntime-genai: its scores are those of the file run step by step, or what differs is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glassengine.plugins.serving.onnx.decoder import open_decoder
from glassengine.plugins.serving.onnx.generator import OWN_LOOP, generated
from glassengine.plugins.serving.onnx.record import run_decoder
from glassengine.recording.read.reader import Recording
from glassengine.serving.protocol import ServingRun
from glassengine.testing.architectures import FAMILIES
from glassengine.testing.checkpoints import save_checkpoint
from glassengine.testing.genai import build_genai

pytest.importorskip("onnxruntime_genai")
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    module: Any = FAMILIES["llama"]().eval()
    save_checkpoint(module, target / "checkpoint")
    return build_genai(target / "checkpoint", target / "genai")


def test_its_scores_are_recorded_as_deployed(folder: Path, tmp_path: Path) -> None:
    decoder = open_decoder(folder)
    run_decoder(decoder, ServingRun(PROMPT, 2), tmp_path / "ops", architecture="decoder")
    exact = Recording.open(tmp_path / "ops")
    tokens = {entry.step: exact.tensor(entry) for entry in exact.entries if entry.site == ".:in.input_ids"}
    following = [int(tokens[step]) for step in (1, 2)]
    run = ServingRun(PROMPT, 2, following, as_deployed=True)
    found = generated(decoder, run)
    assert found is not None and not found.note and [one.shape[1] for one in found.logits] == [4, 1, 1]
    run_decoder(decoder, run, tmp_path / "deployed", architecture="decoder")
    deployed = Recording.open(tmp_path / "deployed")
    assert deployed.metadata["generator"] == OWN_LOOP
    for name, recording in (("deployed", deployed), ("ops", exact)):
        for entry in recording.entries:
            if entry.site in ("logits", "returned/logits"):
                own = torch.from_numpy(found.logits[entry.step])
                assert torch.allclose(recording.tensor(entry), own, atol=0 if entry.site != "logits" else 1e-5)
        is_returned = any(entry.site == "returned/logits" for entry in recording.entries)
        assert is_returned == (name == "deployed")


def test_another_token_is_told_and_ends_it(folder: Path) -> None:
    found = generated(open_decoder(folder), ServingRun(PROMPT, 2, [0, 0], as_deployed=True))
    assert found is not None and len(found.logits) == 1
    assert "picks token" in found.note and "the file by itself 0" in found.note


def test_a_folder_that_it_does_not_run_is_told(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path) if path.name != "genai_config.json" else None
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["type"] = "a kind that there is not"
    (tmp_path / "genai_config.json").write_text(json.dumps(config))
    found = generated(open_decoder(tmp_path), ServingRun(PROMPT, 1, [0], as_deployed=True))
    assert found is not None and found.note.startswith("onnxruntime-genai fails after 0 steps")
    assert generated(open_decoder(folder / "model.onnx"), ServingRun(PROMPT, 1)) is None
    assert isinstance(found.logits, list) and not np.array(found.logits).size
