"""Signatures of engines, by OpenSSH: who vouches for the native code that an engine brings along.

    ENGINE/SHA256SUMS        every other file of the engine, as `sha256sum` writes it
    ENGINE/SHA256SUMS.sig    a signature of that, as `ssh-keygen -Y sign` writes it

Nothing of this needs Glass Engine: `sha256sum -c SHA256SUMS` and `ssh-keygen -Y verify -n glassengine-engine` check the
same. Whether a signature is good is decided by the exit status of ssh-keygen and by nothing that it prints.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from glassengine import starting
from glassengine.engine.store.checked_files import hash_file
from glassengine.engine.store.manifest import FILE
from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.reading.copies import here
from glassengine.reading.files import is_regular, open_regular, read_bytes, shown
from glassengine.results.engines import Signature

SUMS = "SHA256SUMS"
SIGNATURE = "SHA256SUMS.sig"
NAMESPACE = "glassengine-engine"
"""A signature that the same key made for something else (a commit, a letter) is none of an engine."""

_MAX_SUMS = 16 << 20
_MAX_SIGNATURE = 64 << 10
_MAX_FILES = 100_000
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_VERIFY_S = 60


def check_key(key: str | Path) -> Path:
    """Refuse what cannot sign, before an engine is built.

    Raises:
        UsageError: ssh-keygen or the file is missing.
    """
    _program()
    if not is_regular(key):
        raise UsageError(
            "no such signing key",
            got=shown(key),
            expected="a private key of OpenSSH, or the public one where an agent has the private one",
            hint="ssh-keygen -t ed25519 makes one",
        )
    return Path(key)


def sign_engine(directory: Path, key: Path) -> None:
    """Write the checksums of all files of an engine, and their signature; ssh-keygen asks for a passphrase itself.

    Args:
        directory: Of the engine.
        key: As for `check_key`.

    Raises:
        UsageError: ssh-keygen does not sign with this key; says why. Or a file has a name that no list could hold.
    """
    lines = []
    for path in sorted(_files(directory)):
        if path != shown(path) or "\\" in path or path.strip() != path:
            raise UsageError("a file of the engine has a name that cannot be signed", got=shown(path))
        lines.append(f"{hash_file(directory / path)}  {path}\n")
    sums = directory / SUMS
    (directory / SIGNATURE).unlink(missing_ok=True)
    sums.write_text("".join(lines), encoding="utf-8")
    command = [_program(), "-Y", "sign", "-q", "-f", os.fspath(key), "-n", NAMESPACE, os.fspath(sums)]
    done = starting.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode != 0 or not (directory / SIGNATURE).is_file():
        sums.unlink(missing_ok=True)
        raise UsageError("the engine cannot be signed with this key", got=f"{shown(key)}: {shown(done.stderr.strip())}")


def verify_engine(directory: str | Path, signers: str | Path) -> Signature:
    """Check that a trusted signer signed an engine and that its files are unchanged: all files, and no others.

    Reads and hashes files; nothing of the engine runs.

    Args:
        directory: Of the engine.
        signers: Whom you trust, in OpenSSH's format of allowed signers: `alice@example.com ssh-ed25519 AAAA...`.

    Raises:
        GlassError: It is not signed, or not by one of `signers`.
        CorruptError: The signature is not one of this engine, or a file was changed, added or removed.
        UsageError: There is no such engine, no such file of signers, or no ssh-keygen.
    """
    place, trusted = here(directory), here(signers)
    program = _program()
    if not os.path.lexists(place / FILE):
        raise UsageError("no engine found", got=shown(place), expected=f"a directory with {FILE}")
    with open_regular(trusted):  # says why it cannot be read
        pass
    if not os.path.lexists(place / SIGNATURE) or not os.path.lexists(place / SUMS):
        raise GlassError("the engine is not signed", got=shown(place), hint="glass build MODEL --sign KEY")
    sums = read_bytes(place / SUMS, most=_MAX_SUMS, inside=place)
    signature = read_bytes(place / SIGNATURE, most=_MAX_SIGNATURE, inside=place)
    signer, key = _signer(program, sums, signature, trusted)
    listed = _parsed(sums, place)
    _compare(listed, set(_files(place)), place)
    for path, digest in sorted(listed.items()):
        with open_regular(place / path, inside=place) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise _changed(place, path, "another checksum")
    return Signature(str(place), signer, key, len(listed))


def _signer(program: str, sums: bytes, signature: bytes, trusted: Path) -> tuple[str, str]:
    """Return (name, key) of the maker of a valid signature."""
    with tempfile.TemporaryDirectory(prefix="glassengine-") as folder:
        # The bytes that were read are checked, even if the file changes now.
        file = Path(folder, "signature")
        file.write_bytes(signature)
        arguments = ["-n", NAMESPACE, "-s", os.fspath(file)]
        good, key = _run([program, "-Y", "check-novalidate", *arguments], sums)
        if not good:
            raise CorruptError("the signature is not one of this engine", got=key)
        known, names = _run([program, "-Y", "find-principals", "-s", os.fspath(file), "-f", os.fspath(trusted)], b"")
        found = re.search(r"with (\S+ key \S+)", key)
        key = found[1] if found else key
        for name in re.split(r"[,\n]", names) if known else ():
            command = [program, "-Y", "verify", *arguments, "-f", os.fspath(trusted), "-I", name]
            if _run(command, sums)[0]:
                return name, key
    raise GlassError(
        "no trusted signer has signed the engine",
        got=key,
        expected=f"a signer of {shown(trusted)}, valid today and for {NAMESPACE}",
        hint=f"if you know this key: add a line 'NAME namespaces=\"{NAMESPACE}\" KEY' to the file of signers",
    )


def _run(command: list[str], given: bytes) -> tuple[bool, str]:
    """Return whether ssh-keygen agrees, and what it says."""
    try:
        done = starting.run(command, input=given, capture_output=True, timeout=_VERIFY_S)
    except subprocess.TimeoutExpired as error:
        raise UsageError("ssh-keygen did not finish in time", got=f"{_VERIFY_S} s") from error
    said = done.stdout or done.stderr
    lines = said.decode("utf-8", "replace").splitlines()
    return done.returncode == 0, "\n".join(shown(line) for line in lines)


def _program() -> str:
    found = shutil.which("ssh-keygen")
    if found is None:
        raise UsageError("signatures need ssh-keygen", hint="install OpenSSH's client, 8.2 or newer")
    return found


def _parsed(sums: bytes, directory: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in sums.decode("utf-8", "replace").splitlines():
        parts = _LINE.fullmatch(line)
        if parts is None or parts[2] in found:
            raise CorruptError("the list of signed files is damaged", got=f"{shown(directory / SUMS)}: {shown(line)}")
        found[parts[2]] = parts[1]
    return found


def _compare(listed: dict[str, str], there: set[str], directory: Path) -> None:
    for path in sorted(listed.keys() ^ there):
        raise _changed(directory, path, "it is missing" if path in listed else "it was not there when it was signed")
    if FILE not in listed:
        raise _changed(directory, FILE, "it was not signed")


def _changed(directory: Path, path: str, why: str) -> CorruptError:
    return CorruptError("the engine is not as it was signed", got=f"{shown(directory / path)}: {why}")


def _files(directory: Path, below: str = "") -> Iterator[str]:
    """Yield every file of an engine but the two of its signature, relative, with forward slashes.

    Raises:
        CorruptError: Something is neither a file nor a directory, or there are too many.
    """
    left, number = [below], 0
    while left:
        place = left.pop()
        with os.scandir(directory / place) as entries:
            for entry in entries:
                path = f"{place}{entry.name}"
                mode = entry.stat(follow_symlinks=False).st_mode
                number += 1
                if number > _MAX_FILES:
                    raise CorruptError("the engine holds too many files", got=f"more than {_MAX_FILES}")
                if stat.S_ISDIR(mode):
                    left.append(f"{path}/")
                elif not stat.S_ISREG(mode):
                    raise CorruptError("not a plain file", got=shown(directory / path))
                elif path not in (SUMS, SIGNATURE):
                    yield path
