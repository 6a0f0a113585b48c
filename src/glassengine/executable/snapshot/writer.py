"""Writes snapshots: each appears whole under a name that was free, and shares what it has in common with earlier ones.

What is killed half-way leaves a hidden directory; nothing that is there is ever replaced, except that the `meta.json`
of a snapshot gets outputs that came after it was written.
"""

from __future__ import annotations

import datetime as dt
import errno
import functools
import hashlib
import os
import socket
import threading
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassengine import environment
from glassengine.errors import first_line, logger
from glassengine.executable.graph import CapturedGraph
from glassengine.executable.snapshot import layout
from glassengine.executable.snapshot.graph import flatten, graph_archive
from glassengine.executable.snapshot.layout import SnapshotEntry, plain_entry, read_meta, sealed
from glassengine.executable.snapshot.tensors import (
    Home,
    SharedWeights,
    StoredPlace,
    file_key,
    link,
    obstacle,
    write_tensors,
)
from glassengine.program.onnx.translated import without_data
from glassengine.recording.layout.tensors import bytes_of, dtype_name, summarize
from glassengine.writing import aside, crc32, remove_tree

_MAX_REASON = 200
_WEIGHT_KINDS = ("parameter", "buffer", "constant")
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


@dataclass
class Taken:
    """What is known of one execution when its snapshot is written.

    Attributes:
        name: Of the executable.
        executable: Its number.
        device_index: Where it ran.
        execution: How many executions went before.
        graph: What was compiled; None if unknown.
        reason: "every", "nonfinite" or "error".
        process: Its rank.
        inputs: As they were before the run; None where they are not wanted.
        outputs: After the run; None where they are not wanted, or there are none.
        rng: State of each device's generator before the run.
        facts: What else stands in `meta.json`.
        graph_problem: Why the graph is unknown.
    """

    name: str
    executable: int
    device_index: int
    execution: int
    graph: CapturedGraph | None
    reason: str
    process: int
    inputs: Mapping[str, Any] | None = None
    outputs: Mapping[str, Any] | None = None
    rng: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    graph_problem: str = "the executable does not know its graph"


@dataclass
class _Graph:
    """A captured graph as it is written.

    Attributes:
        archive: Content of its file; None where there is none.
        file: What that is called.
        problem: Why there is none.
        constants: Tensors that the captured graph holds itself.
        home: Of the last snapshot that has it.
    """

    archive: bytes | None = None
    file: str = layout.GRAPH
    problem: str | None = None
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    home: Home = field(default_factory=lambda: Home(None))


