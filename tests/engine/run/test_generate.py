"""Generation: the tokens and text of transformers, streaming, recording, and prompts that do not fit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.engine import Engine
from glassengine.engine.prompts import pad_left
from glassengine.engine.run.sampling import FILE
from glassengine.engine.tokenizing import TextStream
from glassengine.errors import UsageError
from glassengine.testing.checkpoints import byte_tokenizer, save_checkpoint

PROMPTS = ["Hey, are you conscious?", "Soyer trained as a"]


def transformers_tokens(model: Any, rows: list[list[int]], new: int, **options: Any) -> list[list[int]]:
    ids, mask = pad_left(rows, 0)
    with torch.no_grad():
        made = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new, pad_token_id=0, **options)
    return [row[ids.shape[1] :].tolist() for row in made]


def until_end(row: list[int], end: int) -> tuple[int, ...]:
    return tuple(row[: row.index(end) + 1] if end in row else row)


def test_tokens_and_text_of_transformers(engine: Engine, model: Any) -> None:
    result = engine.generate(PROMPTS, max_new_tokens=12)
    tokenizer = byte_tokenizer()
    rows = [tokenizer(text)["input_ids"] for text in PROMPTS]
    expected = transformers_tokens(model, rows, 12)
    assert result.token_ids == tuple(until_end(row, 2) for row in expected)
    assert result.texts == tuple(tokenizer.batch_decode(expected, skip_special_tokens=True))
    assert result.prompts == tuple(PROMPTS) and result.prompt_token_ids == tuple(map(tuple, rows))
    assert result.num_steps == max(map(len, result.token_ids))
    assert result.prefill_s > 0 and result.decode_s > 0


# What compiled back-ends generate is compared with transformers on tiny models (test_tokens_of_transformers).
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor", "onnxruntime"])
def test_bundled_model(backend: str, root: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = root / "examples" / "tiny-llama"
    engine = glass.build(source, tmp_path / "e", backend=backend)
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    prompts = ['The "with" statement', "Class definitions"]
    rows = [tokenizer(text)["input_ids"] for text in prompts]
    expected = transformers_tokens(model, rows, 48)
    result = engine.generate(prompts, max_new_tokens=48)
    assert result.texts == tuple(tokenizer.batch_decode(expected, skip_special_tokens=True))
    for made, row in zip(result.token_ids, expected, strict=True):
        assert list(made) == row[: len(made)]


@pytest.fixture
def configured(engine: Engine, model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Return a function (generation settings) -> model with them; engines then read them as well."""

    def make(**settings: Any) -> Any:
        changed = copy.copy(model)
        changed.generation_config = copy.deepcopy(model.generation_config)
        changed.generation_config.update(**settings)
        changed.generation_config.to_json_file(tmp_path / FILE, use_diff=True)
        assert engine.tokenizer  # read from where it really is
        monkeypatch.setattr(engine, "directory", tmp_path)
        return changed

    return make


def test_end_tokens_stop_each_sequence(engine: Engine, configured: Callable[..., Any]) -> None:
    free = engine.generate(input_ids=[[5, 6, 7], [8, 9]], max_new_tokens=12).token_ids
    ends = [free[0][3], free[1][6]]
    model = configured(eos_token_id=ends)
    result = engine.generate(input_ids=[[5, 6, 7], [8, 9]], max_new_tokens=12)
    expected = transformers_tokens(model, [[5, 6, 7], [8, 9]], 12)
    for made, row in zip(result.token_ids, expected, strict=True):
        assert list(made) == row[: len(made)] and made[-1] in ends and set(row[len(made) :]) <= {0}
    assert result.num_steps < 12


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": list(range(3, 160))},
        {"begin_suppress_tokens": list(range(3, 160))},
        {"bad_words_ids": [[100], [101]]},
        {"eos_token_id": list(range(3, 250)), "min_new_tokens": 5},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_penalties_of_the_generation_config(
    settings: dict[str, Any], engine: Engine, configured: Callable[..., Any]
) -> None:
    model = configured(**settings)
    rows = [[5, 6, 7, 5, 6], [8, 9]]
    expected = transformers_tokens(model, rows, 10)
    made = engine.generate(input_ids=rows, max_new_tokens=10).token_ids
    assert [list(row) for row in made] == [full[: len(row)] for full, row in zip(expected, made, strict=True)]


