"""What an ONNX decoder is given in each step, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from glassengine.errors import UsageError
from glassengine.plugins.serving.onnx.candidate import run_decoder
from glassengine.plugins.serving.onnx.decoder import OWN_LOOP, Feeds, generated, open_decoder
from glassengine.recording.reader import Recording
from glassengine.serving.protocol import ServingRun, is_decoder
from glassengine.testing.architectures import FAMILIES
from glassengine.testing.checkpoints import save_checkpoint
from glassengine.testing.genai import build_genai

PAST = ["batch", 2, "past", 4]


def saved(path: Path, inputs: dict[str, list[Any]], pairs: dict[str, str], logits: str = "logits") -> Path:
    """Write a graph that returns its caches as they are, and scores that are ones."""
    values = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "new"])]
    values += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    nodes = [helper.make_node("Cast", ["input_ids"], ["floats"], to=TensorProto.FLOAT)]
    nodes += [helper.make_node("Unsqueeze", ["floats", "axis"], [logits])]
    nodes += [helper.make_node("Identity", [past], [now]) for past, now in pairs.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (logits, *pairs.values())]
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [2])
    graph = helper.make_graph(nodes, "decoder", values, results, [axis])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.mark.parametrize(
    ("past", "now"),
    [("past_key_values.0.key", "present.0.key"), ("past_key_values_0_key", "present_0_key"), ("past_0", "present_0")],
)
def test_caches_are_known_by_their_names(past: str, now: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "model.onnx", {past: PAST}, {past: now})
    assert open_decoder(path).pasts == {past: now}
    assert open_decoder(tmp_path).pasts == {past: now}
    assert is_decoder(path)


def test_the_names_of_a_configuration_come_first(tmp_path: Path) -> None:
    saved(tmp_path / "text.onnx", {"k_0": PAST}, {"k_0": "new_k_0"}, "scores")
    decoder = {
        "filename": "text.onnx",
        "inputs": {"past_key_names": "k_%d"},
        "outputs": {"present_key_names": "new_k_%d", "logits": "scores"},
    }
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"type": "llama", "decoder": decoder}}))
    found = open_decoder(tmp_path)
    assert found.pasts == {"k_0": "new_k_0"} and found.logits == "scores"
    decoder["filename"] = "../text.onnx"
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"decoder": decoder}}))
    with pytest.raises(UsageError, match="outside"):
        open_decoder(tmp_path)


def test_other_files_are_no_decoders(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.onnx", {}, {})
    assert not is_decoder(path) and not is_decoder(tmp_path / "none.onnx")
    with pytest.raises(UsageError, match="no decoder with a cache"):
        open_decoder(path)
    with pytest.raises(UsageError, match="no such file"):
        open_decoder(tmp_path / "none.onnx")
    with pytest.raises(UsageError, match="no logits"):
        open_decoder(saved(tmp_path / "other.onnx", {"past_0": PAST}, {"past_0": "present_0"}, "scores"))


def session_inputs(shapes: dict[str, tuple[str, list[Any]]]) -> list[Any]:
    return [SimpleNamespace(name=name, type=kind, shape=shape) for name, (kind, shape) in shapes.items()]


def test_sizes_that_the_file_leaves_open_are_the_checkpoints(tmp_path: Path) -> None:
    decoder = open_decoder(saved(tmp_path / "model.onnx", {"past_0": PAST}, {"past_0": "present_0"}))
    shapes = {
        "input_ids": ("tensor(int64)", ["batch", "new"]),
        "past_0": ("tensor(float)", ["batch", "heads", "past", "width"]),
    }
    fed = Feeds(decoder, session_inputs(shapes), {"kv_heads": 3, "head_dim": 8}, 4).of([1])
    assert fed["past_0"].shape == (1, 3, 0, 8)


def test_steps_are_fed_what_the_file_takes(tmp_path: Path) -> None:
    decoder = open_decoder(saved(tmp_path / "model.onnx", {"past_0": PAST}, {"past_0": "present_0"}))
    feeds = Feeds(
        decoder,
        session_inputs(
            {
                "input_ids": ("tensor(int32)", ["batch", "new"]),
                "attention_mask": ("tensor(int64)", ["batch", "all"]),
                "position_ids": ("tensor(int64)", ["batch", "new"]),
                "use_cache_branch": ("tensor(bool)", [1]),
                "past_0": ("tensor(float16)", PAST),
            }
        ),
        {},
        4,
    )
    first = feeds.of([5, 6, 7])
    assert first["input_ids"].dtype == np.int32 and first["input_ids"].tolist() == [[5, 6, 7]]
    assert first["past_0"].shape == (1, 2, 0, 4) and first["past_0"].dtype == np.float16
    assert first["use_cache_branch"].tolist() == [False]
    feeds.take([5, 6, 7], {"present_0": np.ones((1, 2, 3, 4), np.float16)})
    then = feeds.of([8])
    assert then["attention_mask"].tolist() == [[1, 1, 1, 1]] and then["position_ids"].tolist() == [[3]]
    assert then["past_0"].shape == (1, 2, 3, 4) and then["use_cache_branch"].tolist() == [True]


@pytest.mark.parametrize(
    ("name", "kind", "shape", "said"),
    [
        ("pixel_values", "tensor(float)", ["batch", 3], "takes what a decoder of tokens does not"),
        ("past_0", "tensor(float)", [1, 2, 16, 4], "fixed size"),
        ("past_0", "tensor(float)", ["batch", "heads", "past", 4], "are not known"),
        ("past_0", "tensor(string)", PAST, "takes what"),
    ],
)
def test_inputs_that_cannot_be_fed_are_named(name: str, kind: str, shape: list[Any], said: str, tmp_path: Path) -> None:
    decoder = open_decoder(saved(tmp_path / "model.onnx", {"past_0": PAST}, {"past_0": "present_0"}))
    shapes = {"input_ids": ("tensor(int64)", ["batch", "new"]), "past_0": ("tensor(float)", PAST), name: (kind, shape)}
    with pytest.raises(UsageError, match=said):
        Feeds(decoder, session_inputs(shapes), {}, 4)


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
