"""Build lines of the reference documents, as they are written there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import glassengine as glass
from glassengine.cli.main import main

# Of "How to Debug Engine Files", of Ditto's README, and of TensorRT-LLM's "How to debug".
LINES = """
ditto build meta-llama/Llama-2-7b-chat-hf --output-dir ./engines/a --add-output mm_default --add-output gpt_attention_plugin
ditto build ./data/Llama-2-7b-chat-hf ./engines/b --add-output mm_default --add-output fake_gpt_attention_plugin
DEBUG_ARTIFACTS_DIR=./artifacts/d ditto build meta-llama/Llama-2-7b-chat-hf --output-dir ./engines/d
DEBUG_ARTIFACTS_DIR=./artifacts/e /workspace/ditto/scripts/trtllm-build --checkpoint_dir meta-llama/Llama-2-7b-chat-hf-ckpt --output_dir ./engines/e --visualize_network --profiling_verbosity detailed
python3 build.py --model_dir=./c-model/gpt2/1-gpu --use_gpt_attention_plugin
"""  # noqa: E501

EXPECTED: list[tuple[str, str | None, list[str]]] = [
    ("meta-llama/Llama-2-7b-chat-hf", "./engines/a", ["mm_default", "gpt_attention_plugin"]),
    ("./data/Llama-2-7b-chat-hf", "./engines/b", ["mm_default", "fake_gpt_attention_plugin"]),
    ("meta-llama/Llama-2-7b-chat-hf", "./engines/d", []),
    ("meta-llama/Llama-2-7b-chat-hf-ckpt", "./engines/e", []),
    ("./c-model/gpt2/1-gpu", None, []),
]
PROGRAM = re.compile(r"ditto (?=build )|/\S*trtllm-build |python3 build\.py ")


@pytest.mark.parametrize(("line", "expected"), list(zip(LINES.strip().splitlines(), EXPECTED, strict=True)))
def test_build_lines_word_for_word(
    line: str,
    expected: tuple[str, str | None, list[str]],
    engine_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the builds make is shown by the guide, whose lines differ in their paths alone."""
    seen: dict[str, Any] = {}
    engine = glass.load(engine_directory)

    def build(model: str, directory: str | None, **options: Any) -> Any:
        seen.update(options, model=model, directory=directory)
        return engine

    monkeypatch.setattr(glass, "build", build)
    monkeypatch.chdir(tmp_path)
    Path(expected[0]).mkdir(parents=True)
    start = PROGRAM.search(line)
    assert start is not None
    for name, _, value in (pair.partition("=") for pair in shlex.split(line[: start.start()])):
        monkeypatch.setenv(name, value)
    arguments = shlex.split(line[start.end() :])
    assert main(["build", *arguments[arguments[0] == "build" :]]) == 0
    assert (seen["model"], seen["directory"], list(seen["add_output"])) == expected
    assert ("artifacts artifacts" in capsys.readouterr().out) == ("DEBUG_ARTIFACTS_DIR" in line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one model"),
        (["m", "--model_dir", "n"], "m and n"),
        (["m", "--visualize_network"], "DEBUG_ARTIFACTS_DIR=DIR"),
    ],
)
def test_refusals(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DEBUG_ARTIFACTS_DIR", raising=False)
    assert main(["build", *arguments]) == 2
    assert message in capsys.readouterr().err
