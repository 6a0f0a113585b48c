"""Results of folders of onnxruntime-genai are what its session returns, and no other run's values stand in for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from glassengine.plugins.serving.onnx import candidate
from glassengine.plugins.serving.onnx.decoder import Generated, generated
from glassengine.results import Comparison
from glassengine.testing.architectures import FAMILIES
from glassengine.testing.checkpoints import save_checkpoint
from glassengine.testing.genai import build_genai
from tests.plugins.serving.check.end_to_end.test_genai import attribute, check, configured, initializer, planted

pytest.importorskip("onnxruntime_genai")
TEXT = "The quick brown fox"
EPSILON = 1e-5


def right_epsilons(model: onnx.ModelProto) -> None:
    """The builder of onnxruntime-genai 0.18 writes 1e-6 for Phi and Nemotron, which have 1e-5."""
    for node in model.graph.node:
        if "Layer" in node.op_type and "Norm" in node.op_type:
            attribute(node.name, "epsilon", EPSILON)(model)


def plain(folder: Path, genai: Path) -> float:
    """Return the dB of the prefill's logits in a session as users make it."""
    ids = AutoTokenizer.from_pretrained(folder / "checkpoint")(TEXT).input_ids
    module = AutoModelForCausalLM.from_pretrained(folder / "checkpoint").eval()
    session = onnxruntime.InferenceSession(str(genai / "model.onnx"))
    config: Any = module.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    empty = np.zeros((1, config.num_key_value_heads, 0, width), np.float32)
    given = {one.name: empty for one in session.get_inputs() if "past" in one.name}
    known = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    given |= {name: value for name, value in known.items() if name in {one.name for one in session.get_inputs()}}
    (logits,) = session.run(["logits"], given)
    with torch.no_grad():
        expected = module(torch.tensor([ids])).logits.double().numpy()
    return float(10 * np.log10((expected**2).sum() / ((logits - expected) ** 2).sum()))


def said(found: Comparison) -> float:
    (last,) = [one for one in found.results if one.level == "record as deployed"]
    assert last.snr_db is not None
    return last.snr_db


def checked(folder: Path, tmp_path: Path, *plants: Any) -> Comparison:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{TEXT}\n")

    def plant(model: onnx.ModelProto) -> None:
        for one in plants:
            one(model)

    if plants:
        return planted(folder, tmp_path / "planted", plant, steps=0)
    return check(folder, inputs=str(prompts), steps=0)


@pytest.mark.slow
def test_f81_results_of_a_head_with_a_bias_are_those_of_a_plain_session(tmp_path: Path) -> None:
    folder = configured("Phi", tmp_path)
    (tmp_path / "planted").mkdir()
    found = checked(folder, tmp_path)
    assert said(found) == pytest.approx(plain(folder, folder / "genai"), abs=0.1)
    assert not found.ok and "eps" in str(found.origins[0].hints)
    mended = checked(folder, tmp_path, right_epsilons)
    assert mended.ok, mended.not_ok_because


@pytest.mark.slow
def test_f80_a_gain_that_is_stored_without_its_1_is_no_mistake(tmp_path: Path) -> None:
    folder = configured("Nemotron", tmp_path)
    (tmp_path / "planted").mkdir()
    found = checked(folder, tmp_path)
    assert not found.ok and found.first_divergence is not None
    assert found.first_divergence.level == "record" and "layernorm" in found.first_divergence.site
    assert "eps" in str(found.first_divergence.hints)
    assert said(found) == pytest.approx(plain(folder, folder / "genai"), abs=0.1)
    assert checked(folder, tmp_path, right_epsilons).ok


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Nemotron", "Gemma"])
def test_f80_a_missing_1_is_named(name: str, tmp_path: Path) -> None:
    folder = configured(name, tmp_path)
    (tmp_path / "planted").mkdir()
    wrong = initializer("model.layers.1.input_layernorm.weight", lambda gain: gain - 1)
    found = checked(folder, tmp_path, right_epsilons, wrong) if name == "Nemotron" else checked(folder, tmp_path, wrong)
    assert not found.ok and found.first_divergence is not None
    assert found.first_divergence.site == "model.layers.1.input_layernorm.weight:param"
    assert "the 1 of the norm was not added" in found.first_divergence.hints[0].text


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in ("Granite", "Gemma2"))]
)
def test_f79_scores_of_another_run_are_no_values_of_this_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two right runs round differently: the loop's scores are results, and judged as such."""

    def rounded_otherwise(decoder: Any, run: Any) -> Generated | None:
        found = generated(decoder, run)
        assert found is not None
        largest = max(float(np.abs(one).max()) for one in found.logits)
        noise = np.random.default_rng(0).standard_normal
        moved = [(one + 2e-8 * largest * noise(one.shape)).astype(np.float32) for one in found.logits]
        return Generated(moved, found.note)

    monkeypatch.setattr(candidate, "generated", rounded_otherwise)
    if name == "llama":
        torch.manual_seed(0)
        save_checkpoint(FAMILIES["llama"]().eval(), tmp_path / "checkpoint")
        build_genai(tmp_path / "checkpoint", tmp_path / "genai")
    else:
        configured(name, tmp_path)
    found = check(tmp_path, steps=1)
    assert found.ok and not found.origins, found.not_ok_because


def test_f79_scores_of_a_wrong_loop_are_wrong_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(decoder: Any, run: Any) -> Generated | None:
        found = generated(decoder, run)
        assert found is not None
        return Generated([one * 1.01 for one in found.logits], found.note)

    monkeypatch.setattr(candidate, "generated", wrong)
    torch.manual_seed(0)
    save_checkpoint(FAMILIES["llama"]().eval(), tmp_path / "checkpoint")
    build_genai(tmp_path / "checkpoint", tmp_path / "genai")
    found = check(tmp_path, steps=0)
    assert not found.ok and found.standing == "results differ"
    assert json.dumps(found.to_dict())
