"""Sampling and settings: transformers' own processors, criteria and distribution, and refusals by name."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.engine import Engine
from glassengine.engine.prompts import pad_left
from glassengine.engine.run.generate import FILE, read_settings
from glassengine.engine.tokenizing import TextStream
from glassengine.errors import CorruptError, UnknownNameError, UsageError
from glassengine.testing import models
from glassengine.testing.checkpoints import byte_tokenizer, save_checkpoint

ROWS = [[5, 6, 7, 5, 6], [8, 9]]


def transformers_rows(model: Any, rows: list[list[int]], new: int, **settings: Any) -> list[list[int]]:
    ids, mask = pad_left(rows, 0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(settings.pop("seed", 0))
        made = model.generate(ids, attention_mask=mask, max_new_tokens=new, pad_token_id=0, **settings)
    return [row[ids.shape[1] :].tolist() for row in made]


def agrees(engine: Engine, model: Any, new: int = 12, **settings: Any) -> None:
    made = engine.generate(input_ids=ROWS, max_new_tokens=new, **settings).token_ids
    expected = transformers_rows(model, ROWS, new, **settings)
    width = max(map(len, made))
    assert [[*row, *[0] * (width - len(row))] for row in made] == [row[:width] for row in expected]
    assert all(set(row[width:]) <= {0} for row in expected)


SAMPLED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 9},
    {"top_k": 0, "top_p": 0.8},
    {"min_p": 0.1},
    {"typical_p": 0.7},
    {"epsilon_cutoff": 0.01},
    {"eta_cutoff": 0.02},
    {"top_h": 0.5},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "renormalize_logits": True},
]


@pytest.mark.parametrize("settings", SAMPLED, ids=lambda s: "-".join(s) or "plain")
def test_sampled_tokens_are_those_of_transformers_with_the_seed(
    engine: Engine, model: Any, settings: dict[str, Any]
) -> None:
    agrees(engine, model, do_sample=True, seed=11, **settings)


GREEDY: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"encoder_repetition_penalty": 0.5},
    {"encoder_no_repeat_ngram_size": 2},
    {"min_length": 12, "eos_token_id": list(range(3, 240))},
    {"min_new_tokens": 6, "eos_token_id": list(range(3, 240))},
    {"forced_eos_token_id": 77},
    {"exponential_decay_length_penalty": (2, 3.0)},
    {"sequence_bias": [[[100], 20.0], [[5, 6], -9.0]]},
    {"bad_words_ids": [[100], [101]]},
    {"suppress_tokens": list(range(3, 160))},
    {"watermarking_config": {"greenlist_ratio": 0.5, "bias": 30.0}},
    {"remove_invalid_values": True},
]


@pytest.mark.parametrize("settings", GREEDY, ids=lambda s: next(iter(s)))
def test_greedy_settings_of_transformers(engine: Engine, model: Any, settings: dict[str, Any]) -> None:
    agrees(engine, model, do_sample=False, **settings)


def test_seeds(engine: Engine) -> None:
    def tokens(seed: int | None) -> Any:
        made = engine.generate(input_ids=ROWS, max_new_tokens=16, do_sample=True, temperature=3.0, seed=seed)
        return made.token_ids, made.seed

    state = torch.random.get_rng_state()
    assert tokens(1) == tokens(1) and tokens(1)[0] != tokens(2)[0]
    drawn, seed = tokens(None)
    assert seed is not None and tokens(seed)[0] == drawn and tokens(None)[0] != drawn
    assert torch.equal(torch.random.get_rng_state(), state)  # the process's own random numbers are left alone
    assert engine.generate(input_ids=ROWS, max_new_tokens=1, seed=1).seed is None  # greedy


def test_distribution_is_that_of_transformers(tmp_path: Path) -> None:
    # One step of 4000 sequences: chi-square of the tokens drawn against the probabilities of transformers' processors.
    model: Any = models.llama(vocab_size=16, num_hidden_layers=1)
    engine = glass.build(model, tmp_path / "e", backend="eager", max_batch_size=4000, max_seq_len=8)
    settings = {"temperature": 1.3, "top_k": 12, "top_p": 0.97}
    rows = [[5, 6, 7]] * 4000
    made = engine.generate(input_ids=rows, max_new_tokens=1, do_sample=True, seed=3, **settings)
    counts = torch.bincount(torch.tensor(made.token_ids)[:, 0], minlength=16).double()
    with torch.no_grad():
        scores = model.generate(
            torch.tensor(rows[:1]), attention_mask=torch.ones(1, 3, dtype=torch.int64), max_new_tokens=1,
            do_sample=True, output_scores=True, return_dict_in_generate=True, pad_token_id=0, **settings,
        ).scores[0][0]  # fmt: skip
    expected = scores.double().softmax(-1) * 4000

    def statistic(wanted: torch.Tensor) -> float:
        seen = wanted > 0
        return float(((counts - wanted)[seen] ** 2 / wanted[seen]).sum())

    freedom = int((expected > 0).sum()) - 1
    assert not counts[expected == 0].any() and 5 <= freedom < 12
    limit = freedom + 4 * math.sqrt(2 * freedom)  # a true null exceeds it about once in ten thousand seeds
    assert statistic(expected) < limit
    # A wrong temperature is seen.
    wrong = (scores.double() * 1.15).softmax(-1) * 4000
    assert statistic(wrong) > limit


def test_several_sequences_of_a_prompt(engine: Engine, model: Any) -> None:
    made = engine.generate(input_ids=ROWS, max_new_tokens=5, do_sample=True, seed=4, num_return_sequences=3)
    expected = transformers_rows(model, ROWS, 5, do_sample=True, seed=4, num_return_sequences=3)
    assert [row[: len(own)] for row, own in zip(expected, made.token_ids, strict=True)] == list(
        map(list, made.token_ids)
    )
    assert made.prompt_token_ids == tuple(tuple(row) for row in ROWS for _ in range(3))


def test_the_settings_of_the_engine_decide(
    engine: Engine, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FILE).write_text('{"do_sample": true, "top_k": 7, "eos_token_id": 2, "pad_token_id": 0}')
    assert engine.tokenizer  # read from where it really is
    monkeypatch.setattr(engine, "directory", tmp_path)
    made = engine.generate(input_ids=ROWS, max_new_tokens=8, seed=5)
    assert (
        made.token_ids == engine.generate(input_ids=ROWS, max_new_tokens=8, seed=5, do_sample=True, top_k=7).token_ids
    )
    greedy = engine.generate(input_ids=ROWS, max_new_tokens=8, do_sample=False)
    assert greedy.seed is None and greedy.token_ids != made.token_ids


@pytest.mark.parametrize("kind", ["object", "mapping", "file", "directory"])
def test_settings_from_elsewhere(engine: Engine, tmp_path: Path, kind: str) -> None:
    from transformers import GenerationConfig

    data = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 7, "eos_token_id": None}
    path = tmp_path / FILE
    path.write_text(json.dumps(data))
    given = {"object": GenerationConfig(**data), "mapping": data, "file": path, "directory": tmp_path}[kind]
    made = engine.generate(input_ids=ROWS, generation_config=given, seed=6)
    wanted = engine.generate(input_ids=ROWS, do_sample=True, temperature=2.0, max_new_tokens=7, seed=6)
    assert made.token_ids == wanted.token_ids
    # what is given by name wins
    assert engine.generate(input_ids=ROWS, generation_config=given, do_sample=False).seed is None


def test_end_token_can_be_turned_off(engine: Engine) -> None:
    free = engine.generate(input_ids=ROWS, max_new_tokens=20, eos_token_id=None).token_ids
    assert all(len(row) == 20 for row in free)
    ended = engine.generate(input_ids=ROWS, max_new_tokens=20, eos_token_id=[free[0][4]]).token_ids
    assert ended[0] == free[0][: free[0].index(free[0][4]) + 1]


def test_stop_strings(engine: Engine) -> None:
    free = engine.generate("Hey", max_new_tokens=24, eos_token_id=None)
    assert free.texts is not None
    # The text of two tokens in the middle that are plain characters.
    text = next(free.texts[0][i : i + 2] for i in range(4, 20) if free.texts[0][i : i + 2].isascii())
    made = engine.generate("Hey", max_new_tokens=24, eos_token_id=None, stop_strings=[text])
    assert made.texts is not None and text in made.texts[0] and made.num_steps < 24
    assert free.token_ids[0][: len(made.token_ids[0])] == made.token_ids[0]


def test_time_limit(engine: Engine) -> None:
    assert engine.generate(input_ids=ROWS, max_new_tokens=60, max_time=1e-9, eos_token_id=None).num_steps == 1


def test_lengths(engine: Engine) -> None:
    assert engine.generate(input_ids=ROWS, max_length=9, eos_token_id=None).num_steps == 4
    with pytest.raises(UsageError, match="nothing would be generated"):
        engine.generate(input_ids=ROWS, max_length=5)
    # by default no more than fits
    assert engine.generate(input_ids=[[5] * 120], eos_token_id=None).num_steps == 8
    with pytest.raises(UsageError, match="at most 128"):
        engine.generate(input_ids=[[5] * 130])


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 4},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"prompt_lookup_num_tokens": 3},
        {"guidance_scale": 1.5},
        {"token_healing": True},
        {"dola_layers": "low"},
    ],
    ids=lambda s: next(iter(s)),
)
def test_settings_of_other_loops_are_refused_by_name(engine: Engine, settings: dict[str, Any]) -> None:
    name = next(iter(settings))
    with pytest.raises(UsageError, match=f"'{name}' needs another loop") as caught:
        engine.generate(input_ids=ROWS, **settings)
    assert name in str(caught.value.hint)


def test_setting_of_another_loop_in_the_engine(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FILE).write_text('{"num_beams": 4, "cache_implementation": "hybrid", "output_attentions": true}')
    assert engine.tokenizer
    monkeypatch.setattr(engine, "directory", tmp_path)
    with pytest.raises(UsageError, match=r"num_beams=4 in generation_config\.json of the engine") as caught:
        engine.generate(input_ids=ROWS, max_new_tokens=2)
    assert caught.value.hint == "generate with num_beams=1"
    # the other two change no token
    assert engine.generate(input_ids=ROWS, max_new_tokens=2, num_beams=1).num_steps == 2


@pytest.mark.parametrize("name", ["output_scores", "use_cache", "prefill_chunk_size"])
def test_settings_of_how_a_model_runs(engine: Engine, name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}' is a setting of how transformers runs a model"):
        engine.generate(input_ids=ROWS, **{name: 1})


def test_unknown_setting(engine: Engine) -> None:
    with pytest.raises(UnknownNameError, match=r"'temperatures'[\s\S]*nearest: temperature"):
        engine.generate(input_ids=ROWS, temperatures=0.5)
    with pytest.raises(UnknownNameError, match="'topk'"):
        engine.generate(input_ids=ROWS, generation_config={"topk": 5})


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "temperature": -1.0},
        {"do_sample": True, "top_k": -3},
        {"num_return_sequences": 2},
        {"eos_token_id": "x"},
        {"bad_words_ids": 3},
    ],
    ids=lambda s: list(s)[-1],
)
def test_values_that_transformers_refuses(engine: Engine, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="refused by transformers"):
        engine.generate(input_ids=ROWS, max_new_tokens=2, **settings)


def test_temperature_zero_names_the_flag_of_greedy_decoding(engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"(?s)strictly positive.*--no-do-sample"):
        engine.generate(input_ids=ROWS, max_new_tokens=2, do_sample=True, temperature=0.0)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seeds_that_do_not_fit(engine: Engine, seed: int) -> None:
    with pytest.raises(UsageError, match=r"invalid seed\n.*\n.*64 bits"):
        engine.generate(input_ids=ROWS, max_new_tokens=2, do_sample=True, seed=seed)


def test_idle_settings_are_said(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "glassengine"):
        engine.generate(input_ids=ROWS, max_new_tokens=1, temperature=0.5, top_k=50)
    assert "temperature: without effect while decoding is greedy" in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}', '{"max_new_tokens": "many"}'])
def test_damaged_settings(engine: Engine, tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CorruptError, match=FILE):
        read_settings(tmp_path, None, {}, max_length=8, vocab_size=16)
    with pytest.raises(UsageError, match=FILE):
        engine.generate(input_ids=ROWS, generation_config=tmp_path / FILE)


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
