"""Takes the snapshots that a policy asks for: the observer of executions that has them written.

Inputs are written, or kept, before the run, because a run may overwrite them. A snapshot that could not be written, or
that a limit forbids, is counted and said once; it never ends the user's program. A value that is not finite does: after
its snapshot `NonFiniteError` is raised, in every execution that makes one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import shutil
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassengine import environment, spans
from glassengine.errors import logger
from glassengine.executable.graph import CapturedGraph, Execution
from glassengine.executable.snapshot.keeper import Keeper, rng_states, set_rng_states
from glassengine.executable.snapshot.nonfinite import (
    Kinds,
    NonFiniteError,
    NonFiniteFinding,
    find_origin,
    kinds_of,
    probe,
)
from glassengine.executable.snapshot.policy import SnapshotPolicy, ask_callback, has_callback
from glassengine.executable.snapshot.tensors import obstacle
from glassengine.executable.snapshot.writer import SnapshotWriter, Taken
from glassengine.executable.steps import current_step

_MAX_ERROR_CHARACTERS = 8000


@dataclass
class _Pending:
    """An execution that runs.

    Attributes:
        words: What a snapshot of it is to hold, as far as it is one of every execution.
        path: Where that is, where its inputs are written already.
        kept: Inputs in case it fails; None if not requested.
        rng: State of the random number generators before it, where inputs are kept.
    """

    words: frozenset[str] = frozenset()
    path: Path | None = None
    kept: Mapping[str, Any] | None = None
    rng: Mapping[str, Tensor] = field(default_factory=dict)


class SnapshotTaker:
    """Takes the snapshots of one policy.

    Attributes:
        policy: What is asked for.
        store: What was written and left out.
    """

    def __init__(self, policy: SnapshotPolicy) -> None:
        self.policy = policy
        self.store = SnapshotStore(policy)
        self._keeper = Keeper(policy.keep_inputs)
        self._pending: weakref.WeakKeyDictionary[Execution, _Pending] = weakref.WeakKeyDictionary()
        self._masks: dict[tuple[int, str], Kinds] = {}
        self._lock = threading.Lock()
        self._wrong: Path | None = None
        self._went_wrong = False

    def before(self, execution: Execution) -> None:
        """Write or keep the inputs."""
        policy = self.policy
        if policy.ranks is not None and process_index() not in policy.ranks:
            return
        if policy.first_device_only and (execution.device_index or environment.local_rank()):
            return
        pending = _Pending()
        if "every" in policy.on:
            pending.words = self._words(execution)
            if "inputs" in pending.words:
                pending.rng = rng_states(execution.inputs)
                taken = _taken(execution, "every", inputs=execution.inputs, rng=pending.rng)
                pending.path = self.store.write(taken)
        if "nonfinite" in policy.on or "error" in policy.on:
            pending.kept = self._keeper.keep(execution)
            pending.rng = pending.rng or rng_states(execution.inputs)
        if pending.words or pending.kept is not None:
            self._pending[execution] = pending

    def after(self, execution: Execution) -> None:
        """Write the outputs, and look whether they are finite.

        Raises:
            NonFiniteError: They are not.
        """
        pending = self._pending.pop(execution, None)
        if pending is None:
            return
        if pending.path is not None and "outputs" in pending.words:
            self.store.add(pending.path, outputs=dict(_results(execution)))
        elif pending.words == {"outputs"}:
            self.store.write(_taken(execution, "every", outputs=dict(_results(execution))))
        if pending.kept is None:
            return
        if "nonfinite" in self.policy.on:
            self._require_finite(execution, pending)
        self._keeper.release(execution, pending.kept)

    def failed(self, execution: Execution, error: BaseException) -> None:
        """Write the inputs of a run that raised; one that the user interrupted did nothing wrong."""
        pending = self._pending.pop(execution, None)
        if pending is None or pending.kept is None or "error" not in self.policy.on:
            return
        if not isinstance(error, Exception):
            return
        text = "".join(traceback.format_exception(error))[-_MAX_ERROR_CHARACTERS:]
        path = self._write_wrong(execution, pending, "error", {"error": text})
        if path is not None:
            logger.error("execution %d of %s failed; its snapshot is %s", *_named(execution), path)
            error.add_note(f"snapshot: {path}")

    def _words(self, execution: Execution) -> frozenset[str]:
        if not has_callback():
            return frozenset(self.policy.contents.split())
        return ask_callback(execution.executable.name, execution.device_index, execution.number)

    def _require_finite(self, execution: Execution, pending: _Pending) -> None:
        nonfinite = {name: kinds for name, tensor in probe(_results(execution)) if any(kinds := kinds_of(tensor))}
        nonfinite = {name: kinds for name, kinds in nonfinite.items() if not self._is_mask(execution, name, kinds)}
        if not nonfinite:
            return
        finding = None
        if not any(kinds.nan for kinds in nonfinite.values()):
            finding = self._examine(execution, pending, nonfinite)
            if _is_explained(finding, nonfinite, pending):
                self._masks |= {(execution.executable.number, name): kinds for name, kinds in nonfinite.items()}
                return
        # The snapshot comes first, so that it survives a failing search for the op.
        path = self._write_wrong(execution, pending, "nonfinite", {})
        finding = finding or self._examine(execution, pending, nonfinite)
        raise self._nonfinite_error(execution, nonfinite, finding, path)

    def _is_mask(self, execution: Execution, name: str, kinds: Kinds) -> bool:
        """Whether an output has no other infinities than those that were found to be those of a mask."""
        known = self._masks.get((execution.executable.number, name))
        return known is not None and not any(now and not then for now, then in zip(kinds, known, strict=True))

    def _examine(
        self, execution: Execution, pending: _Pending, nonfinite: Mapping[str, Kinds]
    ) -> NonFiniteFinding | None:
        """Run the graph node by node; None where that is not possible."""
        before = rng_states(execution.inputs)
        try:
            graph = execution.executable.captured()
            if graph is None or pending.kept is None:
                return None
            set_rng_states(pending.rng)
            return find_origin(graph, _arguments(graph, pending.kept), nonfinite)
        except Exception:
            logger.debug("the graph of %s cannot be run node by node", execution.executable.name, exc_info=True)
            return None
        finally:
            set_rng_states(before)

    def _nonfinite_error(
        self, execution: Execution, nonfinite: Mapping[str, Kinds], finding: NonFiniteFinding | None, path: Path | None
    ) -> NonFiniteError:
        origin = finding.origin if finding is not None else None
        if path is not None and origin is not None:
            self.store.add(path, outputs={}, facts={"origin": asdict(origin)})
        names = [f"{kinds} in {name}" for name, kinds in list(nonfinite.items())[:3]]
        if len(nonfinite) > len(names):
            names.append(f"and {len(nonfinite) - len(names)} more")
        cause = "unknown op: the graph cannot be run node by node here" if finding is None else str(finding)
        number, name = _named(execution)
        where = path or self._wrong
        hint = "no snapshot could be written; the log says why"
        if where is not None:
            hint = f"glass replay {shlex.quote(str(where))} --first-nonfinite"
            hint += "" if path is not None else " (the first execution that went wrong)"
        error = NonFiniteError(
            f"execution {number} of {name!r} made values that are not finite: {', '.join(names)}", got=cause, hint=hint
        )
        error.snapshot, error.origin = where, origin
        return error

    def _write_wrong(
        self, execution: Execution, pending: _Pending, reason: str, facts: Mapping[str, Any]
    ) -> Path | None:
        """Write the one snapshot of what went wrong, or complete the one that is there of this execution."""
        with self._lock:
            if self._went_wrong:
                return None
            self._went_wrong = True
        if pending.path is None:
            outputs = dict(_results(execution)) if reason == "nonfinite" else None
            taken = _taken(execution, reason, inputs=pending.kept, outputs=outputs, rng=pending.rng, facts=facts)
            self._wrong = self.store.write(taken)
        else:
            is_missing = reason == "nonfinite" and "outputs" not in pending.words
            missing = dict(_results(execution)) if is_missing else {}
            self.store.add(pending.path, outputs=missing, facts={"reason": reason, **facts})
            self._wrong = pending.path
        return self._wrong


def process_index() -> int:
    """Return the rank of this process, as torch.distributed or else the environment has it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return environment.rank()


