"""Signatures of engines: a good one is found good, and nothing else is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import glassengine as glass
from glassengine import commands
from glassengine.cli.main import main
from glassengine.engine.store.signing import NAMESPACE, SIGNATURE, SUMS, check_key, sign_engine
from glassengine.errors import CorruptError, UsageError

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen, of OpenSSH's client")


def new_key(path: Path, passphrase: str = "") -> Path:
    """Return a new private key."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "a test", "-f", str(path)]
    subprocess.run(command, check=True, timeout=60)
    return path


def signers_of(key: Path, *, name: str = "alice@example.com", options: str = "") -> Path:
    """Return a file that trusts a key."""
    path = key.with_suffix(".signers")
    public = key.with_suffix(".pub").read_text()
    path.write_text(f"# whom we trust\n{name} {options}{public}")
    return path


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_key(tmp_path_factory.mktemp("keys") / "alice")


@pytest.fixture
def engine(tmp_path: Path, key: Path) -> Path:
    """Files that lie like those of an engine; nothing of them is run."""
    directory = tmp_path / "engine"
    (directory / "main").mkdir(parents=True)
    (directory / "encoder").mkdir()
    (directory / "engine.json").write_text("{}")
    (directory / "encoder" / "engine.json").write_text("{}")
    (directory / "main" / "model.so").write_bytes(bytes(range(256)) * 1000)
    (directory / "a name with blanks, ü").write_bytes(b"")
    sign_engine(directory, key)
    return directory


