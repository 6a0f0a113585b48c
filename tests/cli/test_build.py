"""`glass build` from the command line to the engine, the screen, the JSON and the exit status."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import glassengine as glass
from glassengine.cli.main import main


def build(*arguments: object) -> int:
    return main(["build", *map(str, arguments), "--backend", "eager"])


def test_engine_is_built_and_what_matched_is_printed(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "e"
    assert (
        build(checkpoint, out, "--add-output", "layers.*.mlp", "--add-output", "mm_default=q", "--max-seq-len", 32) == 0
    )
    text = capsys.readouterr().out
    assert f"built {out} with eager, float32" in text
    assert "output model.layers.0.mlp  float32[batch, sequence, 64]" in text
    assert "output q  (model.layers.0.self_attn.q_proj/linear.0)" in text
    manifest = glass.load(out).manifest
    assert manifest.max_seq_len == 32
    assert [entry.name for entry in manifest.added_outputs] == ["model.layers.0.mlp", "model.layers.1.mlp", "q"]


def test_json_is_one_document(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(checkpoint, "-o", tmp_path / "e", "--max-seq-len", "32", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["directory"] == str(tmp_path / "e")
    assert (document["max_seq_len"], document["backend"], document["schema_version"]) == (32, "eager", 1)


def test_documented_command_line(checkpoint: Path, tmp_path: Path) -> None:
    # ditto build MODEL --output-dir DIR --add-output mm_default --add-output gpt_attention_plugin
    line = f"{checkpoint} --output-dir {tmp_path / 'e'} --add-output mm_default --add-output gpt_attention_plugin"
    assert build(*shlex.split(line)) == 0
    assert [e.name for e in glass.load(tmp_path / "e").manifest.added_outputs] == ["mm_default", "gpt_attention_plugin"]


def test_artifacts_and_alias_file(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "names.json").write_text('{"mm_default": "q"}')
    names = ("--add-output", f"@{tmp_path / 'names.json'}", "--add-output", "layers.0.mlp=h:bfloat16")
    assert build(checkpoint, tmp_path / "e", *names, "--artifacts", tmp_path / "a") == 0
    text = capsys.readouterr().out
    assert "output q  (model.layers.0.self_attn.q_proj/linear.0)  float32[batch, sequence, 64]\n" in text
    assert "output h  (model.layers.0.mlp)  bfloat16[batch, sequence, 64], cast from float32" in text
    assert f"artifacts {tmp_path / 'a' / 'index.html'}" in text
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["complete"] and (tmp_path / "a" / "index.html").is_file()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert "identical" in capsys.readouterr().out


def test_dry_run(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (checkpoint, tmp_path / "e", "--dry-run", "--add-output", "layers.0.mlp", "--max-seq-len", 10)
    assert build(*arguments) == 0
    text = capsys.readouterr().out
    assert f"would build {tmp_path / 'e'}" in text
    assert re.search(r"weights +[\d,]+ bytes", text)
    assert f"{8 * 10 * 64 * 4:,} bytes in the largest prefill" in text
    assert f"{8 * 1 * 64 * 4:,} bytes in the largest decode step" in text
    assert build(*arguments, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["prefill_output_bytes"], document["decode_output_bytes"]) == (20480, 2048)
    assert list(tmp_path.iterdir()) == []


def test_plain_module_with_a_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch, glassengine as glass\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return glass.tap('inter', torch.relu(x)) + 1\n"
        "def model(): return Model()\n"
        "def inputs(): return {'x': torch.ones(2, 3)}\n"
        "def nothing(gm): pass\n"
    )
    code = tmp_path / "mine.py"
    arguments = (f"{code}:model", tmp_path / "e", "--inputs", f"{code}:inputs", "--pass", f"{code}:nothing")
    assert build(*arguments) == 0
    assert "output inter  float32[2, 3]" in capsys.readouterr().out
    assert glass.load(tmp_path / "e").manifest.passes == (f"{code}:nothing",)


def test_fallback_is_said_on_stderr(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert main(["build", str(checkpoint), "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert "building with onnxruntime instead" in captured.err
    assert "with onnxruntime" in captured.out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nothing/here"], 2, "unknown model"),
        (["{model}", "{out}", "-o", "{out}"], 2, "given twice"),
        (["{model}", "{engine}"], 2, "replace it with --overwrite"),
        (["{model}", "{out}", "--add-output", "layers.9.mlp"], 2, "nearest: model.layers.0.mlp"),
        (["{model}", "{out}", "--max-seq-len", "4096"], 2, "max_position_embeddings"),
        (["{model}", "{out}", "--dtype", "float8"], 2, "float8"),
        (["{model}", "{out}", "--pass", "{out}.py:nothing"], 2, "no such file"),
        (["{model}/config.json/e"], 2, "unknown model"),
        (["{model}", "{model}/config.json/e"], 2, "is not a directory"),
        (["{model}", "{out}", "--add-outputs", "x"], 2, "--add-output"),
    ],
)
def test_refusals(
    checkpoint: Path,
    engine_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    names = {"model": checkpoint, "engine": engine_directory, "out": tmp_path / "e"}
    assert build(*(argument.format(**names) for argument in arguments)) == status
    captured = capsys.readouterr()
    assert captured.out == "" and "\nerror: " in f"\n{captured.err}" and message in captured.err
    assert list(tmp_path.iterdir()) == []


def test_missing_backend(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert main(["build", str(checkpoint), str(tmp_path / "e"), "--backend", "inductor"]) == 3
    assert "no C++ compiler" in capsys.readouterr().err
