"""`glass run` from the command line to the text, the tensors, the recording and the exit status."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.cli.main import main

PROMPT = "Hey, are you conscious?"


load_once = functools.cache(glass.load)


@pytest.fixture(autouse=True)
def engines_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes longer than generating a few tokens."""
    monkeypatch.setattr(glass, "load", load_once)


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


def step_files(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_the_variable_of_a_build_does_not_make_a_run_write(
    engine_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEBUG_ARTIFACTS_DIR", str(tmp_path / "a"))
    assert run(engine_directory, "--input-text", "a", "--max-new-tokens", 1) == 0
    assert run(engine_directory, "--input-text", "a", "--max-new-tokens", 1, "--debug", "logits") == 0
    assert "0 logits tensor(" in capsys.readouterr().out and not (tmp_path / "a").exists()


def test_files_of_chosen_tensors(engine_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = (engine_directory, "--input-text", "a", "--max-new-tokens", 2, "--debug-dir", tmp_path)
    assert run(*base, "--debug", "layers.*.mlp", "--debug", "logits") == 0
    assert "tensor(" not in capsys.readouterr().out
    found = torch.load(tmp_path / "step1.pt", weights_only=True)
    assert list(found) == ["logits", "model.layers.0.mlp", "model.layers.1.mlp"]
    assert run(*base, "--debug", "re:.*mlp", "--debug-format", "npy", "--debug-format", "txt", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["debug_dir"] == str(tmp_path)
    assert "earlier-001" in captured.err
    assert {name for name in step_files(tmp_path) if not name.startswith("earlier-001/")} == {
        "npy-names.json",
        *(f"step{i}.txt" for i in (0, 1)),
        *(f"model.layers.{layer}.mlp-step{i}.npy" for layer in (0, 1) for i in (0, 1)),
    }


def test_printing_as_the_document_does(engine_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = (engine_directory, "--input-text", "abc", "--max-new-tokens", 2, "--print-tensors", "-q")
    assert run(*base) == 0
    out = capsys.readouterr().out
    names = glass.load(engine_directory).debug_names
    assert out.startswith(f"dict_keys({names})\n0 input_ids tensor([[")
    for step in (0, 1):
        for name in names:
            assert f"\n{step} {name} tensor(" in out
    assert run(*base, "--debug", "layers.1.mlp") == 0
    out = capsys.readouterr().out
    assert out.startswith("dict_keys(['model.layers.1.mlp'])\n0 model.layers.1.mlp tensor([[[")
    assert out.count(" tensor(") == 2 and "\n1 model.layers.1.mlp tensor([[[" in out
    assert out.endswith(
        f"Input: abc\nOutput: {glass.load(engine_directory).generate('abc', max_new_tokens=2).texts[0]}\n"
    )


def test_printing_and_files_at_once(engine_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--print-tensors", "--debug", "logits", "--debug-dir", tmp_path, "--debug-format", "pt")
    assert run(engine_directory, "--input-text", "abc", "--max-new-tokens", 1, *flags) == 0
    assert "0 logits tensor(" in capsys.readouterr().out and step_files(tmp_path) == {"step0.pt"}


def test_a_disk_that_fills_up_does_not_cost_the_text(
    engine_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    flags = ("--max-new-tokens", 3, "--debug-dir", tmp_path, "--debug-format", "pt")
    assert run(engine_directory, "--input-text", PROMPT, *flags) == 2
    captured = capsys.readouterr()
    expected = glass.load(engine_directory).generate(PROMPT, max_new_tokens=3).texts
    assert expected is not None and captured.out == expected[0] + "\n"
    assert "No space left" in captured.err and "--debug-dir" in captured.err


def test_an_interrupt_says_what_is_on_disk(
    engine_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = glass.compat.StepFiles.__call__

    def interrupt(self: glass.compat.StepFiles, session: Any) -> None:
        if session.step == 2:
            raise KeyboardInterrupt
        write(self, session)

    monkeypatch.setattr(glass.compat.StepFiles, "__call__", interrupt)
    flags = ("--max-new-tokens", 5, "--debug-dir", tmp_path / "d", "--debug-format", "pt", "--record", tmp_path / "r")
    assert run(engine_directory, "--input-text", PROMPT, *flags) == 130
    error = capsys.readouterr().err
    assert "wrote the tensors of 2 steps" in error and "glass show" in error and "interrupted" in error
    assert step_files(tmp_path / "d") == {"step0.pt", "step1.pt"}
    assert main(["show", str(tmp_path / "r")]) == 0


def test_a_text_that_is_cut_short_ends_its_line(
    engine_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = glass.load(engine_directory).generate(PROMPT, max_new_tokens=5).texts
    written: list[str] = []

    def stop(text: str) -> None:
        sys.stdout.write(text)
        written.append(text)
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("glassengine.cli.run._write", stop)
    assert run(engine_directory, "--input-text", PROMPT, "--max-new-tokens", 5) == 130
    assert expected is not None
    out = capsys.readouterr().out
    assert out.endswith("\n") and expected[0].startswith(out[:-1])
    # An error before the first piece leaves nothing on stdout.
    assert run(engine_directory, "--input-text", PROMPT, "--max-new-tokens", 0) == 2
    assert capsys.readouterr().out == ""


def test_a_single_token_has_no_decode_steps(engine_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(engine_directory, "--input-text", PROMPT, "--max-new-tokens", 1) == 0
    assert "0 decode steps\n" in capsys.readouterr().err


@pytest.mark.parametrize("variable", [None, "GLASS_SYNCHRONOUS", "CUDA_LAUNCH_BLOCKING"])
def test_synchronous(
    engine_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str | None
) -> None:
    found = []

    def keep(directory: str, **_: bool) -> Any:
        found.append(load_once.__wrapped__(directory))
        return found[-1]

    monkeypatch.setattr(glass, "load", keep)
    if variable:
        monkeypatch.setenv(variable, "1")
    flags = () if variable else ("--synchronous",)
    assert run(engine_directory, "--input-text", "a", "--max-new-tokens", 1, *flags) == 0
    assert found[0].executable.synchronous
    monkeypatch.delenv(variable or "GLASS_SYNCHRONOUS", raising=False)
    assert run(engine_directory, "--input-text", "a", "--max-new-tokens", 1) == 0
    assert not found[1].executable.synchronous


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1, 2**63 - 1, 0, -1])
def test_every_seed_of_64_bits_can_be_given(seed: int, engine_directory: Path) -> None:
    base = (engine_directory, "--input-text", "a", "--do-sample", "--max-new-tokens", 1)
    assert run(*base, "--seed", seed) == 0


def test_a_seed_beyond_64_bits_is_refused(engine_directory: Path) -> None:
    assert run(engine_directory, "--input-text", "a", "--do-sample", "--max-new-tokens", 1, "--seed", 2**64) == 2


def test_a_seed_that_was_drawn_is_printed_and_repeats_the_text(
    engine_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = (engine_directory, "--input-text", PROMPT, "--temperature", 1.5, "--max-new-tokens", 12)
    assert run(*base) == 0
    first = capsys.readouterr()
    seed = first.err.partition("sampled with --seed ")[2].split()[0]
    assert run(*base, "--seed", seed) == 0
    assert capsys.readouterr().out == first.out
    assert run(engine_directory, "--input-text", PROMPT, "--max-new-tokens", 2) == 0
    assert "--seed" not in capsys.readouterr().err


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
        (["--input-text", "a"], "no engine is named"),
        (["{engine}", "--engine_dir", "{engine}", "--input-text", "a"], "more than one engine is named"),
        (["{engine}", "--input-text", "a", "--input-ids", "x.json"], "both given"),
        (["{engine}", "--input-ids", "{out}.json"], "no such file of token ids"),
        (["{engine}", "--input-text", "a", "--max-new-tokens", "500"], "--max-seq-len"),
        (["{engine}", "--input-text", "a", "--tokenizer", "{out}"], "unknown tokenizer directory"),
        (
            ["{engine}", "--input-text", "a", "--debug", "layers.0.mlp.gate_proj"],
            "--add-output 'layers.0.mlp.gate_proj'",
        ),
        (["{engine}", "--input-text", "a", "--debug", "layrs.0.mlp"], "nearest"),
        (["{engine}", "--input-text", "a", "--debug", "re:("], "regular expression"),
        (["{engine}", "--input-text", "a", "--debug", "mlp", "--json"], "--record DIR"),
        (["{engine}", "--input-text", "a", "--print-tensors", "--json"], "--debug-dir DIR"),
        (["{engine}", "--input-text", "a", "--debug-format", "pt"], "DEBUG_ARTIFACTS_DIR"),
        (["{engine}", "--input-text", "a", "--debug-dir", "{out}", "--debug-format", "csv"], "pt, txt, npy"),
        (["{engine}", "--input-text", "a", "--debug-dir", "{engine}/engine.json"], "cannot be written"),
        (["--engine_dir", "{engine}", "--input_text", "a", "b"], "each prompt has a flag of its own"),
        (["{engine}", "--input-text", "a", "--prefill-chunk", "0"], "--prefill-chunk"),
        (["{engine}", "--input-text", "a", "--top-p", "1.5"], "--top-p"),
        (["{engine}", "--input-text", "a", "--temperature", "-1"], "temperature"),
        (["{engine}", *["--input-text", "a"] * 9], "--max-batch-size 9"),
    ],
)
def test_refusals(
    engine_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(*(a.format(engine=engine_directory, out=tmp_path / "nothing") for a in arguments)) == 2
    captured = capsys.readouterr()
    if "--json" in arguments:
        assert message in str(json.loads(captured.out)["error"])
    else:
        assert captured.out == ""
    assert captured.err.startswith("error: ") and message in captured.err


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
    assert "engine.json is damaged" in capsys.readouterr().err
