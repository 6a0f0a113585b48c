"""Chat templates end in time, and take no more memory than they may; nothing they do is seen outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from glassengine.engine.prompts import templates
from glassengine.engine.prompts.prompts import apply_chat_template
from glassengine.errors import CorruptError, UsageError

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
    monkeypatch.setattr(templates, "MOST_SECONDS", 1.0)
    with pytest.raises(UsageError, match="chat template"):
        apply_chat_template(tokenizer(template), CHAT)


def test_s4_a_template_ends(tokenizer: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MOST_SECONDS", 0.5)
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
    assert templates.bounded(lambda: seen.append(1) or "text") == "text"  # type: ignore[func-returns-value]
    assert not seen
    with pytest.raises(CorruptError, match="SystemExit"):
        templates.bounded(lambda: exit(3))  # type: ignore[func-returns-value]
