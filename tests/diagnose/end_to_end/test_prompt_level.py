"""The level of prompts in a check: a wrong prompt is never ok, a right one costs nothing, and no model is needed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import glassengine as glass
from glassengine.cli.main import main
from glassengine.diagnose import check_model
from glassengine.diagnose.ladder.request import CheckRequest
from glassengine.errors import UnknownNameError, UsageError
from glassengine.plugins.serving.ggml.write import vocabulary_of, write_gguf
from glassengine.report.explained import agent_text
from glassengine.report.findings import findings
from glassengine.report.page.write import write_report
from glassengine.report.sarif import sarif
from glassengine.results import Comparison, Policy
from glassengine.results.findings import with_prompt
from glassengine.results.stored import read_comparisons
from tests.prompt.conftest import _with_transformers as _with_transformers

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A small checkpoint with the tokenizer of the bundled one."""
    folder = tmp_path_factory.mktemp("prompt-level") / "model"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 1024}
    config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=64, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in FILES:
        shutil.copy(root / "examples" / "tiny-llama" / name, folder / name)
    return folder


def gguf_of(model: Path, path: Path, **changes: Any) -> str:
    module: Any = LlamaForCausalLM.from_pretrained(model)
    vocabulary = vocabulary_of(module, str(model))
    assert vocabulary is not None
    write_gguf(module, path, vocabulary=dataclasses.replace(vocabulary, **changes))
    return f"gguf:{path}"


def copied(model: Path, target: Path, change: Callable[[dict[str, Any]], None] = lambda document: None) -> Path:
    shutil.copytree(model, target)
    document = json.loads((target / "tokenizer.json").read_text(encoding="utf-8"))
    change(document)
    (target / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    return target


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a process was asked")

    monkeypatch.setattr(check_model, "compare_in", refuse)


def shown(result: Comparison, tmp_path: Path) -> str:
    write_report(result, tmp_path / "report")
    return (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


def test_a_right_file_is_ok_and_the_level_is_the_first(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    result = glass.check(model, candidate=gguf_of(model, tmp_path / "model.gguf"), steps=0)
    assert result.ok and result.standing == "ok" and result.prompt is not None and result.prompt.ok
    assert result.levels[0].name == "prompt" and result.levels[0].verdict == "identical" and len(result.levels) > 2
    assert result.prompt.engines == ("transformers", "llama.cpp") and not result.prompt.wrong
    assert not [one for one in findings(result) if one.level == "error"]


def test_a_file_without_begin_is_named_in_every_answer_and_the_model_is_judged(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    candidate = gguf_of(model, tmp_path / "model.gguf", adds_bos=False)
    result = glass.check(model, candidate=candidate, steps=0)
    assert (result.ok, result.standing, result.verdict, result.too_little) == (False, "prompt differs", "wrong", False)
    assert str(result.not_ok_because).startswith("the prompts differ: no BOS: a text begins with 1 '<s>'")
    assert all(one.agrees for one in result.results) and result.coverage == 1.0 and not result.origins
    told = findings(result)
    assert [(one.rule, one.level) for one in told] == [("prompt-differs", "error")]
    agent = agent_text([result], ["check", str(model), "--candidate", candidate]).splitlines()
    assert agent[0].startswith("NOT OK: the prompts differ: no BOS") and "(glass check-prompt " in agent[-1]
    log = sarif([result], "check", tmp_path, 1)["runs"][0]
    assert [one["ruleId"] for one in log["results"]] == ["glass/prompt-differs"]
    assert "no BOS" in (page := shown(result, tmp_path)) and "tried before the first operation" in page
    (tmp_path / "result.json").write_text(json.dumps({"schema_version": 1, **result.to_dict()}), encoding="utf-8")
    (again,) = read_comparisons(tmp_path / "result.json")
    assert again.prompt is not None and again.prompt.wrong[0].cause == "no BOS"
    # What is wrong in the model follows.
    both = with_prompt(dataclasses.replace(result, not_ok_because="logits differ"), result.prompt)
    assert str(both.not_ok_because).endswith("; logits differ")


@pytest.mark.usefixtures("no_process")
def test_the_same_files_are_not_tried(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "other")
    result = glass.check(model, candidate=tmp_path / "other", only="prompt")
    assert result.ok and result.prompt is not None and result.prompt.compared == {"files": 2}


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_nothing_is_said_where_a_side_has_no_tokenizer(side: str, model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    sides = (bare, model) if side == "baseline" else (model, bare)
    result = glass.check(sides[0], candidate=sides[1], steps=0)
    assert result.ok and result.prompt is None and not result.notes and result.levels[0].name == "program"


def test_a_tokenizer_that_cannot_be_opened_is_a_note(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise UsageError("the tokenizer cannot be opened", got="data did not match")

    monkeypatch.setattr(check_model, "compare_in", fails)
    other = copied(model, tmp_path / "other", lambda document: document["model"]["merges"].insert(0, ["zq", "qz"]))
    result = glass.check(model, candidate=other, steps=0)
    assert result.ok and result.prompt is None
    assert [note for note in result.notes if note.startswith("the prompts were not compared: ")]


def test_the_level_alone_loads_no_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = copied(model, tmp_path / "other", lambda document: document.update(normalizer={"type": "Lowercase"}))
    (other / "model.safetensors").unlink()
    arguments = ["check", str(model), "--candidate", str(other), "--only", "prompt"]
    assert main([*arguments, f"--json={tmp_path}/result.json", "--report", str(tmp_path / "page")]) == 1
    assert capsys.readouterr().out.startswith("NOT OK: tokens: normalization (lower case)")
    document = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert document["standing"] == "prompt differs" and document["pairs"] == [] and not document["prompt"]["ok"]
    assert [level["name"] for level in document["levels"]] == ["prompt"]


def test_a_level_that_cannot_be_alone_is_refused_with_the_list(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("def net(): ...\ndef other(): ...\n", encoding="utf-8")
    with pytest.raises(UnknownNameError, match=r"unknown part 'release'[^$]*prompt"):
        glass.check(model, candidate=model, only="release")
    with pytest.raises(UsageError, match="--only prompt compares two sides"):
        glass.check(model, only="prompt")
    with pytest.raises(UsageError, match="--only prompt compares files"):
        glass.check(model, candidate=torch.nn.ReLU(), only="prompt")
    with pytest.raises(UsageError, match="--tokenizer has nothing beside it"):
        glass.check("net.py:net", candidate="net.py:net", tokenizer="net.py:other")
    with pytest.raises(UsageError, match="no such directory"):
        glass.check(model, candidate="nowhere/at/all", only="prompt")


def test_factories_of_models_are_no_tokenizers(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("def net(): ...\ndef words(): ...\n", encoding="utf-8")
    requests = [CheckRequest(side, "net.py:net", Policy()) for side in (model, "net.py:net", torch.nn.ReLU())]
    assert [check_model._sides_of(request, None) for request in requests] == [None, None, None]
    assert check_model._sides_of(requests[0], "net.py:words") == (str(model), "net.py:words")
