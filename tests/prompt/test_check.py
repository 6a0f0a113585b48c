"""Two sides of a prompt: each planted difference is named, and what is the same is no difference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import glassengine as glass
from glassengine.cli.main import main
from glassengine.errors import BackendError, UsageError
from tests.prompt.planted import (
    GENERATION,
    TEMPLATE,
    Change,
    compared,
    copied,
    exchange,
    genai_of,
    gguf_of,
    normalizer,
    prefix,
    processor,
    shuffle,
    split,
    strip,
    unsplit,
    without_normalizer,
    wrong,
)

TOKENS: dict[str, tuple[str, Change]] = {
    "no BOS": ("no BOS", processor()),
    "twice": ("BOS twice", processor("<|begin|>", "<|begin|>")),
    "another": ("another BOS", processor("<|pad|>")),
    "end": ("EOS added", processor("<|begin|>", last=("<|end|>",))),
    "one digit": ("pre-tokenizer (digits)", split(r"\p{N}{1,3}", r"\p{N}")),
    "all digits": ("pre-tokenizer (digits)", split(r"\p{N}{1,3}", r"\p{N}+")),
    "contractions": ("pre-tokenizer (contractions", split("(?i:'s|'t|'re|'ve|'m|'ll|'d)|", "'s|'t|'re|'ve|'m|'ll|'d|")),
    "line ends": ("pre-tokenizer (", split(r"\s*[\r\n]+|", "")),
    "no NFC": ("normalization (NFC)", normalizer()),
    "NFKC": ("normalization (NFKC)", normalizer("NFKC")),
    "lower case": ("normalization (lower case)", normalizer("NFC", "Lowercase")),
    "accents": ("normalization (accents are removed)", normalizer("NFD", "StripAccents")),
    "white space": (
        "normalization (white space)",
        strip,
    ),
    "prefix space": ("prefix space", prefix),
    "merges": ("merge order", shuffle),
    "vocabulary": ("vocabulary", exchange),
    "unsplit": ("added token not split", unsplit),
}


@pytest.mark.parametrize("name", TOKENS)
def test_a_planted_difference_of_tokens_is_named(name: str, trained: Path, tmp_path: Path) -> None:
    cause, change = TOKENS[name]
    result = compared(trained, copied(trained, tmp_path / "other", "tokenizer.json", change))
    assert not result.ok and wrong(result)[0].startswith(cause), result.findings


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("system prompt dropped", ("m.role + '\\n'", "'' if m.role == 'system' else m.role + '\\n'")),
        ("tools dropped", ("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}", "")),
        ("tool call dropped", ("{{ '<call>' + c.function | tojson }}", "")),
        ("text at the end missing", ("{{ '<|im_start|>assistant\\n' }}", "")),
        ("white space of the template", ("{{ '<|im_end|>\\n' }}", "{{ '<|im_end|>' }}")),
        ("conversation refused", ("{% for m in messages %}", "{% for m in messages %}{{ raise_exception('no') }}")),
        ("reasoning dropped", ("(m.content or '')", "(m.content or '').split('</think>')[-1]")),
        ("text of the template", ("m.role + '\\n'", "m.role[0] + '\\n'")),
        ("text at the begin added", ("{% for m in messages %}", "{{ bos_token }}{% for m in messages %}")),
    ],
)
def test_a_planted_difference_of_templates_is_named(
    cause: str, change: tuple[str, str], trained: Path, tmp_path: Path
) -> None:
    assert change[0] in TEMPLATE
    text = TEMPLATE.replace(*change)
    if cause == "system prompt dropped":
        text = TEMPLATE.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    other = copied(trained, tmp_path / "other", "tokenizer_config.json", lambda one: one.update(chat_template=text))
    result = compared(trained, other)
    assert not result.ok and cause in wrong(result), result.findings


def test_a_begin_that_template_and_tokenizer_write_is_a_note(trained: Path, tmp_path: Path) -> None:
    text = "{{ bos_token }}" + TEMPLATE
    other = copied(trained, tmp_path / "other", "tokenizer_config.json", lambda one: one.update(chat_template=text))
    assert any(one.cause == "BOS twice in rendered text" for one in compared(other, other).findings)
    assert compared(other, other).ok


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("temperature", {"temperature": 0.7}),
        ("repetition_penalty", {"repetition_penalty": 1.1}),
        ("eos_token_id", {"eos_token_id": 1}),
        ("top_k", {"top_k": 20}),
        ("top_k", {"top_k": 0}),
        ("top_p", {"top_p": None}),
    ],
)
def test_a_planted_difference_of_settings_is_named(
    name: str, change: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    other = copied(trained, tmp_path / "other", "generation_config.json", lambda one: one.update(change))
    result = compared(trained, other)
    assert wrong(result) == [name] and not result.ok


def test_what_transformers_takes_without_being_told_is_no_difference(trained: Path, tmp_path: Path) -> None:
    other = copied(trained, tmp_path / "other", "generation_config.json", lambda one: one.update(top_k=50, min_p=0.0))
    assert compared(trained, other).ok


def test_settings_that_the_candidate_lacks_are_named(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "other")
    (tmp_path / "other" / "generation_config.json").unlink()
    result = compared(trained, tmp_path / "other")
    assert not result.ok and wrong(result) == ["temperature", "top_p"]


def test_a_chat_template_that_the_candidate_lacks_is_named(trained: Path, tmp_path: Path) -> None:
    other = copied(trained, tmp_path / "other", "tokenizer_config.json", lambda one: one.pop("chat_template"))
    result = compared(trained, other)
    assert not result.ok and wrong(result) == ["no chat template"]


def test_tokens_that_the_candidate_lacks_are_named(trained: Path, tmp_path: Path) -> None:
    def cut(document: dict[str, Any]) -> None:
        model = document["model"]
        last = max(model["vocab"], key=model["vocab"].__getitem__)
        del model["vocab"][last]
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) != last]

    assert wrong(compared(trained, copied(trained, tmp_path / "other", "tokenizer.json", cut)))[0] == "missing tokens"


def test_a_directory_is_the_same_as_itself(trained: Path) -> None:
    result = glass.check_prompt(str(trained), str(trained))
    assert result.ok and result.findings == [] and result.compared["tokens"] > 400 and not result.skipped
    assert result.compared["template"] >= 15


def test_ids_beyond_the_embeddings_are_named(trained: Path, tmp_path: Path) -> None:
    other = copied(trained, tmp_path / "other", "config.json", lambda one: one.update(vocab_size=1000))
    assert wrong(compared(trained, other)) == ["vocabulary beyond the embeddings"]


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        (None, {}),
        ("no BOS", {"add_bos_token": False}),
        ("EOS added", {"add_eos_token": True}),
        ("pre-tokenizer", {"pre": "default"}),
        ("pre-tokenizer", {"pre": None}),
        ("pre-tokenizer (digits", {"pre": "qwen2"}),
        ("special token bos", {"bos_token_id": 3}),
        ("merge order", {"merges": "shuffled"}),
        ("added token", {"token_type": "normal"}),
        ("eos_token_id", {"generation": [1, 3]}),
    ],
)
def test_a_gguf_file_is_tokenized_by_llama_cpp(
    cause: str | None, changes: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    pytest.importorskip("xllamacpp")
    base = without_normalizer(trained, tmp_path / "base")
    document = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    if changes.get("merges") == "shuffled":
        shuffle(document)
        changes = {"merges": [" ".join(pair) for pair in document["model"]["merges"]]}
    if "generation" in changes:
        (base / "generation_config.json").write_text(json.dumps({**GENERATION, "eos_token_id": changes["generation"]}))
        changes = {}
    if changes.get("token_type") == "normal":
        changes = {"token_type": [1] * len(document["model"]["vocab"])}
    result = compared(base, gguf_of(base, tmp_path / "model.gguf", **changes))
    causes = wrong(result)
    assert result.ok == (cause is None) and (cause is None or causes[0].startswith(cause)), result.findings


def test_llama_cpp_cannot_normalize_and_that_is_a_limit(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    result = compared(trained, gguf_of(trained, tmp_path / "model.gguf"))
    assert result.ok and [one.cause for one in result.findings if one.level == "limit"] == ["normalization (NFC)"]


THINKS = "{% if enable_thinking %}<think>{% endif %}"
IS_TEXT = "{% if messages[-1].content is none %}none{% endif %}"


@pytest.mark.parametrize(
    ("template", "other", "level", "cause"),
    [
        (TEMPLATE, None, None, None),
        (TEMPLATE + THINKS, None, "limit", "the engine renders templates otherwise: it sets enable_thinking = True"),
        (TEMPLATE, TEMPLATE.replace("<|im_end|>\\n", "<|im_end|>"), "wrong", "white space of the template"),
        (TEMPLATE + THINKS, TEMPLATE.replace("<|im_end|>\\n", "<|im_end|>") + THINKS, "wrong", "white space"),
    ],
)
def test_llama_cpp_renders_templates_by_its_own_jinja(
    template: str, other: str | None, level: str | None, cause: str | None, trained: Path, tmp_path: Path
) -> None:
    pytest.importorskip("xllamacpp")
    base = without_normalizer(trained, tmp_path / "base")
    (base / "chat_template.jinja").write_text(template)
    result = compared(base, gguf_of(base, tmp_path / "model.gguf", template=other or template))
    found = [one for one in result.findings if one.part == "template" and one.level != "note"]
    assert result.ok == (level != "wrong") and [one.level for one in found[:1]] == [level][: level is not None], found
    assert cause is None or found[0].cause.startswith(cause)


def test_missing_content_is_no_difference_of_templates(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_genai")
    template = TEMPLATE + IS_TEXT
    base = copied(trained, tmp_path / "base", "tokenizer_config.json", lambda one: one.update(chat_template=template))
    result = compared(base, genai_of(trained, tmp_path / "genai", {}, template))
    assert not [one for one in result.findings if one.part == "template" and one.level == "wrong"], result.findings


@pytest.mark.parametrize(
    ("causes", "change"),
    [([], {}), (["special token eos", "eos_token_id"], {"eos_token_id": 2}), (["top_p"], {"search": {"top_p": 0.5}})],
)
def test_a_folder_of_genai_is_tokenized_by_its_engine(
    causes: list[str], change: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime_genai")
    result = compared(trained, genai_of(trained, tmp_path / "genai", change))
    assert wrong(result) == causes, result.findings
    assert {one.cause for one in result.findings if one.level == "limit"} >= {"no BOS"}


@pytest.mark.parametrize(
    ("template", "other", "level"),
    [
        ("{% if messages %}\n" + TEMPLATE + "{% endif %}", None, "limit"),  # the engine keeps the line end
        (TEMPLATE, TEMPLATE.replace("<|im_end|>\\n", "<|im_end|>"), "wrong"),
    ],
)
def test_only_what_the_engine_makes_of_the_same_template_is_a_limit(
    template: str, other: str | None, level: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime_genai")
    base = copied(trained, tmp_path / "base", "tokenizer_config.json", lambda one: one.update(chat_template=template))
    spec = genai_of(trained, tmp_path / "genai", {}, other or template)
    result = compared(base, spec)
    levels = {one.level for one in result.findings if one.part == "template"}
    assert level in levels and result.ok == (level == "limit"), result.findings
    assert main(["check-prompt", str(base), spec]) == (0 if result.ok else 1)
    shown = capsys.readouterr().out.splitlines()[0]
    assert shown.startswith("ok: nothing differs but what the engine" if result.ok else "NOT OK: template: ")


def test_the_command_shows_the_first_cause(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = copied(trained, tmp_path / "other", "tokenizer.json", split(r"\p{N}{1,3}", r"\p{N}"))
    assert main(["check-prompt", str(trained), str(other)]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("NOT OK: tokens: pre-tokenizer (digits)") and len(shown.splitlines()) <= 25
    assert main(["check-prompt", str(trained), str(other), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False and document["findings"][0]["cause"] == "pre-tokenizer (digits)"


def test_merges_of_unknown_tokens_end_with_an_error(trained: Path, tmp_path: Path) -> None:
    other = copied(
        trained, tmp_path / "other", "tokenizer.json", lambda one: one["model"]["merges"].insert(0, ["zq", "qz"])
    )
    with pytest.raises((UsageError, BackendError), match=r"the tokenizer cannot be opened|the process of a tokenizer"):
        glass.check_prompt(str(trained), str(other))


@pytest.mark.parametrize(
    "text", ["{{ ''.__class__ }}", "{{ 'a' * 10**11 }}", "{% for i in range(10**12) %}{% endfor %}"]
)
def test_a_hostile_template_ends_within_bounds(text: str, trained: Path, tmp_path: Path) -> None:
    other = copied(trained, tmp_path / "other", "tokenizer_config.json", lambda one: one.update(chat_template=text))
    result = glass.check_prompt(str(trained), str(other))
    assert not result.ok and (text[3:5] == "''" or wrong(result)[0] == "conversation refused")


@pytest.mark.parametrize(
    ("spec", "what"),
    [("nowhere", "no such directory"), ("genai:nowhere", "no such directory"), ("a.gguf", "no such file")],
)
def test_a_side_that_is_missing_is_named_before_anything_is_loaded(spec: str, what: str, trained: Path) -> None:
    with pytest.raises(UsageError, match=what):
        glass.check_prompt(str(trained), spec)


def bos_twice(trained: Path, folder: Path) -> tuple[Path, Path]:
    text = "{{ bos_token }}" + TEMPLATE
    other = copied(trained, folder / "other", "tokenizer_config.json", lambda one: one.update(chat_template=text))
    return other, other


def llama_3_pre_tokenizer(trained: Path, folder: Path) -> tuple[Path, Path]:
    pytest.importorskip("xllamacpp")
    base = without_normalizer(trained, folder / "base")
    return base, gguf_of(base, folder / "model.gguf", pre="default")


def reasoning_dropped(trained: Path, folder: Path) -> tuple[Path, Path]:
    text = TEMPLATE.replace("(m.content or '')", "(m.content if loop.last else m.content.split('</think>')[-1])")
    return trained, copied(
        trained, folder / "other", "tokenizer_config.json", lambda one: one.update(chat_template=text)
    )


def repetition_penalty(trained: Path, folder: Path) -> tuple[Path, Path]:
    change = {"repetition_penalty": 1.1}
    return trained, copied(trained, folder / "other", "generation_config.json", lambda one: one.update(change))


@pytest.mark.parametrize(
    ("cause", "rebuilt"),
    [
        pytest.param("BOS twice in rendered text", bos_twice, id="vLLM PR 16976"),
        pytest.param("pre-tokenizer (", llama_3_pre_tokenizer, id="llama.cpp 7476"),
        pytest.param("reasoning dropped", reasoning_dropped, id="trl 5224"),
        pytest.param("prefix not kept", reasoning_dropped, id="trl 5224, prefix"),
        pytest.param("repetition_penalty", repetition_penalty, id="NeMo-RL 3497"),
    ],
)  # the wrong mel filter of onnxruntime-extensions PR 969 is in test_processors.py
def test_a_known_bug_is_named(
    cause: str, rebuilt: Callable[[Path, Path], tuple[Path, Path]], trained: Path, tmp_path: Path
) -> None:
    result = compared(*rebuilt(trained, tmp_path))
    assert any(one.cause.startswith(cause) for one in result.findings), result.findings
    assert not result.ok or cause.startswith("BOS twice")  # which both sides have
