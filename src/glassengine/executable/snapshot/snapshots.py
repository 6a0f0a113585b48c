"""Requests for snapshots: `glass.snapshots.take`, or environment variables of PyTorch NeuronX, read at each execution.

    XLA_FLAGS="--xla_dump_hlo_snapshots --xla_dump_to=DIR"      every execution (torch-neuronx 2.1)
    XLA_FLAGS="--xla_dump_to=DIR" NEURON_DUMP_HLO_SNAPSHOT=1    every execution (1.13)
    ... NEURON_DUMP_HLO_SNAPSHOT=ON_NRT_ERROR                   one that goes wrong; _HYBRID and _CPU say where its
                                                                inputs are kept until then
    ... NEURON_NC0_ONLY_SNAPSHOT=1                              the first device of the machine alone

`NEURON_FRAMEWORK_DEBUG` need not be set, but turns `NEURON_DUMP_HLO_SNAPSHOT` off where it is 0.
"""

from __future__ import annotations

import functools
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from glassengine import environment
from glassengine.errors import UnknownNameError, UsageError, logger, nearest
from glassengine.executable.graph import add_source, attach, detach
from glassengine.executable.snapshot.policy import (
    CONTENTS,
    KEEP_INPUTS,
    MIN_FREE_BYTES,
    OCCASIONS,
    KeepInputs,
    Occasion,
    SnapshotPolicy,
)
from glassengine.executable.snapshot.taker import SnapshotTaker
from glassengine.writing import local

DIRECTORY = "dump"
"""Where snapshots go when XLA_FLAGS names no directory: that of the examples of the documents."""
_OFF = ("", "0", "false", "off", "no")
_ON = ("1", "true", "on", "yes")
_ON_ERROR: dict[str, KeepInputs] = {
    "on_nrt_error": "reference",
    "on_nrt_error_hybrid": "device",
    "on_nrt_error_cpu": "host",
}
_saw_execution = False


class Snapshots:
    """Snapshots that are being taken, from when it is made until `close`; a context manager."""

    def __init__(self, taker: SnapshotTaker) -> None:
        self._taker = taker
        attach(taker)

    @property
    def directory(self) -> Path:
        """Where they go."""
        return self._taker.policy.directory

    @property
    def written(self) -> tuple[Path, ...]:
        """Directories of those of this process so far."""
        return tuple(self._taker.store.written)

    @property
    def left_out(self) -> Counter[str]:
        """Reason -> how many were not written because of it."""
        return Counter(self._taker.store.left_out)

    def close(self) -> None:
        """Take no more, and say what was left out."""
        detach(self._taker)
        self._taker.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def snapshots(
    directory: str | Path,
    *,
    on: Occasion | Iterable[Occasion] = "every",
    contents: str = "inputs",
    keep_inputs: KeepInputs = "reference",
    ranks: int | Iterable[int] | None = None,
    max_snapshots: int | None = None,
    max_bytes: int | None = None,
    min_free_bytes: int = MIN_FREE_BYTES,
    redact: bool = False,
) -> Snapshots:
    """Take snapshots of executions from now on: of engines, of `torch.compile(..., backend="glass")`, op by op.

    A snapshot is a directory from which `glass replay` runs the execution again without the user's code: the graph,
    its inputs as they were before the run, parameters included, and the states of the random number generators.

    Args:
        directory: Where they go; each gets a name of its own, and nothing there is ever replaced.
        on: "every" execution, or what the callback of `register_snapshot_callback` chooses of them; the first one with
            "nonfinite" results, which stops the program with `NonFiniteError`; the first one that ends in an "error".
            Several are allowed. Infinities of a mask are no such results; those that a gradient scaler provokes in
            float16 are.
        contents: "inputs", "outputs" or "inputs outputs": of a snapshot of every execution, without a callback.
        keep_inputs: Where inputs are kept until a run has gone well. "reference" keeps them where they are and copies
            those that it may overwrite, "device" copies all of them there, "host" copies all into main memory, which
            takes no memory of the device and outlasts its failure.
        ranks: Processes that take snapshots, by rank; None for all.
        max_snapshots: Most of this process.
        max_bytes: Most bytes on disk, of this process.
        min_free_bytes: None is written that would leave less free on the disk.
        redact: Keep shapes, statistics and hashes instead of values, and no source lines. A hash shows those who can
            guess a value that the guess is right.

    Returns:
        A handle, to be closed or used as a context manager; it says what was written, and what was left out and why.

    Raises:
        UsageError: An argument that means nothing.
    """
    occasions = frozenset([on] if isinstance(on, str) else on)
    for word in occasions:
        _require("occasion of a snapshot", word, OCCASIONS, 'on="every", "nonfinite", "error"')
    if not occasions:
        raise UsageError("no occasion for a snapshot is named", got="on=()", expected=OCCASIONS, hint='on="every"')
    words = " ".join(sorted(set(contents.split())))
    _require("content of a snapshot", words, CONTENTS, 'contents="inputs outputs"')
    _require("way to keep inputs", keep_inputs, KEEP_INPUTS, 'keep_inputs="host"')
    limits = {"max_snapshots": max_snapshots, "max_bytes": max_bytes, "min_free_bytes": min_free_bytes}
    for name, limit in limits.items():
        if limit is not None and limit < 0:
            raise UsageError(f"{name} is below zero", got=str(limit), expected="0 or more, or None for no limit")
    chosen = None if ranks is None else frozenset([ranks] if isinstance(ranks, int) else ranks)
    policy = SnapshotPolicy(
        local(directory).absolute(),
        occasions,
        words,
        keep_inputs,
        chosen,
        max_snapshots=max_snapshots,
        max_bytes=max_bytes,
        min_free_bytes=min_free_bytes,
        redact=redact,
    )
    return Snapshots(SnapshotTaker(policy))


