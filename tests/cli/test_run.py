"""`glass run` from the command line to the text, the tensors, the recording and the exit status."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

import glassengine as glass
from glassengine.cli import foreign
from glassengine.cli.main import load_command, main

PROMPT = "Hey, are you conscious?"


def run(*arguments: object) -> int:
    return main(["run", *map(str, arguments)])


def test_one_prompt_prints_its_text(engine_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(engine_directory, "--input-text", PROMPT, "--max-new-tokens", 6) == 0
    captured = capsys.readouterr()
    expected = glass.load(engine_directory).generate(PROMPT, max_new_tokens=6).texts
    assert expected is not None and captured.out == expected[0] + "\n"
    assert "prefill" in captured.err and "5 decode steps" in captured.err


def test_several_prompts_are_one_batch(engine_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(engine_directory, "--input-text", PROMPT, "--input-text", "ab", "--max-new-tokens", 4, "-q") == 0
    captured = capsys.readouterr()
    texts = glass.load(engine_directory).generate([PROMPT, "ab"], max_new_tokens=4).texts
    assert texts is not None and captured.err == ""
    assert captured.out == f"Input: {PROMPT}\nOutput: {texts[0]}\nInput: ab\nOutput: {texts[1]}\n"


def test_documented_command_line(engine_directory: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"""
        --engine_dir {engine_directory}
        --tokenizer_dir {checkpoint}
        --max_output_len 10
        --input_text "Hey, are you conscious?"
        --use_py_session
        --debug_mode
    """
    assert run(*shlex.split(line)) == 0
    out = capsys.readouterr().out
    assert out.startswith("['input_ids', 'logits', 'position_ids',") and "'past_key_0', 'past_value_0'" in out
    assert "'model.layers.0.mlp'" in out and "\nInput: Hey, are you conscious?\nOutput: " in out


def test_every_foreign_spelling_has_a_flag() -> None:
    parameters = [*load_command("build").params, *load_command("run").params]
    flags = {name.lstrip("-") for parameter in parameters for name in parameter.opts}
    assert set(foreign.SPELLINGS.values()) <= flags
    assert not set(foreign.SPELLINGS) & flags


def test_alias_of_the_number_of_tokens(engine_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--max-new-tokens", "--max-output-len", "--max_output_len"):
        assert run(engine_directory, "--input-text", "a", flag, 3, "--json") == 0
        assert json.loads(capsys.readouterr().out)["num_steps"] <= 3


def test_debug_prints_every_step(engine_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(engine_directory, "--input-text", "abc", "--max-new-tokens", 3, "--debug", "layers.1.mlp") == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "tensor(" in line] == [
        line for line in out.splitlines() if line.split(" tensor")[0] in [f"{i} model.layers.1.mlp" for i in range(3)]
    ]
    assert out.count("model.layers.1.mlp tensor([[[") == 3


def test_token_ids(engine_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ids.json").write_text("[[5, 6, 7], [8, 9]]")
    assert run(engine_directory, "--input-ids", tmp_path / "ids.json", "--max-new-tokens", 2, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1 and document["engine"] == str(engine_directory)
    assert document["prompt_token_ids"] == [[5, 6, 7], [8, 9]]
    expected = glass.load(engine_directory).generate(input_ids=[[5, 6, 7], [8, 9]], max_new_tokens=2)
    assert document["token_ids"] == [list(row) for row in expected.token_ids]


def test_record(engine_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (engine_directory, "--input-text", "abc", "--max-new-tokens", 2, "--record", tmp_path / "r")
    assert run(*arguments) == 0
    assert f"glass show {tmp_path / 'r'}" in capsys.readouterr().err
    assert glass.Recording.open(tmp_path / "r").steps == [0, 1]
    assert run(*arguments) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run(*arguments, "--overwrite") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{out}", "--input-text", "a"], "unknown engine directory"),
        (["--input-text", "a"], "give one engine"),
        (["{engine}", "--engine_dir", "{engine}", "--input-text", "a"], "give one engine"),
        (["{engine}"], "nothing to generate from"),
        (["{engine}", "--input-text", "a", "--input-ids", "x.json"], "both given"),
        (["{engine}", "--input-ids", "{out}.json"], "unknown inputs file"),
        (["{engine}", "--input-text", "a", "--max-new-tokens", "500"], "--max-seq-len"),
        (["{engine}", "--input-text", "a", "--tokenizer", "{out}"], "unknown tokenizer directory"),
        (
            ["{engine}", "--input-text", "a", "--debug", "layers.0.mlp.gate_proj"],
            "--add-output 'layers.0.mlp.gate_proj'",
        ),
        (["{engine}", "--input-text", "a", "--debug", "layrs.0.mlp"], "nearest"),
        (["{engine}", "--input-text", "a", "--debug", "re:("], "regular expression"),
        (["{engine}", "--input-text", "a", "--debug", "mlp", "--json"], "--record DIR"),
        (["{engine}", *["--input-text", "a"] * 9], "--max-batch-size 9"),
    ],
)
def test_refusals(
    engine_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(*(a.format(engine=engine_directory, out=tmp_path / "nothing") for a in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and message in captured.err


def test_engine_of_another_machine(engine_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(engine_directory, tmp_path / "e")
    data = json.loads((copy / "engine.json").read_text())
    (copy / "engine.json").write_text(json.dumps({**data, "requires": {"torch": "1.0"}}))
    assert run(copy, "--input-text", "a") == 3
    assert "built with torch 1.0" in capsys.readouterr().err


def test_half_written_engine(engine_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(engine_directory, tmp_path / "e")
    (copy / "engine.json").write_text((copy / "engine.json").read_text()[:500])
    assert run(copy, "--input-text", "a") == 4
    assert "engine.json cannot be read" in capsys.readouterr().err
