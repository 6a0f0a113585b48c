"""Results on recordings and snapshots: summaries, a replay, and the smallest piece that a compiler breaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from glassengine.results.base import Result
from glassengine.results.comparison import Comparison


@dataclass(frozen=True)
class RecordedScript(Result):
    """How a script ended and what was recorded.

    Attributes:
        status: Its exit status.
        recordings: Directories, one per model and process.
        reason: Why there are none; None where there are some.
    """

    status: int
    recordings: tuple[str, ...]
    reason: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the script succeeded and called a model."""
        return self.status == 0 and bool(self.recordings)


@dataclass(frozen=True)
class RecordedTarget(Result):
    """What was recorded, or would be.

    Attributes:
        path: Directory of the recording; None where nothing was written.
        num_steps: Steps.
        num_tensors: Tensors with values.
        num_left_out: Tensors without.
        value_bytes: Bytes of values, before equal ones are stored once.
    """

    path: str | None
    num_steps: int
    num_tensors: int
    num_left_out: int
    value_bytes: int

    @property
    def ok(self) -> bool:
        """Whether there is anything."""
        return self.num_tensors + self.num_left_out > 0


@dataclass(frozen=True)
class Uploaded(Result):
    """What was brought to a store.

    Attributes:
        url: Where the recording is.
        num_files: Files that were uploaded; others were there.
        num_steps: Steps of the recording that can be read there.
        complete: Whether it was closed and every step that was begun was completed.
    """

    url: str
    num_files: int
    num_steps: int
    complete: bool


@dataclass(frozen=True)
class ListedSnapshot(Result):
    """One snapshot of a directory.

    Attributes:
        directory: Its name there.
        reason: "every", "nonfinite" or "error"; "unfinished" where writing it was cut short, "damaged" where it cannot
            be read.
        contents: What it holds: "graph", "inputs", "outputs"; "redacted".
        origin: The op that made the first value that is not finite, where that is known.
        num_bytes: Of its files; what it shares with others counts in each of them.
        problem: Why it cannot be read.
    """

    directory: str
    reason: str
    contents: tuple[str, ...] = ()
    origin: str | None = None
    num_bytes: int = 0
    problem: str | None = None


Failure = Literal["accuracy", "compile_error", "runtime_error", "crash"]


@dataclass(frozen=True)
class MinimalOp(Result):
    """One op of the smallest failing piece.

    Attributes:
        op: What it calls.
        node: Name of its node.
        module: Path of the user's module, where it is known.
        source: "file:line: line" of the user's code, where it is known.
    """

    op: str
    node: str
    module: str
    source: str | None


@dataclass(frozen=True)
class Bisection(Result):
    """The smallest piece of a graph that a back-end breaks.

    Attributes:
        backend: Which one.
        failure: "accuracy", "compile_error", "runtime_error", "crash" (of the process); None where nothing fails.
        message: What is wrong, one line; "" where nothing fails.
        num_ops: Of the whole graph.
        num_trials: Pieces that were compiled.
        ops: Of the piece.
        part: Of the compiler, as torch's bisector found it, e.g. "inductor, lowerings: relu"; None where it found none.
        reproduction: Directory of a test of the piece.
    """

    backend: str
    failure: Failure | None
    message: str
    num_ops: int
    num_trials: int
    ops: tuple[MinimalOp, ...] = ()
    part: str | None = None
    reproduction: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing fails."""
        return self.failure is None


@dataclass(frozen=True)
class ReplayedOutput(Result):
    """One output of a replay.

    Attributes:
        name: As in the snapshot.
        dtype: torch dtype name, or the type of a non-tensor.
        shape: Sizes.
        same_bits: Whether it is what was recorded, bit by bit; None where nothing was recorded.
        num_different: Elements that are not; None likewise.
        max_abs_diff: Largest difference of finite elements; None likewise, and where shapes differ.
        nonfinite: "NaN", "inf", "-inf" or several; "" where all is finite.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    same_bits: bool | None
    num_different: int | None
    max_abs_diff: float | None
    nonfinite: str


@dataclass(frozen=True)
class Replayed(Result):
    """What came of a replay.

    Attributes:
        snapshot: Its path.
        executable: Name of what was executed.
        execution: Number of the execution.
        reason: Why the snapshot was taken: "every", "nonfinite", "error".
        recorded_backend: What ran it then; "" where the snapshot does not say.
        backend: What ran it now.
        ok: Whether the outputs are what was recorded: bit by bit on the same back-end, up to rounding where they were
            judged; that nothing is not finite, or nothing fails, where that was asked. True where there is nothing to
            compare with and it ran.
        outputs: Of the run.
        error: What the run raised, one line.
        comparison: Where it was judged op by op.
        first_nonfinite: Where that was asked and found: op, node, module, source, kinds, num_elements, total_elements.
        bisection: Where that was asked.
        notes: What a reader must know: other versions, another processor, outputs that were not recorded.
    """

    snapshot: str
    executable: str
    execution: int
    reason: str
    recorded_backend: str
    backend: str
    ok: bool
    outputs: tuple[ReplayedOutput, ...] = ()
    error: str | None = None
    comparison: Comparison | None = None
    first_nonfinite: Mapping[str, Any] | None = None
    bisection: Bisection | None = None
    notes: tuple[str, ...] = ()
    schema_version: int = 1