def _require(kind: str, word: str, known: Iterable[str], hint: str) -> None:
    if word not in known:
        raise UnknownNameError(kind, word, known, hint=hint)


def requested_taker() -> SnapshotTaker | None:
    """Return what takes the snapshots that the environment asks for now; None, after a microsecond, for none."""
    global _saw_execution
    request = environment.snapshot_request()
    if request is None:
        return None
    _saw_execution = True
    return _taker_of(request, _working_directory())


def warn_without_executions() -> None:
    """Say at the end of a program that the environment asks for snapshots, and no execution was seen."""
    request = environment.snapshot_request()
    if request is None or _saw_execution or policy_of(request, _working_directory()) is None:
        return
    name = "XLA_FLAGS" if "dump_hlo_snapshots" in request.xla_flags else "NEURON_DUMP_HLO_SNAPSHOT"
    logger.warning(
        "%s asks for snapshots, and no execution was seen: nothing ran as an engine, on lazy tensors, in eager "
        'debug mode, or by torch.compile(backend="glass")',
        name,
    )


def _working_directory() -> str:
    """Return where relative paths begin now; a program may go elsewhere, or lose its directory, while it runs."""
    try:
        return str(Path.cwd())
    except OSError:
        return "."


@functools.lru_cache(maxsize=64)
def _taker_of(request: environment.SnapshotRequest, start: str) -> SnapshotTaker | None:
    policy = policy_of(request, start)
    return None if policy is None else _taker(policy)


@functools.lru_cache(maxsize=64)
def _taker(policy: SnapshotPolicy) -> SnapshotTaker:
    """The same one each time the variables are set to the same, so that its counts go on."""
    return SnapshotTaker(policy)


def policy_of(request: environment.SnapshotRequest, start: str) -> SnapshotPolicy | None:
    """Return what the values of the variables ask for, paths beginning at `start`; what makes no sense is logged."""
    flags = _flags(request.xla_flags)
    every = flags.get("xla_dump_hlo_snapshots", "0").lower() not in _OFF
    word = " ".join(request.dump_hlo_snapshot.lower().split())
    contents, keep_inputs = "inputs", _ON_ERROR.get(word)
    if request.framework_debug.lower() in _OFF[1:] or word in _OFF:
        keep_inputs = None
    elif word in _ON or word in CONTENTS:
        every, contents = True, word if word in CONTENTS else contents
    elif keep_inputs is None:
        known = [*_ON[:1], *CONTENTS, *(name.upper() for name in _ON_ERROR)]
        close = ", ".join(nearest(word, known) or known)
        logger.warning("NEURON_DUMP_HLO_SNAPSHOT=%s means nothing; did you mean %s?", word, close)
    if not every and keep_inputs is None:
        return None
    directory = flags.get("xla_dump_to")
    if not directory:
        logger.warning("snapshots go to ./%s: XLA_FLAGS names no directory (--xla_dump_to=DIR)", DIRECTORY)
    try:
        place = local(directory or DIRECTORY)
    except UsageError as error:
        logger.warning("no snapshots are taken: XLA_FLAGS names %s; %s", directory, error.what)
        return None
    return SnapshotPolicy(
        Path(start, place),
        frozenset({"every"} if every else ()) | frozenset({"nonfinite", "error"} if keep_inputs else ()),
        contents,
        keep_inputs or "reference",
        first_device_only=request.nc0_only.lower() not in _OFF,
    )


def _flags(text: str) -> dict[str, str]:
    """Return the flags of XLA_FLAGS; one without a value is "1"."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    flags = {}
    for word in words:
        name, equals, value = word.partition("=")
        flags[name.lstrip("-")] = value if equals else "1"
    return flags


add_source(requested_taker)