def test_default_number_of_tokens(engine: Engine, configured: Callable[..., Any]) -> None:
    assert engine.generate(input_ids=[[5, 6]], eos_token_id=None).num_steps == 20
    configured(max_new_tokens=3)
    assert engine.generate(input_ids=[[5, 6]]).num_steps == 3


def test_streamed_text_is_the_text(engine: Engine) -> None:
    pieces: list[str] = []
    result = engine.generate(PROMPTS[0], max_new_tokens=30, on_text=pieces.append)
    assert result.texts == ("".join(pieces),)


def test_unfinished_characters_are_held_back() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer("a \u20ac b")["input_ids"]
    pieces: list[str] = []
    stream = TextStream(tokenizer, pieces.append)
    for count in range(1, len(tokens) + 1):
        stream.put(tokens[:count])
    stream.end(tokens)
    assert pieces == ["a", " \u20ac", " b"]


def test_observer_sees_every_step(engine: Engine) -> None:
    steps = []
    result = engine.generate(
        input_ids=[[5, 6]], max_new_tokens=4, debug=["mlp"],
        on_step=lambda session: steps.append((session.step, sorted(session.debug_buffers))),
    )  # fmt: skip
    names = ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert steps == [(step, names) for step in range(result.num_steps)]


def test_recording(engine: Engine, tmp_path: Path) -> None:
    rows = [[5, 6, 7], [8, 9]]
    logits: list[torch.Tensor] = []
    result = engine.generate(
        input_ids=rows, max_new_tokens=3, record=tmp_path / "r", debug=["logits"],
        on_step=lambda session: logits.append(session.debug_buffers["logits"]),
    )  # fmt: skip
    recording = glass.Recording.open(tmp_path / "r")
    assert recording.complete and recording.steps == [0, 1, 2]
    sites = {"model.layers.0.mlp", "model.layers.1.mlp", "model.layers.0.self_attn.q_proj/linear.0", "lm_head"}
    assert set(recording.sites()) == sites | {"lm_head/linear.0"}
    for step in recording.steps:
        assert torch.equal(recording.tensor("lm_head", step), logits[step])
    entry = recording.entry("model.layers.0.mlp", 1)
    assert entry.axes == {"batch": 0, "sequence": 1} and entry.shape == (2, 1, 64) and entry.node
    meta = recording.metadata
    assert meta["token_ids"] == [list(row + list(new[:2])) for row, new in zip(rows, result.token_ids, strict=True)]
    assert meta["backend"] == engine.manifest.backend and meta["dtype"] == "float32"
    assert meta["model_fingerprint"] == engine.manifest.model["fingerprint"] != None  # noqa: E711
    assert "modeling_llama.py" in meta["sources"]["model.layers.0.mlp"]
    assert meta["aliases"] == {
        "logits": "lm_head", "mm_default": "model.layers.0.self_attn.q_proj/linear.0", "head": "lm_head/linear.0",
    }  # fmt: skip
    assert result.recording == str(tmp_path / "r")


def test_existing_recording(engine: Engine, tmp_path: Path) -> None:
    engine.generate(input_ids=[[5]], max_new_tokens=1, record=tmp_path / "r")
    with pytest.raises(UsageError, match="--overwrite"):
        engine.generate(input_ids=[[5]], max_new_tokens=1, record=tmp_path / "r")
    engine.generate(input_ids=[[5]], max_new_tokens=2, record=tmp_path / "r", overwrite=True)
    assert glass.Recording.open(tmp_path / "r").steps == [0, 1]


def test_stopped_recording_says_so(engine: Engine, tmp_path: Path) -> None:
    def stop(session: Any) -> None:
        if session.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(input_ids=[[5]], max_new_tokens=9, record=tmp_path / "r", on_step=stop)
    recording = glass.Recording.open(tmp_path / "r")
    assert not recording.complete and recording.steps == [0, 1, 2]