def _taken(
    execution: Execution,
    reason: str,
    *,
    inputs: Mapping[str, Any] | None = None,
    outputs: Mapping[str, Any] | None = None,
    rng: Mapping[str, Tensor] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Taken:
    executable = execution.executable
    graph, problem = None, "the executable does not know its graph"
    try:
        graph = executable.captured()
    except Exception as error:  # e.g. the weights of an engine, in a checkpoint that is gone
        problem = f"its graph cannot be read: {type(error).__name__}: {error}"
    return Taken(
        executable.name,
        executable.number,
        execution.device_index,
        execution.number,
        graph,
        reason,
        process_index(),
        inputs,
        outputs,
        rng or {},
        {"backend": executable.backend, "step": current_step(), **(facts or {})},
        problem,
    )


def _named(execution: Execution) -> tuple[int, str]:
    return execution.number, execution.executable.name


def _results(execution: Execution) -> list[tuple[str, Any]]:
    """Return what a run computed: its outputs, and the inputs that a graph of torch.compile wrote to."""
    graph = execution.executable.graph
    found = list(execution.outputs.items())
    if isinstance(graph, CapturedGraph) and graph.kind != "engine":
        found += [(spec.name, execution.inputs[spec.name]) for spec in graph.inputs if spec.is_mutated]
    return found


def _arguments(graph: CapturedGraph, kept: Mapping[str, Any]) -> list[Any]:
    """Return the inputs of a graph in order, on their devices; what it writes to as copies: a snapshot may follow."""
    found = []
    for spec in graph.inputs:
        value = kept[spec.name] if spec.name in kept else graph.weights[spec.name]
        if isinstance(value, Tensor):
            value = value.detach().to(spec.device)
            value = value.clone() if spec.is_mutated else value
        found.append(value)
    return found


def _is_explained(finding: NonFiniteFinding | None, nonfinite: Mapping[str, Kinds], pending: _Pending) -> bool:
    """Whether infinities are those of masks: by the graph, or, if unknown, because an input has them as well."""
    if finding is not None:
        return finding.origin is None and finding.is_reproduced
    if any(kinds.positive for kinds in nonfinite.values()):
        return False
    return any(kinds_of(tensor).negative for _, tensor in probe((pending.kept or {}).items()))


class SnapshotStore:
    """Writes the snapshots of one policy; safe for several threads.

    Attributes:
        policy: Where they go, and their limits.
        written: Those of this process, in order.
        left_out: Reason -> how many snapshots, or parts of snapshots, it cost.
        num_bytes: Disk space they take; what they share counts once.
    """

    def __init__(self, policy: SnapshotPolicy) -> None:
        self.policy = policy
        self.written: list[Path] = []
        self.left_out: Counter[str] = Counter()
        self.num_bytes = 0
        self._writer = SnapshotWriter(policy.directory, redact=policy.redact)
        self._lock = threading.Lock()
        self._summarized = 0
        atexit.register(self.close)

    def write(self, taken: Taken) -> Path | None:
        """Write a snapshot and return where it is, or None where it was left out."""
        with self._lock:
            reason = self._forbidden(taken)
            if reason is not None:
                self._leave_out(reason)
                return None
            path: Path | None = None
            with self._surviving(), spans.span("snapshot", taken.name):
                path = self._writer.write(taken)
                self.written.append(path)
                self.num_bytes += _own_bytes(path)
            return path

    def add(self, path: Path, *, outputs: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> bool:
        """Add outputs and facts to a snapshot; return whether they could be written."""
        with self._lock:
            with self._surviving(), spans.span("snapshot", path.name):
                self._writer.add(path, outputs=outputs, facts=facts or {})
                self.num_bytes += sum(tensor.nbytes for tensor in outputs.values() if obstacle(tensor) is None)
                return True
            return False

    def close(self) -> None:
        """Log what was left out, once."""
        atexit.unregister(self.close)
        with self._lock:
            total = sum(self.left_out.values())
            if total == self._summarized:
                return
            self._summarized = total
            reasons = "; ".join(f"{count}: {reason}" for reason, count in self.left_out.items())
            logger.warning("%d snapshots in %s, left out %s", len(self.written), self.policy.directory, reasons)

    def _forbidden(self, taken: Taken) -> str | None:
        policy = self.policy
        if policy.max_snapshots is not None and len(self.written) >= policy.max_snapshots:
            return f"max_snapshots={policy.max_snapshots}"
        size = self._writer.num_bytes(taken)
        if policy.max_bytes is not None and self.num_bytes + size > policy.max_bytes:
            return f"max_bytes={policy.max_bytes}"
        try:
            above = next(path for path in (policy.directory, *policy.directory.parents) if path.exists())
            free = shutil.disk_usage(above).free
        except OSError:
            return None  # writing will say why
        if free - size < policy.min_free_bytes:
            return f"less than min_free_bytes={policy.min_free_bytes} would be free on the disk"
        return None

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._leave_out(error.strerror or str(error))
        except Exception as error:
            # What cannot be read off a device in trouble must not hide the trouble.
            logger.debug("a snapshot failed", exc_info=True)
            self._leave_out(f"{type(error).__name__}: {str(error)[:300]}")

    def _leave_out(self, reason: str) -> None:
        if reason not in self.left_out:
            logger.warning("a snapshot in %s is left out: %s", self.policy.directory, reason)
            self._summarized += 1
        self.left_out[reason] += 1


def _own_bytes(directory: Path) -> int:
    """Return the bytes of the files that no other snapshot shares."""
    found = [entry.stat() for entry in os.scandir(directory)]
    return sum(entry.st_size for entry in found if entry.st_nlink == 1)