class SnapshotWriter:
    """Writes snapshots into one directory; not safe for several threads at once.

    Args:
        directory: Made when the first snapshot is written.
        redact: Write shapes, statistics and hashes of values in place of the values, no source lines, and nothing of
            the machine but versions and processor.
    """

    def __init__(self, directory: Path, *, redact: bool = False) -> None:
        self.directory = directory
        self._redact = redact
        self._weights = SharedWeights()
        self._graphs: dict[tuple[int, str], _Graph] = {}

    def num_bytes(self, taken: Taken) -> int:
        """Return about how many bytes a snapshot will take on disk, without what it shares with earlier ones."""
        if self._redact:
            return 0
        tensors = [*(taken.inputs or {}).values(), *(taken.outputs or {}).values()]
        if taken.inputs is not None and taken.graph is not None:
            tensors += taken.graph.weights.values()
        return sum(t.nbytes for t in tensors if obstacle(t) is None and not self._weights.is_known(t))

    def write(self, taken: Taken) -> Path:
        """Write one snapshot and return where it is.

        Raises:
            OSError: It cannot be written; nothing of it is left.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        name = layout.directory_name(taken.name, taken.process, taken.executable, taken.device_index, taken.execution)
        partial = self.directory / f".{name}.{os.getpid()}-{threading.get_ident()}.partial"
        partial.mkdir()
        home = Home(partial)
        try:
            meta = self._write_files(taken, home)
            (partial / layout.META).write_text(sealed(meta), encoding="utf-8")
            home.path = _claim(partial, self.directory / name)
        except BaseException:
            home.path = None
            remove_tree(partial)
            raise
        return home.path

    def add(self, path: Path, *, outputs: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Add what was known only after a snapshot had been written.

        `path` is what `write` returned, without outputs; `facts` are laid over `meta.json`.

        Raises:
            OSError: They cannot be written; the snapshot is what it was.
        """
        meta = read_meta(path)[1] | self._facts(facts)
        try:
            if outputs:
                entries = self._write_values(Home(path), layout.OUTPUTS, _as("output", outputs))
                meta["outputs"] = [entry.to_dict() for entry in entries]
                meta["output_names"] = meta["output_names"] or list(outputs)
            with aside(path / layout.META) as new:
                new.write_text(sealed(meta), encoding="utf-8")
        except BaseException:
            if outputs:
                (path / layout.OUTPUTS).unlink(missing_ok=True)
            raise

    def _facts(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return facts without what a redacted snapshot must not tell: the user's code, and texts of errors."""
        redacted = dict(facts)
        if self._redact and "origin" in redacted:
            redacted["origin"] = {**redacted["origin"], "source": None}
        if self._redact and "error" in redacted:
            redacted["error"] = redacted["error"].strip().splitlines()[-1].partition(":")[0]
        return redacted

    def _write_files(self, taken: Taken, home: Home) -> dict[str, Any]:
        graph = self._graph(taken)
        if graph.archive is not None:
            self._write_graph(graph, home)
        inputs: list[SnapshotEntry] = []
        rng: list[SnapshotEntry] = []
        if taken.inputs is not None:
            inputs = self._write_inputs(taken, graph.constants, home)
            if not self._redact:
                rng = self._write_values(home, layout.RNG, _as("other", taken.rng))
        outputs = None
        if taken.outputs is not None:
            outputs = [
                entry.to_dict() for entry in self._write_values(home, layout.OUTPUTS, _as("output", taken.outputs))
            ]
        known = taken.graph.output_names if taken.graph is not None else tuple(taken.outputs or ())
        return {
            "schema_version": layout.SCHEMA_VERSION,
            "name": taken.name,
            "kind": taken.graph.kind if taken.graph is not None else "unknown",
            "reason": taken.reason,
            "process": taken.process,
            "num_processes": environment.num_ranks(),
            "executable": taken.executable,
            "device_index": taken.device_index,
            "execution": taken.execution,
            "graph_hash": taken.graph.hash if taken.graph is not None and graph.archive is not None else None,
            "graph_file": graph.file,
            "graph_crc32": None if graph.archive is None else crc32(graph.archive),
            "graph_problem": graph.problem,
            "redacted": self._redact,
            "created": dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            **self._facts(taken.facts),
            "inputs": [entry.to_dict() for entry in inputs],
            "output_names": list(known),
            "outputs": outputs,
            "rng": {entry.name: entry.to_dict() for entry in rng},
            # What changes results from one process to another, besides versions and processor.
            "settings": {
                "num_threads": torch.get_num_threads(),
                "float32_matmul_precision": torch.get_float32_matmul_precision(),
                "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            },
            "environment": _surroundings(self._redact),
        }

    def _graph(self, taken: Taken) -> _Graph:
        if taken.graph is None:
            return _Graph(problem=taken.graph_problem)
        # The same graph in another executable comes from other modules and lines of the user's code.
        key = (taken.executable, taken.graph.hash)
        if key not in self._graphs:
            found = self._graphs[key] = _written(taken.graph, with_source=not self._redact)
            if found.problem is not None:
                logger.warning("snapshots of %s hold no graph: %s", taken.name, found.problem)
        return self._graphs[key]

    def _write_graph(self, graph: _Graph, home: Home) -> None:
        assert home.path is not None and graph.archive is not None
        target = home.path / graph.file
        if graph.home.path is None or not link(graph.home.path / graph.file, target):
            target.write_bytes(graph.archive)
        graph.home = home

    def _write_inputs(self, taken: Taken, constants: Mapping[str, Tensor], home: Home) -> list[SnapshotEntry]:
        assert taken.inputs is not None
        given = _as("input", taken.inputs)
        specs = {spec.name: spec for spec in taken.graph.inputs} if taken.graph is not None else {}
        held: Mapping[str, Tensor] = {}
        if taken.graph is not None:
            held = taken.graph.weights
            given = {
                name: (spec.kind, held[name] if name in held else taken.inputs[name]) for name, spec in specs.items()
            }
        given |= _as("constant", constants)
        found = []
        for entry in self._write_values(home, layout.INPUTS, given, constant=held.keys() | constants.keys()):
            spec = specs.get(entry.name)
            if spec is not None:
                entry = replace(entry, requires_grad=spec.requires_grad, is_mutated=spec.is_mutated)
            found.append(entry)
        return found

    def _write_values(
        self, home: Home, file: str, values: Mapping[str, tuple[str, Any]], *, constant: Container[str] = ()
    ) -> list[SnapshotEntry]:
        """Write the values, by name and with their kind, that can be written; return an entry for each of all.

        All but weights, which have files of their own, go to `file`; those in `constant` never change.

        Raises:
            OSError: A file cannot be written.
        """
        assert home.path is not None
        entries = {name: _entry(name, kind, value, self._redact) for name, (kind, value) in values.items()}
        kept = (
            () if self._redact else [name for name in entries if entries[name].is_tensor and not entries[name].left_out]
        )
        tensors: dict[str, Tensor] = {name: values[name][1] for name in kept}
        weights = {name for name in tensors if values[name][0] in _WEIGHT_KINDS}
        places = self._weights.place(home, tensors, weights, constant) if file == layout.INPUTS else {}
        rest = {name: tensor for name, tensor in tensors.items() if name not in places}
        if rest:
            checksums = write_tensors(home.path / file, {file_key(name): tensor for name, tensor in rest.items()})
            places |= {name: StoredPlace(file, file_key(name), checksums[file_key(name)]) for name in rest}
        for name, place in places.items():
            entries[name] = replace(entries[name], file=place.file, key=place.key, crc32=place.crc32)
        return list(entries.values())


def _as(kind: str, values: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    return {name: (kind, value) for name, value in values.items()}


def _written(graph: CapturedGraph, *, with_source: bool) -> _Graph:
    try:
        if graph.onnx is not None:
            results: Any = graph.module.graph.output_node().args[0]
            bare = without_data(graph.onnx.file, [graph.onnx.values[node.name] for node in results])
            if not with_source:
                for node in bare.graph.node:
                    del node.metadata_props[:]
            return _Graph(bare.SerializeToString(), layout.ONNX_GRAPH)
        flat = flatten(graph.module, with_source=with_source)
        return _Graph(graph_archive(flat), constants=flat.constants)
    except Exception as error:
        # A snapshot without a graph is still worth more than none.
        reason = first_line(error)
        return _Graph(problem=f"torch cannot write it: {type(error).__name__}: {reason[:_MAX_REASON]}")


def _claim(partial: Path, wanted: Path) -> Path:
    """Rename a finished directory to the first name that is free: the one wanted, or with -2, -3, ... behind it."""
    number = 1
    while True:
        target = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            # A directory takes the place of an empty one only, so what another process wrote meanwhile is safe.
            partial.rename(target)
            return target
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        number += 1


def _surroundings(redact: bool) -> dict[str, Any]:
    known = _machine()
    if redact:
        return {name: known[name] for name in ("versions", "machine", "cpu", "cpu_flags")}
    return {**known, "variables": environment.variables(), "pid": os.getpid(), "host": socket.gethostname()}


@functools.cache
def _machine() -> dict[str, Any]:
    return environment.describe()


def _entry(name: str, kind: str, value: Any, redact: bool) -> SnapshotEntry:
    """Return the entry of an input or output, whether or not its values can be written."""
    if not isinstance(value, Tensor):
        entry = plain_entry(name, kind, value)
        is_hidden = redact and isinstance(value, (float, str))
        return replace(entry, value=None, left_out="redacted") if is_hidden else entry
    stride = tuple(value.stride()) if value.layout == torch.strided else ()
    shape, problem = tuple(value.shape), obstacle(value)
    entry = SnapshotEntry(name, kind, dtype_name(value.dtype), shape, stride, str(value.device), left_out=problem)
    if problem is not None or not redact:
        return entry
    digest = hashlib.sha256(bytes_of(value.detach())).hexdigest()
    return replace(entry, sha256=digest, statistics=summarize(value.detach()).to_dict())