@pytest.mark.parametrize("data", [[5, 6], [[5, 6], [7]], {"input_ids": [[5, 6]]}])
def test_token_ids_from_json(engine: Engine, tmp_path: Path, data: Any) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(data))
    result = engine.generate(input_ids=tmp_path / "ids.json", max_new_tokens=2)
    assert result.prompt_token_ids[0] == (5, 6)


def test_token_ids_from_tensors(engine: Engine, tmp_path: Path) -> None:
    torch.save({"input_ids": torch.tensor([[5, 6]])}, tmp_path / "ids.pt")
    from_file = engine.generate(input_ids=tmp_path / "ids.pt", max_new_tokens=3)
    assert from_file.token_ids == engine.generate(input_ids=torch.tensor([[5, 6]]), max_new_tokens=3).token_ids


@pytest.mark.parametrize("text", ["{", "[]", "[[]]", '["a"]', "[true]", "[1.5]", '{"ids": [1]}', "3"])
def test_token_ids_that_are_none(engine: Engine, tmp_path: Path, text: str) -> None:
    (tmp_path / "ids.json").write_text(text)
    with pytest.raises(UsageError, match=r"ids\.json"):
        engine.generate(input_ids=tmp_path / "ids.json")


def test_token_ids_file_that_is_missing(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.json"):
        engine.generate(input_ids=tmp_path / "nothing.json")


@pytest.mark.parametrize(
    "arguments", [{}, {"prompts": "a", "input_ids": [[1]]}, {"prompt_file": "a.txt", "chat": "b.json"}]
)
def test_one_kind_of_prompt(engine: Engine, arguments: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match="--input-text TEXT, or --input-ids FILE, or --input-file FILE, or --chat FILE"
    ):
        engine.generate(**arguments)


def test_empty_prompt(engine: Engine) -> None:
    with pytest.raises(UsageError, match="the prompt has no tokens"):
        engine.generate(["a", ""])


@pytest.mark.parametrize("number", [0, -3])
def test_number_of_tokens(engine: Engine, number: int) -> None:
    with pytest.raises(UsageError, match="nothing would be generated"):
        engine.generate("a", max_new_tokens=number)


def test_prompt_that_is_too_long(engine: Engine) -> None:
    with pytest.raises(UsageError, match="140 tokens") as caught:
        engine.generate("x" * 120, max_new_tokens=20)
    assert "--max-seq-len 140" in str(caught.value.hint) and "--max-new-tokens" in str(caught.value.hint)


def test_batch_that_is_too_large(engine: Engine) -> None:
    with pytest.raises(UsageError, match="9 sequences") as caught:
        engine.generate(["a"] * 9)
    assert "--max-batch-size 9" in str(caught.value.hint)


def test_tokenizer_of_another_model(engine: Engine, tmp_path: Path) -> None:
    byte_tokenizer("larger").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="the tokenizer does not belong to the model") as caught:
        engine.generate("a", tokenizer=tmp_path)
    assert "leave out --tokenizer" in str(caught.value.hint)


def test_tokenizer_of_its_own_may_be_given(engine: Engine, checkpoint: Path) -> None:
    assert (
        engine.generate("a", max_new_tokens=2, tokenizer=checkpoint).texts
        == engine.generate("a", max_new_tokens=2).texts
    )


def test_engine_without_tokenizer(model: Any, tmp_path: Path) -> None:
    engine = glass.build(save_checkpoint(model, tmp_path / "m", tokenizer=False), tmp_path / "e", backend="eager")
    assert not engine.manifest.tokenizer
    with pytest.raises(UsageError, match="has no tokenizer"):
        engine.generate("a")
    byte_tokenizer("larger").save_pretrained(tmp_path / "large")
    with pytest.raises(UsageError, match="at most 259, the model's vocabulary"):
        engine.generate("a", tokenizer=tmp_path / "large")
    assert engine.generate(input_ids=[[5]], max_new_tokens=2).texts is None


@pytest.mark.parametrize("make", [False, True])
def test_tokenizer_that_cannot_be_loaded(engine: Engine, tmp_path: Path, make: bool) -> None:
    if make:
        (tmp_path / "t").mkdir()
    with pytest.raises(UsageError, match="tokenizer"):
        engine.generate("a", tokenizer=tmp_path / "t")
