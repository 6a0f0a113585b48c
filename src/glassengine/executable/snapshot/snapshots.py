"""`glass.snapshots.take`: snapshots of every executable of this process, for as long as one likes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from glassengine.executable.graph.observers import attach, detach
from glassengine.executable.snapshot.policy import MIN_FREE_BYTES, KeepInputs, Occasion, make_policy
from glassengine.executable.snapshot.taker import SnapshotTaker


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    policy = make_policy(
        directory,
        on=on,
        contents=contents,
        keep_inputs=keep_inputs,
        ranks=ranks,
        max_snapshots=max_snapshots,
        max_bytes=max_bytes,
        min_free_bytes=min_free_bytes,
        redact=redact,
    )
    return Snapshots(SnapshotTaker(policy))
