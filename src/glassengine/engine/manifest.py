"""`engine.json`: everything that must hold for an engine to run, and where each tensor of it comes from.

`load` refuses in this order, so that the most telling reason is given: not JSON or a newer schema, a machine that the
engine was not built for, contradictions with the stored program, edits (checksum), missing or changed files.

Origin of an engine's native code: proof that this user built it here, by a private key.

A build writes an HMAC of the manifest's checksum, which covers the checksums of all files, with a key that lies in the
user's configuration directory and never leaves it. Owners and times of files prove nothing: an archive that the user
unpacks is his, too.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import platform
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from glassengine import environment
from glassengine.engine.recorded_model import RecordedModel
from glassengine.errors import BackendError, CorruptError, UsageError, logger, shortened
from glassengine.reading.documents import converted, parsed
from glassengine.reading.files import read_bytes, shown, user_key
from glassengine.results import Result
from glassengine.writing import document_checksum

KEY_FILE = "engine-key"
_PURPOSE = b"glassengine engine 1\n"


def seal(checksum: str) -> str | None:
    """Return the proof that this user built the engine whose manifest has this checksum; None without a key."""
    try:
        key = user_key(KEY_FILE, make=True)
    except OSError as error:
        logger.warning("the engine cannot be marked as built here, and will ask for --trust-engine: %s", error)
        return None
    return None if key is None else _mac(key, checksum)


def is_ours(checksum: str, proof: str | None) -> bool:
    """Say whether `proof` is what `seal` gave for this checksum, here and to this user."""
    try:
        key = None if proof is None else user_key(KEY_FILE)
    except OSError:
        return False
    return key is not None and hmac.compare_digest(_mac(key, checksum).encode(), str(proof).encode())


def require_trust(name: str, backend: str, folder: Path, listed: Set[Path], *, ours: bool, trust: bool) -> None:
    """Refuse native code of an engine that was built elsewhere, unless the user says that he trusts it.

    Args:
        name: Of the engine.
        backend: Which would load it.
        folder: Where what would be loaded lies.
        listed: The files that the manifest lists: one that was added is not of the user who built the rest.
        ours: Whether this user built the engine here, and nothing was changed since.
        trust: What the user says.

    Raises:
        UsageError: Says what would run.
    """
    there = {path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}
    if trust or (ours and there <= listed):
        return
    files = sorted(path.relative_to(folder.parent).as_posix() for path in there)
    raise UsageError(
        f"the engine {name!r} brings native code that you did not build on this machine",
        got=shown(f"{shortened(files, 5)}: back-end {backend} loads it into this process, with your permissions"),
        expected="an engine that you built here, or one whose builder you trust",
        hint="--trust-engine (trust=True) if you trust it, or build it here",
    )


def _mac(key: bytes, checksum: str) -> str:
    return hmac.new(key, _PURPOSE + checksum.encode(), hashlib.sha256).hexdigest()


FILE = "engine.json"
FORMAT = "glassengine engine"
SCHEMA_VERSION = 1
MAX_BYTES = 32 << 20

REBUILD = "build it again with: glass build MODEL -o DIRECTORY --overwrite"


# Instruction sets that a compiler may use; other flags (virtualization, mitigations) do not matter for code.
_INSTRUCTIONS = re.compile(
    r"(avx|sse|ssse|amx|fma|f16c|bmi|popcnt|movbe|gfni|vaes|vpcl|adx|asimd|sve|bf16|i8mm|fphp|neon)"
)


@dataclass(frozen=True)
class TensorEntry(Result):
    """One input or output of the executable, in the order it takes or returns them. Sizes are ints or names."""

    name: str
    node: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class AddedOutput(Result):
    """One debug output.

    Attributes:
        name: What it is called in `debug_buffers`: alias or site.
        site: Its site.
        node: FX node behind it.
        derived: Where its value comes from when it is computed on reading; None when the executable returns it.
        dtype: torch dtype name, after the cast where one was asked for.
        shape: Sizes, ints or names.
        axes: Position of "batch", "sequence" and "cache".
        source: "file:line: code".
        cast_from: dtype that it is computed in where a cast on reading was asked for, else None.
    """

    name: str
    site: str
    node: str
    derived: str | None
    dtype: str
    shape: tuple[int | str, ...]
    axes: dict[str, int]
    source: str | None
    cast_from: str | None = None

    @property
    def cast(self) -> str | None:
        """The dtype to cast it to when it is read, or None."""
        return None if self.cast_from is None else self.dtype


@dataclass(frozen=True)
class FileEntry(Result):
    """One file of the engine; `path` is relative and has forward slashes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class CutWeight(Result):
    """How a weight is cut among ranks: along `axis`, each block of it into equal parts."""

    axis: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Manifest(Result):
    """The content of `engine.json`.

    Attributes:
        name: Name of the engine, that of its directory when built.
        glassengine: Version that built it.
        backend: Back-end that built it and runs it.
        kv: "mutated", "functional" or "own", as the back-end's capability.
        portable: Whether it runs on another processor.
        requires: Package -> version that must be the same where it runs.
        versions: All versions at build time, for the reader.
        machine: Processor architecture, e.g. "x86_64".
        cpu: Marketing name of the processor.
        cpu_flags: Instruction sets that a processor must have; empty where the system did not tell.
        kind: "causal_lm" or "module".
        dtype: Floating dtype of the parameters.
        graph_level: Decomposition level at which nodes are named.
        max_batch_size: Largest batch; None for a module.
        max_seq_len: Most tokens of one sequence, prompt and generated; None for a module.
        vocab_size: Number of logits; None for a module.
        kv_layout: (heads, key size, value size) per layer.
        caches: `past_*` input -> `present_*` output.
        inputs: Inputs in order.
        outputs: Results by name, updated caches included.
        ranges: Dynamic size -> (smallest, largest or None), for a module.
        fixed_inputs: Non-tensor arguments that were built in, as JSON values.
        added_outputs: Debug outputs in the order asked for.
        left_out: Debug output that did not fit the byte budget -> reason.
        passes: User passes, in order.
        model: spec, directory, dtype, fingerprint and how it was loaded.
        weights: What weights.safetensors holds: "all", or "constants" when the rest is in the checkpoint.
        shares_weights: Whether the executable reads them from there instead of keeping its own.
        tokenizer: Whether the directory holds a tokenizer.
        files: Every other file of the directory.
        command_line: As given, secrets removed.
        git: Commit checked out where the build ran.
        notes: Warnings of the build, e.g. about another back-end.
        has_encoder: Whether the directory `encoder` holds the engine of an encoder, which runs before the first step.
        device: What it was built for, "cpu" or "cuda": where its caches lie.
        mesh: "tensor" and "pipeline" -> number of ranks, for an engine of several; empty for one of one process.
        placements: Weight -> how it is cut among the ranks of a stage; others are whole on each rank that reads them.
        quantize: Type that its matrices were rounded to when it was built; "" for none.
    """

    name: str
    glassengine: str
    backend: str
    kv: str
    portable: bool
    requires: dict[str, str]
    versions: dict[str, str | None]
    machine: str
    cpu: str
    cpu_flags: tuple[str, ...]
    kind: str
    dtype: str
    graph_level: str
    max_batch_size: int | None
    max_seq_len: int | None
    vocab_size: int | None
    kv_layout: tuple[tuple[int, int, int], ...]
    caches: dict[str, str]
    inputs: tuple[TensorEntry, ...]
    outputs: tuple[TensorEntry, ...]
    ranges: dict[str, tuple[int, int | None]]
    fixed_inputs: dict[str, Any]
    added_outputs: tuple[AddedOutput, ...]
    left_out: dict[str, str]
    passes: tuple[str, ...]
    model: dict[str, Any]
    weights: str
    shares_weights: bool
    tokenizer: bool
    files: tuple[FileEntry, ...]
    command_line: tuple[str, ...]
    git: str | None
    notes: tuple[str, ...] = ()
    has_encoder: bool = False
    device: str = "cpu"
    mesh: dict[str, int] = field(default_factory=dict)
    placements: dict[str, CutWeight] = field(default_factory=dict)
    quantize: str = ""
    schema_version: int = SCHEMA_VERSION
    format: str = FORMAT

    @property
    def generates(self) -> bool:
        """Whether it has a session: prefill and decode steps."""
        return self.kind == "causal_lm"


