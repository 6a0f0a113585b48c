"""Results of building and compiling: differences of artifacts, causes, the cache, pending graphs, conformance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from glassengine.results.base import Result


@dataclass(frozen=True)
class Change(Result):
    """One difference between two stages.

    Attributes:
        kind: "added", "removed" or "changed".
        baseline: Line of the baseline's `graph.txt`; None where it has none.
        candidate: Line of the candidate's; None where it has none.
        sites: Names of the tensors.
    """

    kind: str
    baseline: str | None
    candidate: str | None
    sites: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The change as lines of a diff."""
        return [f"{sign} {text}" for sign, text in (("-", self.baseline), ("+", self.candidate)) if text is not None]


@dataclass(frozen=True)
class StageComparison(Result):
    """One stage of two builds.

    Attributes:
        name: Its name.
        status: "identical", "inherited" (it differs as the stages before it do), "different", "baseline only" or
            "candidate only".
        changes: What differs: between the two graphs where the status is "different", from the stage before it where
            only one side has the stage.
    """

    name: str
    status: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Difference(Result):
    """A setting, version or file that differs; a side that lacks it is None.

    Attributes:
        name: Of the setting, package or file.
        baseline: Its value.
        candidate: Likewise.
    """

    name: str
    baseline: Any
    candidate: Any


@dataclass(frozen=True)
class ArtifactComparison(Result):
    """What differs between the artifacts of two builds.

    Attributes:
        baseline: Directory.
        candidate: Directory.
        ok: Both builds ended well, and nothing differs that they decided: stages, options, versions, network.
        complete: Both builds ended well; of one that did not, only what it wrote was compared.
        stages: Each stage of either side, in order.
        differences: Options and versions that differ.
        files: Files of the back-end (network, plugins, sources) that differ.
        notes: What could not be compared, and why.
    """

    baseline: str
    candidate: str
    ok: bool
    complete: bool
    stages: tuple[StageComparison, ...]
    differences: tuple[Difference, ...]
    files: tuple[str, ...]
    notes: tuple[str, ...]
    schema_version: int = 1


What = Literal["kind", "dtype", "shape", "stride", "device", "requires_grad", "input", "op", "constant", "order"]


