"""What a recording keeps of `generate`: the settings in force and the prompt of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.recording.read.reader import Recording


@pytest.fixture(scope="module")
def parts(root: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = root / "examples" / "tiny-llama"
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_the_settings_in_force_are_kept(parts: tuple[Any, Any], tmp_path: Path) -> None:
    model, _ = parts
    ids = torch.tensor([[1, 495, 395]])
    with glass.record(model, tmp_path / "run"):
        model.generate(
            ids, max_new_tokens=2, do_sample=True, temperature=0.7, repetition_penalty=1.1, eos_token_id=[2, 3]
        )
    found = Recording.open(tmp_path / "run").metadata
    wanted = {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.1, "max_new_tokens": 2, "bos_token_id": 1}
    assert wanted.items() <= found["sampling"].items() and found["sampling"]["eos_token_id"] == [2, 3]
    assert found["prompt_lengths"] == [3] and len(found["token_ids"][0]) == 4 and "prompt" not in found


def test_the_text_of_a_pipeline_is_kept(parts: tuple[Any, Any], tmp_path: Path) -> None:
    from transformers import pipeline

    model, tokenizer = parts
    asked = pipeline("text-generation", model=model, tokenizer=tokenizer)
    with glass.record(asked, tmp_path / "run"):
        asked("The value of", max_new_tokens=2, do_sample=False)
    found = Recording.open(tmp_path / "run").metadata
    assert found["prompt"] == "The value of" and found["sampling"]["do_sample"] is False


def test_a_forward_by_itself_has_no_settings(parts: tuple[Any, Any], tmp_path: Path) -> None:
    model, _ = parts
    with glass.record(model, tmp_path / "run", metadata={"prompt": "given"}), torch.no_grad():
        model(torch.tensor([[1, 495, 395]]))
    found = Recording.open(tmp_path / "run").metadata
    assert "sampling" not in found and "prompt_lengths" not in found and found["prompt"] == "given"
