"""What is to be kept of which executions, where, and how much of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from glassengine.errors import UnknownNameError, UsageError
from glassengine.writing.files import local

Occasion = Literal["every", "nonfinite", "error"]
KeepInputs = Literal["reference", "device", "host"]
OCCASIONS: tuple[Occasion, ...] = get_args(Occasion)
KEEP_INPUTS: tuple[KeepInputs, ...] = get_args(KeepInputs)
CONTENTS = ("inputs", "outputs", "inputs outputs")

MIN_FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class Policy:
    """When snapshots are taken, what they hold, and what limits them.

    Attributes:
        directory: Where they go.
        on: "every" execution for which the callback asks; one whose outputs are "nonfinite"; one that ends in an
            "error". Of the last two, one snapshot is taken in all, with inputs and outputs.
        contents: What a snapshot of every execution holds where no callback is registered.
        keep_inputs: How inputs outlast a run that may go wrong: as they are, but for copies of those that it may write
            to ("reference"), copied on their device ("device"), or in main memory ("host").
        ranks: Processes that take any; None for all of them.
        first_device_only: Only executions on the first device of the machine.
        max_snapshots: Most of this process; None for no limit.
        max_bytes: Most on disk, of this process; None for no limit.
        min_free_bytes: What must remain free on the disk.
        redact: Shapes, statistics and hashes in place of values.
    """

    directory: Path
    on: frozenset[str] = frozenset({"every"})
    contents: str = "inputs"
    keep_inputs: KeepInputs = "reference"
    ranks: frozenset[int] | None = None
    first_device_only: bool = False
    max_snapshots: int | None = None
    max_bytes: int | None = None
    min_free_bytes: int = MIN_FREE_BYTES
    redact: bool = False


def make_policy(
    directory: str | Path,
    *,
    on: str | Iterable[str],
    contents: str,
    keep_inputs: str,
    ranks: int | Iterable[int] | None,
    max_snapshots: int | None,
    max_bytes: int | None,
    min_free_bytes: int,
    redact: bool,
) -> Policy:
    """Return a checked policy.

    Raises:
        UnknownNameError: A word that means nothing here.
        UsageError: A limit below zero, or nothing to do.
    """
    occasions = frozenset([on] if isinstance(on, str) else on)
    for word in occasions:
        _require("occasion of a snapshot", word, OCCASIONS, 'on="every", "nonfinite", "error"')
    if not occasions:
        raise UsageError("no occasion for a snapshot is named", got="on=()", expected=OCCASIONS, hint='on="every"')
    words = " ".join(sorted(set(contents.split())))
    _require("content of a snapshot", words, CONTENTS, 'contents="inputs outputs"')
    _require("way to keep inputs", keep_inputs, KEEP_INPUTS, 'keep_inputs="host"')
    for name, limit in (
        ("max_snapshots", max_snapshots),
        ("max_bytes", max_bytes),
        ("min_free_bytes", min_free_bytes),
    ):
        if limit is not None and limit < 0:
            raise UsageError(f"{name} is below zero", got=str(limit), expected="0 or more, or None for no limit")
    chosen = None if ranks is None else frozenset([ranks] if isinstance(ranks, int) else ranks)
    return Policy(
        local(directory).absolute(),
        occasions,
        words,
        keep_inputs,  # type: ignore[arg-type]  # checked above
        chosen,
        False,
        max_snapshots,
        max_bytes,
        min_free_bytes,
        redact,
    )


def _require(kind: str, word: str, known: Iterable[str], hint: str) -> None:
    if word not in known:
        raise UnknownNameError(kind, word, known, hint=hint)