@dataclass(frozen=True)
class KeyChange(Result):
    """One difference.

    Attributes:
        what: "kind" of graph; "dtype", "shape", "stride", "device" or "requires_grad" of an input; an "input" that is
            on one side only; for the first operation that differs: "op" where it is another or on one side only, a
            "constant" among its arguments, or the "order", where its arguments are other values.
        where: Name of the input; or number of the operation, module path and source line.
        before: In the earlier graph; "" where there was nothing.
        after: In the later graph; "" where there is nothing.
    """

    what: What
    where: str
    before: str
    after: str

    def __str__(self) -> str:
        match self.what, self.before, self.after:
            case "kind", before, after:
                return f"{before} graph -> {after} graph"
            case "input" | "op" as what, "", after:
                return f"{what} {self.where} is new: {after}"
            case "input" | "op" as what, before, "":
                return f"{what} {self.where} is gone: {before}"
            case "constant" | "op" | "order", before, after:
                return f"op {self.where}: {before} -> {after}"
        return f"{self.what} of {self.where}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class Cause(Result):
    """Why a graph was compiled.

    Attributes:
        kind: "first call", "backward", "graph break", "build"; or what is not as it was: "size", "rank", "stride",
            "dtype", "device", "requires_grad", "argument", "attribute", "global", "training", "grad mode", "autocast",
            "default dtype", "global state", "length", "type", "object", "aliasing", "back-end"; or "guard" for another
            assumption of the compiled code, "unknown" where nothing was found.
        text: What follows "because".
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Compilation(Result):
    """One compilation of a graph.

    Attributes:
        number: Of this compilation in its process.
        name: Of the executable.
        cause: Why it was compiled.
        frames: "file:line in function: code" of the user, innermost first.
        compile_s: Seconds.
        from_cache: Whether the code was in the persistent cache, and nothing was compiled.
        kind: Of the graph; this and what follows is empty where only the back-end knows the graph.
        graph_hash: Of the graph.
        nearest: Name of the executable of the earlier graph that is most like this one, among those of the same model,
            function or operation; or of an equal graph of another one; "" where there is none.
        changes: What differs from it, inputs first; empty where nothing does.
        num_ops: Operations of the graph.
        num_inputs: Of the graph.
        num_outputs: Of the graph.
    """

    number: int
    name: str
    cause: Cause
    frames: tuple[str, ...]
    compile_s: float
    from_cache: bool
    kind: str = ""
    graph_hash: str = ""
    nearest: str = ""
    changes: tuple[KeyChange, ...] = ()
    num_ops: int = 0
    num_inputs: int = 0
    num_outputs: int = 0

    def __str__(self) -> str:
        done = f"loaded {self.name} from the cache" if self.from_cache else f"compiled {self.name}"
        ops = f"{self.num_ops} op{'s' * (self.num_ops != 1)}"
        graph = f" (graph {self.graph_hash[:8]}, {ops})" if self.graph_hash else ""
        parts = [f"{done}{graph} in {self.compile_s:.2f} s because {self.cause.text}"]
        if self.nearest:
            listed = "; ".join(map(str, self.changes[:2]))
            more = f"; and {len(self.changes) - 2} more" if len(self.changes) > 2 else ""
            parts.append(f"unlike {self.nearest}: {listed}{more}" if self.changes else f"same graph as {self.nearest}")
        if self.frames:
            parts.append(f"from {self.frames[0]}")
        return "; ".join(parts)


@dataclass(frozen=True)
class CachedGraph:
    """One entry of the cache.

    Attributes:
        key: Of the entry: the name of its directory.
        name: Of the executable that it was compiled for first.
        graph_hash: Of its graph.
        num_hits: How often another process took it.
        num_bytes: Of its files.
        compile_s: Seconds that compiling took.
        last_used: In seconds since the epoch; when it was made, before its first hit.
        cause: Why it had to be compiled: what differed from the nearest entry of that time.
        stale: Why it would not be taken here and now: versions or processor that differ. "" where it would.
        parts: Everything its key is made of.
    """

    key: str
    name: str
    graph_hash: str
    num_hits: int
    num_bytes: int
    compile_s: float
    last_used: float
    cause: str
    stale: str
    parts: dict[str, dict[str, str]]


@dataclass(frozen=True)
class CacheReport:
    """The cache as it is.

    Attributes:
        directory: Where it is; it need not exist.
        max_bytes: How large it may grow; 0 where it is turned off.
        problem: Why it cannot be used; "" where it can.
        entries: Those used last come first.
        damaged: Key -> what is wrong.
    """

    directory: str
    max_bytes: int
    problem: str
    entries: tuple[CachedGraph, ...]
    damaged: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether the cache can be used and nothing in it is damaged."""
        return not self.problem and not self.damaged

    @property
    def num_bytes(self) -> int:
        """Of all entries."""
        return sum(entry.num_bytes for entry in self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {"ok": self.ok, "num_bytes": self.num_bytes, **asdict(self)}


@dataclass(frozen=True)
class Finding(Result):
    """Something that a back-end did wrong. `what` is a site, an input or an output."""

    step: int
    what: str
    problem: str


@dataclass(frozen=True)
class ConformanceReport(Result):
    """What was checked, what was not and why, and what was wrong."""

    num_checked: int
    findings: tuple[Finding, ...]
    skipped: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether something was checked and nothing was wrong."""
        return self.num_checked > 0 and not self.findings


@dataclass(frozen=True)
class PendingTensor(Result):
    """A lazy tensor that has no value yet.

    Attributes:
        dtype: Without "torch.".
        shape: Its sizes.
        op: The operation that makes it.
        where: "file:line" of the user's code that called it; "" where it is unknown.
    """

    dtype: str
    shape: tuple[int, ...]
    op: str
    where: str

    def __str__(self) -> str:
        made = f"{self.dtype}{list(self.shape)} of {self.op}"
        return f"{made} at {self.where}" if self.where else made


@dataclass(frozen=True)
class Fallback(Result):
    """An operation on lazy tensors that was not recorded, but computed at once.

    Attributes:
        op: As PyTorch/XLA counts it: "aten::nonzero".
        reason: Why it was not recorded.
        where: "file:line" of the user's code that called it; "" where it is unknown.
        count: How often.
    """

    op: str
    reason: str
    where: str
    count: int

    def __str__(self) -> str:
        times = f" {self.count} times" if self.count > 1 else ""
        return f"{self.op} ran on ATen{times}: {self.reason}" + (f", at {self.where}" if self.where else "")
