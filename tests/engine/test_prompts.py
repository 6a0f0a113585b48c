"""Prompts: files, chats and token ids become left-padded rows, or a message says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glassengine.engine import Engine, prompts
from glassengine.engine.prompts import pad_left, read_chat, read_input_ids, read_prompt_file
from glassengine.errors import UsageError
from glassengine.testing.checkpoints import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
ASK = [{"role": "user", "content": "Hey"}]
TALK = [{"role": "system", "content": "be brief"}, *ASK]


def written(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "Hey, you\r\n\n  \n \u00fcber\u2028x\n"),
        ("a.json", json.dumps(["Hey, you", {"prompt": " \u00fcber\u2028x"}])),
        ("a.jsonl", '"Hey, you"\n\n{"text": " \u00fcber\u2028x", "id": 7}\n'),
    ],
)
def test_prompt_files(tmp_path: Path, name: str, text: str) -> None:
    assert read_prompt_file(written(tmp_path, name, text)) == ("Hey, you", " \u00fcber\u2028x")


def test_prompt_file_is_generated_from(engine: Engine, tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "Hey\n\nSoyer trained as a\n")
    made = engine.generate(prompt_file=path, max_new_tokens=5)
    assert made == engine_like(made, engine.generate(["Hey", "Soyer trained as a"], max_new_tokens=5))


def engine_like(made: Any, wanted: Any) -> Any:
    """Return `wanted` with the times of `made`."""
    import dataclasses

    return dataclasses.replace(wanted, prefill_s=made.prefill_s, decode_s=made.decode_s)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "\n \n", "has no prompts"),
        ("a.json", "[]", "has no prompts"),
        ("a.json", "[3]", "something else than prompts"),
        ("a.json", '[{"question": "x"}]', "something else than prompts"),
        ("a.json", "[" * 100_000, "cannot be read"),
        ("a.jsonl", '"x"\n{', "cannot be read"),
        ("a.csv", "x", r"expected: \.txt, \.json or \.jsonl"),
    ],
)
def test_prompt_files_that_hold_none(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_prompt_file(written(tmp_path, name, text))


@pytest.mark.parametrize("name", ["a.txt", "a.json"])
def test_files_that_cannot_be_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_prompt_file(tmp_path / name)
    (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a text file"):
        read_prompt_file(tmp_path / name)
    monkeypatch.setattr(prompts, "MAX_BYTES", 2)
    with pytest.raises(UsageError, match=r"3 bytes\n.*at most 2"):
        read_prompt_file(tmp_path / name)


@pytest.mark.parametrize(
    ("chat", "count"),
    [
        (TALK, 1),
        ([ASK, TALK], 2),
        ([{"messages": ASK}, {"messages": TALK}], 2),
        (("a.json", json.dumps(TALK)), 1),
        (("a.json", json.dumps({"messages": TALK})), 1),
        (("a.jsonl", "\n".join(json.dumps({"messages": m}) for m in (ASK, TALK))), 2),
        (("a.jsonl", "\n".join(json.dumps(m) for m in (ASK, TALK))), 2),
        (("a.jsonl", "\n".join(json.dumps(m) for m in TALK)), 1),
    ],
    ids=[
        "messages",
        "conversations",
        "objects",
        "json",
        "json object",
        "jsonl objects",
        "jsonl lists",
        "jsonl messages",
    ],
)
def test_chats(tmp_path: Path, chat: Any, count: int) -> None:
    given = written(tmp_path, *chat) if isinstance(chat, tuple) else chat
    assert read_chat(given) == ([TALK] if count == 1 else [ASK, TALK])


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], "has no messages"),
        ([[]], "not a chat file"),
        (["Hey"], "not a chat file"),
        ([{"content": "Hey"}], "not a chat file"),
        ([{"role": "user"}], "not a chat file"),
        ([{"messages": 3}], "not a chat file"),
    ],
)
def test_chats_that_are_none(chat: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_chat(chat)


def test_chat_goes_through_the_template(engine: Engine, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    made = engine.generate(chat=[ASK, TALK], tokenizer=tmp_path, max_new_tokens=3)
    expected = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in (ASK, TALK)]
    assert made.prompt_token_ids == tuple(map(tuple, expected))
    assert made.prompts[0] == "<s>user: Hey</s><s>assistant:"
    assert made.token_ids == engine.generate(input_ids=expected, max_new_tokens=3).token_ids


def test_tokenizer_without_chat_template(engine: Engine) -> None:
    with pytest.raises(UsageError, match="no chat template") as caught:
        engine.generate(chat=ASK)
    assert "--input-text TEXT" in str(caught.value.hint)


def test_template_that_refuses(engine: Engine, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="roles must alternate"):
        engine.generate(chat=ASK, tokenizer=tmp_path)


def test_padding_on_the_left() -> None:
    ids, mask = pad_left([[5, 6, 7], [8]], 9)
    assert ids.tolist() == [[5, 6, 7], [9, 9, 8]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_no_prompt_at_all(engine: Engine) -> None:
    with pytest.raises(UsageError, match="nothing to generate from"):
        engine.generate([])


def test_streaming_a_batch(engine: Engine) -> None:
    with pytest.raises(UsageError, match="streamed for a single sequence"):
        engine.generate(["a", "b"], on_text=print)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "an empty list"),
        ("[[5], []]", "no tokens as sequence 1"),
        ("[[1, 1.5]]", r"float '1\.5' as a token of sequence 0"),
        ("[true]", "bool 'True' as a token"),
        ('["hi"]', "str 'hi' as a token"),
        ("[[1], 2]", "int as sequence 1"),
        ('{"ids": [1]}', r"holds no token ids\n.*got: ids\n.*input_ids"),
        ("[" * 100_000, "cannot be read"),
        ("[1", "cannot be read"),
    ],
)
def test_files_that_hold_no_token_ids(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_input_ids(written(tmp_path, "a.json", text))


def test_a_file_of_token_ids_that_is_missing_names_its_flag(tmp_path: Path) -> None:
    for name in ("a.json", "a.pt"):
        with pytest.raises(UsageError, match=r"(?s)no such file.*--input-ids FILE"):
            read_input_ids(tmp_path / name)


def test_the_mark_that_editors_begin_a_file_with_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    assert read_prompt_file(written(tmp_path, "a.txt", "\ufeffone\r\ntwo\r\n")) == ("one", "two")