def without_caches(manifest: Manifest, logits: str | None = None) -> Manifest:
    """Return the manifest of an engine whose caches lie elsewhere: they are neither inputs nor outputs of a step.

    `logits` is their dtype, where it is not that of the program.
    """
    caches = {*manifest.caches, *manifest.caches.values()}
    outputs = [entry for entry in manifest.outputs if entry.name not in caches]
    return replace(
        manifest,
        caches={},
        inputs=tuple(entry for entry in manifest.inputs if entry.name not in caches),
        outputs=tuple(
            replace(entry, dtype=logits) if logits and entry.name == "logits" else entry for entry in outputs
        ),
        device="cpu",
    )


class _Written(msgspec.Struct):
    format: Literal["glassengine engine"]


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Write `engine.json` into `directory`."""
    data = manifest.to_dict()
    checksum = document_checksum(data)
    data |= {"checksum": checksum, "seal": seal(checksum)}
    (directory / FILE).write_text(json.dumps(data, indent=1), encoding="utf-8")


class ReadManifest(NamedTuple):
    """A manifest from disk: whether it is as it was written, and whether this user built it on this machine.

    An edited one is returned all the same, so that `require_fit` can name what does not fit any more.
    """

    manifest: Manifest
    intact: bool
    ours: bool


def read_manifest(directory: Path) -> ReadManifest:
    """Read `engine.json`.

    Raises:
        CorruptError: It is missing, damaged, or of a newer schema.
    """
    path = directory / FILE
    if not os.path.lexists(path):
        raise CorruptError(
            f"{directory} is not an engine", got=f"no {FILE} in it", hint="glass build MODEL -o DIRECTORY"
        )
    try:
        raw = read_bytes(path, most=MAX_BYTES, inside=directory)
        parsed(raw, _Written, path, what=FILE, version=SCHEMA_VERSION, nonfinite=True)
        data = parsed(raw, dict[str, Any], path, what=FILE, nonfinite=True)
        checksum, proof = data.pop("checksum", None), data.pop("seal", None)
        manifest = converted(data, Manifest, path, what=FILE)
        converted(manifest.model, RecordedModel, path, what=FILE)
    except CorruptError as error:
        raise CorruptError(error.what, got=error.got, expected=error.expected, hint=error.hint or REBUILD) from error
    found = document_checksum(data)
    return ReadManifest(manifest, checksum == found, is_ours(found, proof))


def require_fit(manifest: Manifest, *, portable: bool) -> None:
    """Refuse an engine that was not built for this machine.

    `portable` is what the back-end says: its files run on any processor.

    Raises:
        BackendError: It was built for another processor or other versions; says which.
    """
    here = environment.versions()
    reasons = [
        f"built with {package} {version}, here is {here.get(package) or 'none'}"
        for package, version in manifest.requires.items()
        if here.get(package) != version
    ]
    if not portable and manifest.machine != platform.machine():
        reasons.append(f"built for {manifest.machine}, this machine is {platform.machine()}")
    missing = [] if portable else sorted(set(manifest.cpu_flags) - environment.cpu_flags())
    if missing:
        lacking = f"{environment.cpu_name()} lacks: {' '.join(missing)}"
        reasons.append(f"built on {manifest.cpu} with instructions that {lacking}")
    if reasons:
        raise BackendError(
            f"the engine {manifest.name!r} was not built for this machine",
            got="; ".join(reasons),
            hint=f"build it here: glass build {manifest.model.get('spec', 'MODEL')} -o DIRECTORY --overwrite",
        )


def require_intact(manifest: Manifest, intact: bool, program: Mapping[str, Any]) -> None:
    """Refuse a manifest that was edited.

    `intact` is what `read_manifest` returned, `program` the content of `program.json`.

    Raises:
        CorruptError: Says what contradicts the stored program, where that is known.
    """
    claims = {"kind": manifest.kind, "dtype": manifest.dtype, "caches": manifest.caches}
    stored = {"kind": program["kind"], "dtype": program["metadata"].get("dtype"), "caches": program["caches"]}
    wrong = [key for key in claims if claims[key] != stored[key]]
    if wrong:
        raise CorruptError(
            f"{FILE} of the engine {manifest.name!r} contradicts its program",
            got=", ".join(f"{key} {claims[key]}" for key in wrong),
            expected=", ".join(f"{key} {stored[key]}" for key in wrong),
            hint=REBUILD,
        )
    if not intact:
        raise CorruptError(
            f"{FILE} of the engine {manifest.name!r} was changed after it was written",
            got="another checksum",
            hint=REBUILD,
        )


def instruction_flags() -> tuple[str, ...]:
    """Return the instruction sets of this processor, sorted."""
    return tuple(sorted(flag for flag in environment.cpu_flags() if _INSTRUCTIONS.match(flag)))