def test_a_good_signature(engine: Path, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = commands.verify_engine(engine, signers_of(key))
    assert found.signer == "alice@example.com" and found.key.startswith("ED25519 key SHA256:") and found.files == 4
    assert main(["verify", str(engine), "--signers", str(signers_of(key))]) == 0
    assert "signed by alice@example.com" in capsys.readouterr().out
    assert main(["verify", str(engine), "--signers", str(signers_of(key)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 4


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs coreutils")
def test_it_can_be_checked_without_us(engine: Path, key: Path) -> None:
    subprocess.run(["sha256sum", "--quiet", "--strict", "-c", SUMS], cwd=engine, check=True, timeout=60)
    command = ["ssh-keygen", "-Y", "verify", "-f", signers_of(key), "-I", "alice@example.com", "-n", NAMESPACE]
    with (engine / SUMS).open("rb") as sums:
        subprocess.run([*command, "-s", engine / SIGNATURE], stdin=sums, check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(
    "options", ["", f'namespaces="{NAMESPACE}" ', 'valid-after="20200101" ', "*@example.com", "bob,alice@example.com"]
)
def test_signers_that_are_known(engine: Path, key: Path, options: str) -> None:
    is_name = "=" not in options and options
    path = signers_of(key, name=options) if is_name else signers_of(key, options=options)
    assert commands.verify_engine(engine, path).files == 4


def damage(engine: Path, how: str) -> None:
    weights = engine / "main" / "model.so"
    if how == "a byte":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif how == "a file less":
        weights.unlink()
    elif how == "a file more":
        (engine / "main" / "other.so").write_bytes(b"x")
    elif how == "a file above":
        (engine / "config.json").write_text("{}")
    elif how == "an empty link":
        (engine / "more").symlink_to("/nowhere")
    elif how == "a link to the same bytes":
        weights.rename(engine.parent / "elsewhere")
        weights.symlink_to(engine.parent / "elsewhere")
    elif how == "a directory that is a link":
        (engine / "main").rename(engine.parent / "elsewhere")
        (engine / "main").symlink_to(engine.parent / "elsewhere")
    elif how == "a pipe":
        weights.unlink()
        os.mkfifo(weights)
    elif how == "a nested manifest":
        (engine / "encoder" / "engine.json").write_text('{"other": 1}')
    elif how == "other sums":
        path = engine / SUMS
        path.write_text(path.read_text().replace("0", "1"))
    elif how == "a line more":
        with (engine / SUMS).open("a") as file:
            file.write("0" * 64 + "  ../outside\n")
    elif how == "no sums":
        (engine / SUMS).write_text("")
    elif how == "no signature":
        (engine / SIGNATURE).write_text("")
    elif how == "half a signature":
        text = (engine / SIGNATURE).read_text()
        (engine / SIGNATURE).write_text(text[: len(text) // 2])
    elif how == "a large signature":
        (engine / SIGNATURE).write_bytes(b"x" * (1 << 20))
    else:
        raise ValueError(how)


@pytest.mark.parametrize(
    "how",
    [
        "a byte",
        "a file less",
        "a file more",
        "a file above",
        "an empty link",
        "a link to the same bytes",
        "a directory that is a link",
        "a pipe",
        "a nested manifest",
        "other sums",
        "a line more",
        "no sums",
        "no signature",
        "half a signature",
        "a large signature",
    ],
)
def test_s2_an_engine_that_was_changed_is_corrupt(
    engine: Path, key: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(engine, how)
    assert main(["verify", str(engine), "--signers", str(signers_of(key))]) == 4
    assert not capsys.readouterr().out


def test_s2_a_signature_of_another_engine(engine: Path, key: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "engine.json").write_text('{"other": 1}')
    sign_engine(other, key)
    shutil.copy(other / SIGNATURE, engine / SIGNATURE)
    with pytest.raises(CorruptError, match="not one of this engine"):
        commands.verify_engine(engine, signers_of(key))
    # With its sums, the signature is good, and the files are others.
    shutil.copy(other / SUMS, engine / SUMS)
    with pytest.raises(CorruptError, match="not as it was signed"):
        commands.verify_engine(engine, signers_of(key))


def test_s2_a_signature_for_something_else_is_none(engine: Path, key: Path) -> None:
    (engine / SIGNATURE).unlink()
    command = ["ssh-keygen", "-Y", "sign", "-q", "-f", str(key), "-n", "git", str(engine / SUMS)]
    subprocess.run(command, check=True, timeout=60)
    with pytest.raises(CorruptError, match="not one of this engine"):
        commands.verify_engine(engine, signers_of(key))


@pytest.mark.parametrize(
    "options", ['namespaces="git" ', 'valid-before="20200101" ', 'valid-after="20990101" ', "cert-authority "]
)
def test_s2_a_signer_for_something_else_is_none(engine: Path, key: Path, options: str) -> None:
    with pytest.raises(glass.GlassError, match="no trusted signer") as raised:
        commands.verify_engine(engine, signers_of(key, options=options))
    assert raised.value.exit_status == 1


def test_s2_a_stranger(engine: Path, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mallory = new_key(tmp_path / "mallory")
    assert main(["verify", str(engine), "--signers", str(signers_of(mallory))]) == 1
    assert "no trusted signer" in capsys.readouterr().err
    (tmp_path / "nobody").write_text("")
    assert main(["verify", str(engine), "--signers", str(tmp_path / "nobody")]) == 1
    # He signs it again, after a change: his signature is good, and he is still a stranger.
    damage(engine, "a byte")
    sign_engine(engine, mallory)
    assert commands.verify_engine(engine, signers_of(mallory)).files == 4
    assert main(["verify", str(engine), "--signers", str(signers_of(key))]) == 1


def test_what_is_asked_for_wrongly(engine: Path, key: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no engine found"):
        commands.verify_engine(tmp_path, signers_of(key))
    with pytest.raises(UsageError, match="cannot be read"):
        commands.verify_engine(engine, tmp_path / "none")
    (engine / SIGNATURE).unlink()
    with pytest.raises(glass.GlassError, match="is not signed") as raised:
        commands.verify_engine(engine, signers_of(key))
    assert raised.value.exit_status == 1
    for wrong in (tmp_path / "none", tmp_path, Path("/dev/null")):
        with pytest.raises(UsageError, match="no such signing key"):
            check_key(wrong)


def test_a_key_that_does_not_sign(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("no key")
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(UsageError, match="cannot be signed with this key"):
        sign_engine(engine, tmp_path / "key")
    assert not (engine / SIGNATURE).exists() and not (engine / SUMS).exists()
    (engine / "two\nlines").write_text("")
    with pytest.raises(UsageError, match="has a name that cannot be signed"):
        sign_engine(engine, tmp_path / "key")


def test_a_machine_without_ssh(engine: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UsageError, match="need ssh-keygen"):
        commands.verify_engine(engine, signers_of(key))
    with pytest.raises(UsageError, match="need ssh-keygen"):
        check_key(key)


MODEL = """
import torch

def tiny():
    return torch.nn.Linear(4, 2).eval()

def inputs():
    return {"input": torch.ones(1, 4)}
"""


def test_an_engine_is_signed_when_it_is_built_and_stays_good_when_it_runs(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLASS_CONFIG_DIR", str(tmp_path / "config"))
    (tmp_path / "model.py").write_text(MODEL)
    model, inputs, engine = f"{tmp_path}/model.py:tiny", f"{tmp_path}/model.py:inputs", str(tmp_path / "engine")
    arguments = ["build", model, "-o", engine, "--inputs", inputs, "--backend", "eager"]
    assert main([*arguments, "--sign", str(tmp_path / "none")]) == 2
    (tmp_path / "bad").write_text("no key")
    assert main([*arguments, "--sign", str(tmp_path / "bad")]) == 2
    assert not Path(engine).exists(), "nothing is left behind"
    assert main([*arguments, "--sign", str(key)]) == 0
    assert main(["verify", engine, "--signers", str(signers_of(key))]) == 0
    assert main(["run", engine, "--inputs", inputs]) == 0
    assert main(["verify", engine, "--signers", str(signers_of(key))]) == 0
    assert main([*arguments, "--overwrite"]) == 0
    capsys.readouterr()
    assert main(["verify", engine, "--signers", str(signers_of(key))]) == 1
    assert "is not signed" in capsys.readouterr().err
