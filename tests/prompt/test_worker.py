"""Sides in processes with limits: hostile files, and another interpreter, which has a stand-in for vLLM."""

from __future__ import annotations

import json
import shutil
import struct
import sysconfig
import time
import venv
from pathlib import Path
from typing import Any

import pytest

import glassengine as glass
from glassengine.cli.main import main
from glassengine.errors import CorruptError, UsageError
from glassengine.prompt import worker
from tests.prompt.planted import GENERATION, copied, wrong

TOKENIZERS = """
from transformers import AutoTokenizer

def get_tokenizer(path, trust_remote_code):
    found = AutoTokenizer.from_pretrained(path)
    found.pad_token = "<|im_end|>"
    return found
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the packages of this one, without this package, and with a package of the name vllm."""
    folder = tmp_path_factory.mktemp("vllm")
    venv.create(folder, symlinks=True)
    (folder / "packages" / "vllm").mkdir(parents=True)
    (folder / "packages" / "vllm" / "__init__.py").touch()
    (folder / "packages" / "vllm" / "tokenizers.py").write_text(TOKENIZERS)
    (place,) = folder.glob("lib/*/site-packages")
    (place / "packages.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{folder / 'packages'}\n")
    return folder / "bin" / "python"


def test_vllm_is_asked_in_its_interpreter(
    python: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**GENERATION, "no_repeat_ngram_size": 3}  # which vLLM does not know
    copied(trained, tmp_path / "other", "generation_config.json", lambda one: one.update(settings))
    result = glass.check_prompt(str(trained), f"vllm:{tmp_path / 'other'}", python=python)
    assert wrong(result) == [] and result.engines == ("transformers", "vLLM")
    assert result.compared["tokens"] > 400 and result.compared["template"] == 19
    # Padding changes no answer; top_k is 50 in transformers, and off in vLLM.
    assert [one.cause for one in result.findings if one.level == "note"] == ["special token pad", "top_k"]
    other = copied(
        trained, tmp_path / "penalty", "generation_config.json", lambda one: one.update(repetition_penalty=1.1)
    )
    assert main(["check-prompt", str(trained), f"vllm:{other}", "--python", str(python), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [one["cause"] for one in document["findings"]][:1] == ["repetition_penalty"]


def test_an_interpreter_without_vllm_is_named(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)the tokenizer cannot be opened.*No module named 'vllm'"):
        glass.check_prompt(str(trained), f"vllm:{trained}")
    with pytest.raises(UsageError, match="no such interpreter"):
        glass.check_prompt(str(trained), f"vllm:{trained}", python=tmp_path / "nowhere")


def conversation() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOPS, "more than 0.3 s for the conversations so far"),
        ("{{ 'a' * 10**7 }}", "more than 4,194,304 characters"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ],
)
def test_a_hostile_template_is_refused(
    template: str, reason: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_RENDERING", 0.3 if template == LOOPS else 10)
    other = copied(trained, tmp_path / "other", "tokenizer_config.json", lambda one: one.update(chat_template=template))
    side = worker._open(str(other))
    text, error = worker._rendered(template, side.render, conversation())
    assert text is None and reason in error
    if template == LOOPS:  # and the time is up
        assert worker._rendered(template, side.render, conversation()) == (None, reason)


@pytest.mark.slow
def test_a_template_without_end_is_refused_in_the_command(trained: Path, tmp_path: Path) -> None:
    other = copied(trained, tmp_path / "other", "tokenizer_config.json", lambda one: one.update(chat_template=LOOPS))
    begun = time.monotonic()
    result = glass.check_prompt(str(trained), str(other))
    assert wrong(result)[0] == "conversation refused" and time.monotonic() - begun < 60


def test_a_file_that_is_too_large_is_not_read(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "other")
    with (tmp_path / "other" / "tokenizer.json").open("r+b") as file:
        file.truncate(200 << 20)  # of which the disk holds nothing
    with pytest.raises(CorruptError, match="a file is too large"):
        worker._open(str(tmp_path / "other"))


def test_ids_in_millions_are_refused(trained: Path, tmp_path: Path) -> None:
    other = copied(
        trained, tmp_path / "other", "tokenizer.json", lambda one: one["model"]["vocab"].update({"far": 4_000_000_000})
    )
    with pytest.raises(CorruptError, match="a vocabulary is out of proportion"):
        worker._open(str(other))


@pytest.mark.parametrize(
    "merges", [[["t", "h"]] * 1000, [["a", "b"], ["b", "a"], ["ab", "a"], ["b", "ab"], ["ab", "ab"]]]
)
def test_merges_that_repeat_or_go_round_end(merges: list[list[str]], trained: Path, tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        vocabulary = document["model"]["vocab"]
        for pair in merges:
            vocabulary.setdefault("".join(pair), len(vocabulary))
        document["model"]["merges"] = [*merges, *document["model"]["merges"], *merges]

    side = worker._open(str(copied(trained, tmp_path / "other", "tokenizer.json", change)))
    assert len(side.encode(["ab" * 5000 + "th" * 500], special=False)[0]) > 100


def header_of(tokens: int, data: bytes = b"") -> bytes:
    """Return the begin of a GGUF file with an array of texts of one letter."""
    name, kind = b"tokenizer.ggml.model", b"gpt2"
    settings = [
        struct.pack(f"<Q{len(key)}sIQ{len(value)}s", len(key), key, 8, len(value), value)
        for key, value in ((b"general.architecture", b"llama"), (name, kind))
    ]
    key = b"tokenizer.ggml.tokens"
    settings.append(struct.pack(f"<Q{len(key)}sIIQ", len(key), key, 9, 8, tokens))
    return struct.pack("<4sIQQ", b"GGUF", 3, 0, len(settings)) + b"".join(settings) + data


@pytest.mark.parametrize(
    ("tokens", "have", "what"),
    [
        (1 << 40, 0, "the GGUF file is damaged"),
        (3_000_000, 3_000_000, "a vocabulary is out of proportion"),
        pytest.param(10_000_000, 10_000_000, "a vocabulary is out of proportion", marks=pytest.mark.slow),
    ],
)
def test_a_gguf_file_with_millions_of_tokens_is_refused(tokens: int, have: int, what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header_of(tokens, (struct.pack("<Q", 1) + b"a") * have))
    with pytest.raises(CorruptError, match=what):
        worker._open(str(path))


@pytest.mark.slow
def test_a_vocabulary_of_ten_million_entries_is_refused(trained: Path, tmp_path: Path) -> None:
    for number in (10_000_000, 4_000_000):  # too large as a file; too many as a vocabulary
        more = {f"t{one}": one for one in range(2000, number)}
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        copied(trained, tmp_path / "other", "tokenizer.json", lambda one, more=more: one["model"]["vocab"].update(more))
        with pytest.raises(CorruptError, match=r"too large|out of proportion"):
            glass.check_prompt(str(trained), str(tmp_path / "other"))
