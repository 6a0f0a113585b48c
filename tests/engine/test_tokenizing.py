"""Chat templates end in time, and take no more memory than they may; nothing they do is seen outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glassengine.engine import tokenizing
from glassengine.engine.prompts import apply_chat_template, load_tokenizer
from glassengine.engine.tokenizing import decode, encode, token_rows
from glassengine.errors import CorruptError, GlassError, UsageError

CHAT = [[{"role": "user", "content": "Größe"}]]


@pytest.fixture
def tokenizer(checkpoint: Any) -> Callable[[str], Any]:
    from transformers import AutoTokenizer

    def made(template: str) -> Any:
        found = AutoTokenizer.from_pretrained(checkpoint)
        found.chat_template = template
        return found

    return made


def test_a_template_is_run_as_it_was(tokenizer: Callable[[str], Any]) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '!' * 3 }}"
    assert apply_chat_template(tokenizer(template), CHAT * 2) == ("<user>Größe!!!",) * 2
    with pytest.raises(UsageError, match=r"refuses the messages\n.*roles must alternate"):
        apply_chat_template(tokenizer("{{ raise_exception('roles must alternate') }}"), CHAT)
    with pytest.raises(UsageError, match="TemplateSyntaxError"):
        apply_chat_template(tokenizer("{% for %}"), CHAT)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 3500000000 }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ 'a'.ljust(3500000000) }}",
        "{{ lipsum(n=100000000) }}",
        "{% set x = namespace(v='aaaaaaaa') %}{% for i in range(40) %}{% set x.v = x.v ~ x.v %}{% endfor %}{{ x.v }}",
        "{{ 'a' * 20000000 }}",
    ],
)
def test_s4_a_template_does_not_fill_memory(
    template: str, tokenizer: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "MOST_SECONDS", 1.0)
    with pytest.raises(UsageError, match="chat template"):
        apply_chat_template(tokenizer(template), CHAT)


def test_s4_a_template_ends(tokenizer: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "MOST_SECONDS", 0.5)
    loops = "".join(f"{{% for {name} in range(99999) %}}" for name in "ijk") + "{% endfor %}" * 3
    started = time.perf_counter()
    with pytest.raises(UsageError, match="does not end"):
        apply_chat_template(tokenizer(loops), CHAT)
    assert time.perf_counter() - started < 60


def test_s1_a_template_does_not_leave_the_sandbox(tokenizer: Callable[[str], Any]) -> None:
    for template in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"):
        try:
            (text,) = apply_chat_template(tokenizer(template), CHAT)
        except UsageError:
            continue
        assert text == ""


def test_nothing_of_the_process_is_left() -> None:
    seen: list[int] = []
    assert tokenizing.bounded(lambda: seen.append(1) or "text") == "text"  # type: ignore[func-returns-value]
    assert not seen
    with pytest.raises(CorruptError, match="SystemExit"):
        tokenizing.bounded(lambda: exit(3))  # type: ignore[func-returns-value]


Change = Callable[[dict[str, Any]], None]
TEXT = "a" * 44 + "c"


@pytest.fixture
def changed(checkpoint: Any, tmp_path: Path) -> Callable[[Change], Path]:
    def made(change: Change) -> Path:
        folder = Path(shutil.copytree(checkpoint, tmp_path / "changed"))
        settings = json.loads((folder / "tokenizer.json").read_text())
        change(settings)
        (folder / "tokenizer.json").write_text(json.dumps(settings))
        return folder

    return made


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def normalizer(settings: dict[str, Any]) -> None:
    settings["normalizer"] = {"type": "Sequence", "normalizers": [replace({"String": "a"}, "a" * 10)] * 12}


def post_processor(settings: dict[str, Any]) -> None:
    settings["post_processor"]["single"] = [
        *[{"SpecialToken": {"id": "X", "type_id": 0}}] * 100_000,
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    settings["post_processor"]["special_tokens"] = {"X": {"id": "X", "ids": [1] * 10_000, "tokens": ["x"] * 10_000}}


def expression(settings: dict[str, Any]) -> None:
    settings["normalizer"] = replace({"Regex": "^(([a-z])+.)+[A-Z]([a-z])+$"}, "x")


@pytest.mark.parametrize("change", [normalizer, post_processor, expression])
def test_s4_a_tokenizer_that_takes_too_much_is_stopped(
    change: Change,
    changed: Callable[[Change], Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tokenizing, "MOST_SECONDS", 2.0)
    tokenizer = load_tokenizer(changed(change))
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"the tokenizer takes no prompt[\s\S]*(does not end|memory|PanicException)"):
        encode(tokenizer, [TEXT])
    assert time.monotonic() - began < 60
    assert capfd.readouterr().err == ""


def several(settings: dict[str, Any]) -> None:
    settings["decoder"] = {"type": "Sequence", "decoders": [replace({"String": "a"}, "a" * 10)] * 12}


def nested(settings: dict[str, Any]) -> None:
    one = replace({"Regex": "."}, "a" * 40)
    settings["decoder"] = {"type": "Sequence", "decoders": [one, {"type": "Sequence", "decoders": [one, one]}]}


def endless(settings: dict[str, Any]) -> None:
    settings["decoder"] = replace({"Regex": "((a?)+)+x"}, "")


def many(settings: dict[str, Any]) -> None:
    settings["decoder"] = {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 2000}


@pytest.mark.parametrize("change", [several, nested, endless, many])
def test_s4_a_decoder_that_makes_too_much_of_a_token_is_refused(
    change: Change, changed: Callable[[Change], Path]
) -> None:
    with pytest.raises(CorruptError, match=r"decoder.* (out of proportion|never finish)"):
        load_tokenizer(changed(change))


def sentencepiece(settings: dict[str, Any]) -> None:
    settings["normalizer"] = replace({"String": " "}, "\u2581")
    pieces = [replace({"String": "\u2581"}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    settings["decoder"] = {
        "type": "Sequence",
        "decoders": [*pieces, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
    }


@pytest.mark.parametrize("change", [lambda settings: None, sentencepiece])
def test_a_tokenizer_of_people_is_as_it_was(change: Change, changed: Callable[[Change], Path]) -> None:
    tokenizer = load_tokenizer(changed(change))
    texts = ["Größe of a cat", "a", "b" * 100_000]
    for special in (True, False):
        expected = [tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts]
        assert encode(tokenizer, texts, add_special_tokens=special) == expected
    assert [decode(tokenizer, row) for row in expected] == tokenizer.batch_decode(expected, skip_special_tokens=True)
    assert token_rows(tokenizer, [""]) == [tokenizer("")["input_ids"]]
    with pytest.raises(UsageError, match="no tokens"):
        encode(tokenizer, [""], add_special_tokens=False)


def test_what_compiled_code_lets_out_is_an_error_and_an_interruption_is_not() -> None:
    panic = type("PanicException", (BaseException,), {})

    class Tokenizer:
        def __init__(self, error: BaseException) -> None:
            self._error = error

        def decode(self, *_: Any, **__: Any) -> str:
            raise self._error

    with pytest.raises(GlassError, match="PanicException: no"):
        decode(Tokenizer(panic("no")), [1])
    with pytest.raises(KeyboardInterrupt):
        decode(Tokenizer(KeyboardInterrupt()), [1])


def test_s4_the_keyboard_stops_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []
    fork = os.fork

    def recorded_fork() -> int:
        child = fork()
        children.append(child)
        return child

    monkeypatch.setattr(os, "fork", recorded_fork)

    def busy(text: str, **_: Any) -> dict[str, list[int]]:
        time.sleep(600)
        return {"input_ids": [1]}

    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        encode(busy, ["a"])
    timer.join()
    assert time.monotonic() - began < 60
    assert len(children) == 1
    with pytest.raises(ChildProcessError):
        os.waitpid(children[0], os.WNOHANG)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_return_sequences": 10**9, "do_sample": True}, "too many sequences"),
        ({"stop_strings": ["ab" * 500] * 99}, "stop"),
    ],
)
def test_s4_settings_that_come_with_an_engine_are_bounded(settings: dict[str, Any], message: str, engine: Any) -> None:
    began = time.monotonic()
    with pytest.raises(UsageError, match=message):
        engine.generate("a", max_new_tokens=1, **settings)
    assert time.monotonic() - began < 60
    assert engine.generate("a", max_new_tokens=2, stop_strings=["ab", "c"]).texts is not None
