"""Reading an engine runs nothing of it: what it names is not called, and native code must be this user's own."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.cli.main import main
from glassengine.engine import Engine, manifest
from glassengine.engine.manifest import FILE, read_manifest
from glassengine.errors import CorruptError, UsageError
from glassengine.writing import document_checksum
from tests.engine.conftest import INPUTS

EVIL = """
from pathlib import Path
Path({mark!r}).write_text("ran")
def factory():
    Path({mark!r}).write_text("ran")
"""


@pytest.fixture(autouse=True)
def own_key(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody's real key is read or written."""
    directory = tmp_path_factory.mktemp("config")
    monkeypatch.setenv("GLASS_CONFIG_DIR", str(directory))
    return directory


def rewrite(directory: Path, **entries: Any) -> None:
    """Change a manifest as somebody does who knows how its checksum is made, and not the key."""
    data = json.loads((directory / FILE).read_text()) | entries
    for entry in data["files"]:
        path = directory / entry["path"]
        entry |= {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    del data["checksum"], data["seal"]
    (directory / FILE).write_text(json.dumps(data | {"checksum": document_checksum(data), "seal": "0" * 64}))


@pytest.fixture
def evil(engine: Engine, checkpoint: Path, tmp_path: Path) -> tuple[Callable[[str], Path], Path]:
    """Return what makes an engine whose model is something that runs code, and the mark that this code leaves."""
    mark = tmp_path / "mark"
    (tmp_path / "evil_module.py").write_text(EVIL.format(mark=str(mark)))

    def make(kind: str) -> Path:
        hostile = Path(shutil.copytree(engine.directory, tmp_path / "engine"))
        (hostile / "evil.py").write_text(EVIL.format(mark=str(mark)))
        remote = Path(shutil.copytree(checkpoint, tmp_path / "remote"))
        config = json.loads((remote / "config.json").read_text())
        code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
        (remote / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": code}))
        (remote / "evil.py").write_text(EVIL.format(mark=str(mark)))
        pickled = Path(shutil.copytree(checkpoint, tmp_path / "pickled"))
        (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
        kernels = Path(shutil.copytree(checkpoint, tmp_path / "kernels"))
        (kernels / "config.json").write_text(json.dumps({**config, "attn_implementation": "somebody/kernel"}))
        named: dict[str, dict[str, Any]] = {
            "file": {"directory": f"{hostile}/evil.py:factory"},
            "module": {"directory": "evil_module:factory"},
            "hub": {"directory": "somebody/model"},
            "remote": {"directory": str(remote)},
            "pickle": {"directory": str(pickled)},
            "kernel": {"directory": str(kernels)},
            "attention": {"directory": str(checkpoint), "attn_implementation": "somebody/kernel"},
            "adapter": {"directory": str(checkpoint), "adapter": "somebody/adapter"},
            "onnx": {"directory": str(tmp_path / "model.onnx")},
        }
        rewrite(hostile, model={**engine.manifest.model, **named[kind]}, weights="constants")
        return hostile

    return make, mark


@pytest.mark.parametrize(
    "kind", ["file", "module", "hub", "remote", "pickle", "kernel", "attention", "adapter", "onnx"]
)
def test_s1_what_an_engine_names_is_a_plain_checkpoint_or_not_loaded(
    evil: tuple[Callable[[str], Path], Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, mark = evil
    monkeypatch.syspath_prepend(str(mark.parent))
    hostile = glass.load(make(kind))  # the eager back-end has its weights, and is safe to read
    with pytest.raises(UsageError, match="not loaded without trust") as caught:
        _ = hostile.program
    assert "--model" in str(caught.value)
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["file", "remote"])
def test_s1_no_command_runs_it(
    evil: tuple[Callable[[str], Path], Path], kind: str, engine: Engine, checkpoint: Path, tmp_path: Path
) -> None:
    make, mark = evil
    hostile, other = str(make(kind)), str(engine.directory)
    lines = [
        ["run", hostile, "--input-text", "a b", "--max-new-tokens", "2", "--snapshot", str(tmp_path / "snapshots")],
        ["run", hostile, "--input-text", "a b", "--max-new-tokens", "2", "--debug", "model.layers.0.mlp"],
        ["compare", hostile, other, "--max-new-tokens", "2"],
        ["compare", other, hostile, "--max-new-tokens", "2"],
        ["sites", hostile],
        ["show", hostile],
        ["build", hostile, str(tmp_path / "again")],
        ["record", hostile, "-o", str(tmp_path / "recorded")],
        ["check", hostile],
    ]
    if kind == "file":  # the one line that takes seconds
        lines.append(["check", str(checkpoint), "--candidate", hostile, "--steps", "1"])
    for line in lines:
        assert main([*line, "-q"]) != 70, line
        assert not mark.exists(), line


def test_a_plain_checkpoint_is_still_read_again(frozen_engine: Engine, checkpoint: Path, tmp_path: Path) -> None:
    assert frozen_engine.manifest.weights == "constants"
    assert frozen_engine.manifest.model["directory"] == str(checkpoint)
    assert glass.load(frozen_engine.directory).program.weights()
    # What the user names himself may be anything that holds the same weights.
    moved = Path(shutil.copytree(frozen_engine.directory, tmp_path / "moved"))
    rewrite(moved, model={**frozen_engine.manifest.model, "directory": "gone:away"})
    assert glass.load(moved, model=checkpoint).program.weights()


def test_a_checkpoint_of_the_hubs_cache_is_recorded_as_its_directory(checkpoint: Path, tmp_path: Path) -> None:
    from glassengine.engine.recorded_model import directory_to_record

    blobs = tmp_path / "blobs"
    blobs.mkdir()
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in checkpoint.iterdir():
        (snapshot / path.name).symlink_to(shutil.copy(path, blobs))
    assert directory_to_record(str(snapshot), None) == str(snapshot)
    assert directory_to_record(None, None) is None
    (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
    assert directory_to_record(str(snapshot), None) is None


def test_s2_native_code_from_elsewhere_is_not_loaded(native_engine: Engine, tmp_path: Path) -> None:
    foreign = Path(shutil.copytree(native_engine.directory, tmp_path / "foreign"))
    assert not read_manifest(foreign).ours, "the key of this test is another one"
    with pytest.raises(UsageError, match="did not build on this machine") as caught:
        glass.load(foreign)
    assert "main/model.pt2" in str(caught.value) and "--trust-engine" in str(caught.value)
    assert glass.load(foreign, trust=True).manifest.backend == "inductor"
    torch.save(INPUTS[0], tmp_path / "x.pt")
    run = ["run", str(foreign), "--inputs", str(tmp_path / "x.pt"), "-q"]
    (tmp_path / "net.py").write_text("from torch import nn\n\n\ndef net():\n    return nn.Linear(8, 8)\n")
    check = ["check", f"{tmp_path}/net.py:net", "--candidate", str(foreign), "--inputs", str(tmp_path / "x.pt"), "-q"]
    assert (main(run), main(check)) == (2, 2)
    assert main([*run, "--trust-engine"]) == 0


@pytest.mark.slow
def test_s2_native_code_of_a_language_model_is_not_loaded(
    inductor_engine: Engine, checkpoint: Path, engine: Engine, tmp_path: Path
) -> None:
    foreign = Path(shutil.copytree(inductor_engine.directory, tmp_path / "foreign"))
    run = ["run", str(foreign), "--input-text", "a b", "--max-new-tokens", "2", "-q"]
    compare = ["compare", str(engine.directory), str(foreign), "--max-new-tokens", "2", "-q"]
    assert (main(run), main(compare)) == (2, 2)
    assert main(["check", str(checkpoint), "--candidate", str(foreign), "-q"]) == 2
    assert (main([*run, "--trust-engine"]), main([*compare, "--trust-engine"])) == (0, 0)


def test_s2_what_this_user_built_here_is_loaded_also_from_a_copy(
    native_engine: Engine, tmp_path: Path, own_key: Path
) -> None:
    mine = Path(shutil.copytree(native_engine.directory, tmp_path / "mine"))
    sealed(mine)
    key = own_key / manifest.KEY_FILE
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_bytes()) == 32
    assert glass.load(mine).manifest.backend == "inductor"
    assert glass.load(shutil.copytree(mine, tmp_path / "copy")).manifest.backend == "inductor"
    # Other code under the same proof, its checksums made right.
    package = mine / "main" / "model.pt2"
    package.write_bytes(package.read_bytes() + b"\0")
    with pytest.raises(CorruptError, match=r"model\.pt2"):
        glass.load(mine)
    proof = json.loads((mine / FILE).read_text())["seal"]
    rewrite(mine)
    data = json.loads((mine / FILE).read_text())
    (mine / FILE).write_text(json.dumps(data | {"seal": proof}))
    with pytest.raises(UsageError, match="did not build on this machine"):
        glass.load(mine)


def sealed(directory: Path) -> None:
    data = json.loads((directory / FILE).read_text())
    (directory / FILE).write_text(json.dumps(data | {"seal": manifest.seal(data["checksum"])}))


def test_s2_large_native_code_is_hashed_whatever_its_size(
    native_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glassengine.engine.files.HASHED_AT_LOAD_BYTES", 0)
    mine = Path(shutil.copytree(native_engine.directory, tmp_path / "mine"))
    sealed(mine)
    package = mine / "main" / "model.pt2"
    data = bytearray(package.read_bytes())
    data[len(data) // 2] ^= 1
    package.write_bytes(data)
    with pytest.raises(CorruptError, match="another checksum"):
        glass.load(mine)


@pytest.mark.parametrize("fault", ["mode", "short", "link", "directory", "pipe"])
def test_a_key_that_others_could_have_made_proves_nothing(own_key: Path, tmp_path: Path, fault: str) -> None:
    proof = manifest.seal("checksum")
    assert proof is not None and manifest.is_ours("checksum", proof) and not manifest.is_ours("other", proof)
    key = own_key / manifest.KEY_FILE
    if fault == "mode":
        key.chmod(0o640)
    elif fault == "short":
        key.write_bytes(b"")
    else:
        key.rename(tmp_path / "elsewhere")
        if fault == "link":
            key.symlink_to(tmp_path / "elsewhere")
        elif fault == "directory":
            key.mkdir()
        else:
            import os

            os.mkfifo(key, 0o600)
    assert not manifest.is_ours("checksum", proof) and manifest.seal("checksum") is None


def test_nothing_that_is_no_proof_is_one(own_key: Path) -> None:
    assert not manifest.is_ours("checksum", None) and not list(own_key.iterdir())
    manifest.seal("checksum")
    for proof in ("", "é", "0" * 64, 5, ["x"], {"a": 1}):
        assert not manifest.is_ours("checksum", proof)  # type: ignore[arg-type]


def test_s2_a_file_that_was_added_to_native_code_is_not_this_users(
    native_engine: Engine, tmp_path: Path, own_key: Path
) -> None:
    mine = Path(shutil.copytree(native_engine.directory, tmp_path / "mine"))
    sealed(mine)
    assert glass.load(mine).manifest.backend == "inductor"
    (mine / "main" / "more").mkdir()
    (mine / "main" / "more" / "evil.so").write_bytes(b"")
    with pytest.raises(UsageError, match="did not build on this machine") as caught:
        glass.load(mine)
    assert "main/more/evil.so" in str(caught.value)


@pytest.mark.parametrize("folder", ["main", "encoder"])
def test_s7_a_folder_of_an_engine_is_no_link(engine: Engine, tmp_path: Path, folder: str) -> None:
    hostile = Path(shutil.copytree(engine.directory, tmp_path / "engine"))
    elsewhere = Path(shutil.copytree(engine.directory / "main", tmp_path / "elsewhere"))
    shutil.rmtree(hostile / folder, ignore_errors=True)
    (hostile / folder).symlink_to(elsewhere)
    with pytest.raises(CorruptError, match=f"not a directory\n.*{folder}: a link"):
        glass.load(hostile)
    linked = tmp_path / "linked"
    linked.symlink_to(engine.directory)  # the user typed it
    assert glass.load(linked).manifest.backend == "eager"
