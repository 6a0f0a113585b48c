"""Flags and command lines of the reference documents, as they are written there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine import asked
from glassengine.cli import foreign
from glassengine.cli.main import load_command, main
from tests.cli.test_run import PROMPT, run
from tests.cli.test_run import engines_are_loaded_once as engines_are_loaded_once

WORDS_OF_DITTO = r"""
DEBUG_ARTIFACTS_DIR=./artifacts/ditto-run \
python /workspace/ditto/scripts/run.py \
    --engine_dir ./engines/meta-llama/Llama-2-7b-chat-hf-more-outputs \
    --tokenizer_dir meta-llama/Llama-2-7b-chat-hf \
    --max_output_len 10 \
    --input_text "Hey, are you conscious?" \
    --use_py_session \
    --debug_mode

DEBUG_ARTIFACTS_DIR=./artifacts/trtllm-run \
python /workspace/ditto/scripts/run.py \
    --engine_dir ./engines/Llama-2-7b-chat-hf-trtllm-more-outputs \
    --tokenizer_dir meta-llama/Llama-2-7b-chat-hf \
    --max_output_len 10 \
    --input_text "Hey, are you conscious?" \
    --use_py_session \
    --debug_mode

ditto compare ./artifacts/ditto-run/step0.pt ./artifacts/trtllm-run/step0.pt
"""

WORDS_OF_DITTOS_README = (
    "python /workspace/tensorrt_llm/examples/run.py --engine_dir ./engines/Llama-2-7b-chat-hf-ditto "
    '--tokenizer_dir ./data/Llama-2-7b-chat-hf --max_output_len 100 --input_text "Hey, are you conscious?"'
)


@pytest.fixture
def documented_paths(engine_directory: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the relative paths of the documents lead to a tiny engine and its tokenizer; return the directory."""
    for name in (
        "meta-llama/Llama-2-7b-chat-hf-more-outputs",
        "Llama-2-7b-chat-hf-trtllm-more-outputs",
        "Llama-2-7b-chat-hf-ditto",
    ):
        (tmp_path / "engines" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "engines" / name).symlink_to(engine_directory)
    for name in ("meta-llama/Llama-2-7b-chat-hf", "data/Llama-2-7b-chat-hf"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DEBUG_ARTIFACTS_DIR", raising=False)
    return tmp_path


def translated(text: str) -> Iterator[tuple[str | None, list[str]]]:
    """Yield (DEBUG_ARTIFACTS_DIR, arguments of `glass`) of each command: only the program's name is changed."""
    for command in re.split(r"\n\s*\n", text.replace("\\\n", " ").strip()):
        words = shlex.split(command)
        directory = words.pop(0).partition("=")[2] if words[0].startswith("DEBUG_ARTIFACTS_DIR=") else None
        if words[0] == "python":
            assert words[1].endswith("run.py")
            yield directory, ["run", *words[2:]]
        else:
            assert words[0] == "ditto"
            yield directory, words[1:]


def test_the_commands_of_ditto_run_word_for_word(
    documented_paths: Path,
    engine_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for directory, arguments in translated(WORDS_OF_DITTO):
        monkeypatch.delenv("DEBUG_ARTIFACTS_DIR", raising=False)
        if directory is not None:
            monkeypatch.setenv("DEBUG_ARTIFACTS_DIR", directory)
        assert main(arguments) == 0
    shown = capsys.readouterr()
    engine = glass.load(engine_directory)
    expected = engine.generate(PROMPT, max_new_tokens=10)
    assert expected.texts is not None and shown.out.startswith(2 * (expected.texts[0] + "\n"))
    assert "bitwise identical" in shown.out
    for name in ("ditto-run", "trtllm-run"):
        artifacts = documented_paths / "artifacts" / name
        assert f"the tensors of {expected.num_steps} steps to" in shown.err
        assert {path.name for path in artifacts.iterdir()} == {
            f"step{i}.{suffix}" for i in range(expected.num_steps) for suffix in ("pt", "txt")
        }
        found = torch.load(artifacts / "step0.pt", weights_only=True)
        assert list(found) == engine.debug_names and "mm_default" in found
        text = (artifacts / "step1.txt").read_text()
        assert all(f"{name}: " in text for name in engine.debug_names)


def test_the_command_of_dittos_readme_runs_word_for_word(
    documented_paths: Path, engine_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ((directory, arguments),) = translated(WORDS_OF_DITTOS_README)
    assert directory is None and main(arguments) == 0
    expected = glass.load(engine_directory).generate(PROMPT, max_new_tokens=100).texts
    assert expected is not None and capsys.readouterr().out == expected[0] + "\n"


def test_the_command_of_tensorrt_llm_prints_what_its_document_shows(
    documented_paths: Path, engine_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The document leaves engine and prompt to run.py's defaults, and prints from inside of the library.
    arguments = shlex.split("python run.py --max_output_len=8")[2:]
    here = ["--engine_dir", str(engine_directory), "--input_text", "Born in north-east France, Soyer trained as a"]
    assert main(["run", *arguments, *here, "--print-tensors", "--debug", "layers.1.mlp"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dict_keys(['model.layers.1.mlp'])"
    steps = [line.split()[0] for line in lines if " tensor([[[" in line]
    assert steps == [str(i) for i in range(len(steps))] and 1 < len(steps) <= 8
    assert any(line == "Input: Born in north-east France, Soyer trained as a" for line in lines)


def test_debug_mode_without_a_directory_prints_the_names(
    documented_paths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, arguments = next(translated(WORDS_OF_DITTO))
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("dict_keys(['input_ids', 'logits', 'position_ids',") and "'past_key_0', 'past_value_0'" in out
    assert "'model.layers.0.mlp'" in out and "\nInput: Hey, are you conscious?\nOutput: " in out
    assert not (documented_paths / "artifacts").exists()


def test_every_foreign_spelling_has_a_flag() -> None:
    parameters = [*load_command("build").params, *load_command("run").params]
    flags = {name.lstrip("-") for parameter in parameters for name in parameter.opts}
    assert set(foreign.SPELLINGS.values()) <= flags
    assert not set(foreign.SPELLINGS) & flags


def test_alias_of_the_number_of_tokens(engine_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--max-new-tokens", "--max-output-len", "--max_output_len"):
        assert run(engine_directory, "--input-text", "a", flag, 3, "--json") == 0
        assert json.loads(capsys.readouterr().out)["num_steps"] <= 3


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--max_output_len 8 --input_file prompts.txt", {"max_new_tokens": 8, "prompt_file": "prompts.txt"}),
        (
            "--max_output_len=8 --input_text a --streaming --top_k 5 --top_p 0.9 --temperature 0.7 --random_seed 3",
            {"max_new_tokens": 8, "do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 0.7, "seed": 3},
        ),
        ("--input_text a --repetition_penalty 1.2", {"repetition_penalty": 1.2}),
        ("--input-text a --top-k 5 --no-do-sample", {"top_k": 5, "do_sample": False}),
        ("--chat chat.json --prefill-chunk 64 --seed 0", {"chat": "chat.json", "prefill_chunk": 64, "seed": 0}),
        ("--input-text a --do-sample --max_new_tokens 3", {"do_sample": True, "max_new_tokens": 3}),
    ],
)
def test_only_given_options_reach_generate(
    engine_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    expected: dict[str, object],
) -> None:
    seen: dict[str, Any] = {}
    engine = glass.load(engine_directory)
    plain = engine.generate("a", max_new_tokens=1)

    def generate(prompts: object, **arguments: Any) -> Any:
        seen.update(arguments)
        return plain

    monkeypatch.setattr(engine, "generate", generate)
    monkeypatch.setattr(glass, "load", lambda _, **trust: engine)
    monkeypatch.setattr(asked, "engine", lambda directory: directory)
    assert run(*shlex.split(f"--engine_dir x {line}")) == 0
    always = {
        "input_ids",
        "inputs",
        "images",
        "tokenizer",
        "debug",
        "on_step",
        "on_text",
        "record",
        "overwrite",
        "max_new_tokens",
    }
    assert {name for name in seen if name not in always} == expected.keys() - always
    assert {name: seen[name] for name in expected} == expected
    assert seen["on_step"] is None and seen["debug"] is False


@pytest.mark.parametrize("flag", ["--cp-size", "--peft-ids", "--max_beam_width", "--gpt_attention_plugin"])
def test_f39_flags_without_counterpart_are_told_with_what_there_is(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "model", flag, "2"]) == 2
    said = capsys.readouterr().err
    assert f"glass build has no option {flag}: " in said and "hint: " in said and "--help" not in said


def test_f69_ranks_are_spelled_as_in_other_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--tp-size", "--tp_size", "--pp-size", "--tensor-parallelism"):
        assert main(["build", "nowhere/at/all", flag, "2", "--storage-type", "float16"]) == 2
        assert "unknown model" in capsys.readouterr().err
    assert main(["check", "nowhere/at/all", "--tp-size", "2"]) == 2
    assert "--tensor-parallel N --pipeline-parallel M" in capsys.readouterr().err
