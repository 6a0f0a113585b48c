"""Reading an engine runs nothing of it: what it names is not called, and native code must be this user's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import glassengine as glass
from glassengine import environment
from glassengine.engine import Engine
from glassengine.engine.manifest import FILE, SCHEMA_VERSION, read_manifest, require_fit
from glassengine.errors import BackendError, CorruptError, UsageError

Forge = Callable[..., None]


def test_manifest_says_what_was_built(engine: Engine, model: Any) -> None:
    manifest, intact, ours = read_manifest(engine.directory)
    assert intact and ours and manifest == engine.manifest
    assert (manifest.backend, manifest.kind, manifest.dtype, manifest.tokenizer) == (
        "eager",
        "causal_lm",
        "float32",
        True,
    )
    assert (manifest.max_batch_size, manifest.max_seq_len) == (8, model.config.max_position_embeddings)
    assert manifest.vocab_size == model.config.vocab_size
    assert manifest.kv_layout == ((2, 16, 16),) * 2
    assert [entry.name for entry in manifest.inputs][:4] == [
        "input_ids", "attention_mask", "position_ids", "cache_position",
    ]  # fmt: skip
    assert [entry.name for entry in manifest.outputs][:2] == ["logits", "present_key_0"]
    assert manifest.requires["torch"] == environment.versions()["torch"]
    assert {file.path for file in manifest.files} >= {"program.pt2", "program.json", "config.json", "tokenizer.json"}
    names = {entry.name: entry for entry in manifest.added_outputs}
    assert list(names) == ["model.layers.0.mlp", "model.layers.1.mlp", "mm_default", "head"]
    assert names["mm_default"].site == "model.layers.0.self_attn.q_proj/linear.0"
    assert names["head"].derived == "the output logits" and names["mm_default"].derived is None
    assert "modeling_llama.py" in str(names["model.layers.0.mlp"].source)


@pytest.mark.slow
def test_default_backend_keeps_weights_in_its_files_only(inductor_engine: Engine) -> None:
    manifest = inductor_engine.manifest
    assert (manifest.weights, manifest.shares_weights, manifest.portable) == ("constants", False, False)
    sizes = {file.path: file.size for file in manifest.files}
    assert sizes["weights.safetensors"] < 10_000 < sizes["main/model.pt2"]


def test_forged_instructions_are_refused(native_engine: Engine, tmp_path: Path, forge: Forge) -> None:
    copy = Path(shutil.copytree(native_engine.directory, tmp_path / "copy"))
    forge(copy, cpu_flags=[*native_engine.manifest.cpu_flags, "avx1024_ghost"])
    with pytest.raises(BackendError, match="avx1024_ghost") as caught:
        glass.load(copy)
    assert "not built for this machine" in str(caught.value) and caught.value.exit_status == 3


def test_instructions_that_this_processor_lacks(native_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = native_engine.manifest.cpu_flags
    assert needed, "this machine tells its flags"
    monkeypatch.setattr(environment, "cpu_flags", lambda: frozenset(needed[1:]))
    with pytest.raises(BackendError, match=f"lacks: {needed[0]}"):
        glass.load(native_engine.directory)


def test_portable_cannot_be_forged(native_engine: Engine, tmp_path: Path, forge: Forge) -> None:
    copy = Path(shutil.copytree(native_engine.directory, tmp_path / "copy"))
    forge(copy, portable=True, cpu_flags=["avx1024_ghost"])
    with pytest.raises(BackendError, match="avx1024_ghost"):
        glass.load(copy)


def test_portable_engine_needs_no_instructions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cpu_flags", frozenset)
    assert glass.load(engine.directory).manifest.portable


def test_other_architecture(native_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv128")
    with pytest.raises(BackendError, match="this machine is riscv128"):
        require_fit(native_engine.manifest, portable=False)


@pytest.mark.parametrize("package", ["torch", "onnxruntime"])
def test_other_version(copy: Path, engine: Engine, forge: Forge, package: str) -> None:
    forge(copy, requires={**engine.manifest.requires, package: "0.0.1"})
    with pytest.raises(BackendError, match=f"built with {package} 0.0.1, here is "):
        glass.load(copy)


@pytest.mark.parametrize("entry", [{"dtype": "bfloat16"}, {"kind": "module"}, {"caches": {}}])
def test_manifest_that_contradicts_its_program(copy: Path, forge: Forge, entry: dict[str, Any]) -> None:
    forge(copy, **entry)
    with pytest.raises(CorruptError, match=f"contradicts its program\n.*{next(iter(entry))}"):
        glass.load(copy)


def test_any_other_edit(copy: Path, forge: Forge) -> None:
    forge(copy, max_seq_len=1_000_000)
    with pytest.raises(CorruptError, match="changed after it was written"):
        glass.load(copy)


def test_newer_schema(copy: Path, forge: Forge) -> None:
    forge(copy, schema_version=SCHEMA_VERSION + 1)
    with pytest.raises(CorruptError, match="newer version") as caught:
        glass.load(copy)
    assert caught.value.hint == "update Glass Engine"


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"schema_version": 1}', "null", "\x00"])
def test_damaged_manifest(copy: Path, text: str) -> None:
    (copy / FILE).write_text(text)
    with pytest.raises(CorruptError, match=FILE):
        glass.load(copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", 1),
        ("inputs", {}),
        ("inputs", [{"name": "x"}]),
        ("max_seq_len", "9"),
        ("max_seq_len", True),
        ("kv_layout", [[1]]),
    ],
)
def test_manifest_of_other_types(copy: Path, forge: Forge, key: str, value: Any) -> None:
    forge(copy, **{key: value})
    with pytest.raises(CorruptError, match="is damaged"):
        glass.load(copy)


def test_half_written_manifest(copy: Path) -> None:
    text = (copy / FILE).read_text()
    (copy / FILE).write_text(text[: len(text) // 2])
    with pytest.raises(CorruptError, match=r"(?s)engine\.json is damaged.*glass build"):
        glass.load(copy)


def test_half_written_engine(copy: Path) -> None:
    (copy / FILE).unlink()
    with pytest.raises(CorruptError, match="is not an engine"):
        glass.load(copy)


def test_no_engine(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown engine directory"):
        glass.load(tmp_path / "nothing")


def test_missing_file(copy: Path) -> None:
    (copy / "main" / "program.pt2").unlink()
    with pytest.raises(CorruptError, match=r"main/program\.pt2: it is missing"):
        glass.load(copy)


def test_truncated_file(copy: Path) -> None:
    path = copy / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError, match=r"weights\.safetensors: .* bytes instead of"):
        glass.load(copy)


def test_changed_file(copy: Path) -> None:
    path = copy / "config.json"
    path.write_text(path.read_text().replace("2", "3", 1))
    with pytest.raises(CorruptError, match=r"config\.json: another checksum"):
        glass.load(copy)


def test_large_files_are_hashed_when_asked(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glassengine.engine.files.HASHED_AT_LOAD_BYTES", 0)
    path = copy / "config.json"
    path.write_text(path.read_text().replace("2", "3", 1))
    glass.load(copy)
    with pytest.raises(CorruptError, match=r"config\.json: another checksum"):
        glass.load(copy, verify=True)


def test_file_outside_of_the_engine(copy: Path) -> None:
    # The checksum of the manifest is right here: a whole engine can be forged.
    from glassengine.engine.files import check_files
    from glassengine.engine.manifest import FileEntry

    manifest = read_manifest(copy).manifest
    outside = copy.parent / "outside"
    outside.write_text("x")
    (copy / "link").symlink_to(outside)
    for path in ("../outside", str(outside), "link"):
        object.__setattr__(manifest, "files", (FileEntry(path, 1, "0"),))
        with pytest.raises(CorruptError, match=r"outside of its directory|not a plain file"):
            check_files(manifest, copy, verify=False)


def test_huge_manifest_is_not_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glassengine.engine.manifest.MAX_BYTES", 100)
    with pytest.raises(CorruptError, match="too large"):
        glass.load(copy)


def test_manifest_is_json(engine: Engine) -> None:
    assert json.loads((engine.directory / FILE).read_text())["name"] == "tiny"
