"""Reads snapshots, one or all of a directory: executions of executables. Reading runs no code and needs no model."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.export import ExportedProgram

from glassengine.errors import CorruptError, UnknownNameError, UsageError
from glassengine.executable.snapshot import layout
from glassengine.executable.snapshot.graph import load_graph
from glassengine.executable.snapshot.layout import Meta, SnapshotEntry, parsed_meta, read_meta, sealed
from glassengine.executable.snapshot.nonfinite import NonFiniteOrigin
from glassengine.executable.snapshot.tensors import TensorFile, restored, write_tensors
from glassengine.program.onnx.file import read_onnx
from glassengine.program.onnx.translated import TranslatedFile, translate_file
from glassengine.program.representation.archive import MAX_BYTES
from glassengine.reading.copies import here
from glassengine.reading.documents import converted, damaged
from glassengine.reading.files import is_regular, read_bytes
from glassengine.recording.layout.tensors import bytes_of, summarize
from glassengine.results.recorded import ListedSnapshot
from glassengine.stores.places import delivered, place
from glassengine.writing import aside, crc32

_T = TypeVar("_T")


class Snapshot:
    """One execution: graph, inputs, outputs, random states. Values are read when they are asked for.

    Attributes:
        path: The directory, or the packed file.
        meta: `meta.json`, without the entries.
        inputs: In the order of the placeholders of the graph, weights and constants included.
        outputs: In the order of the results of the graph, then what a graph of torch.compile wrote to its inputs, under
            their names; None where the execution did not end, or they were not kept.
        name: Of the executable.
        kind: "inference", "forward", "backward", "engine"; "unknown" without a graph.
        reason: "every", "nonfinite" or "error".
        process: Rank.
        executable: Number of the executable in its process.
        device_index: Where it ran.
        execution: How many executions of it there went before.
        graph_hash: Of the captured graph; None where there is none.
        output_names: Of the results in the order of the graph.
        redacted: Whether it has no values.
        origin: The op that made the first value that is not finite; None where none was looked for or found.
    """

    def __init__(self, path: Path, meta: Meta, content: dict[str, Any], packed: TensorFile | None) -> None:
        self.path = path
        self.meta = {name: value for name, value in content.items() if name not in ("inputs", "outputs", "rng")}
        self._packed = packed
        self._files: dict[str, TensorFile] = {}
        self.inputs, self.outputs, self._rng = meta.inputs, meta.outputs, meta.rng
        self.name, self.kind, self.reason = meta.name, meta.kind, meta.reason
        self.process, self.executable = meta.process, meta.executable
        self.device_index, self.execution = meta.device_index, meta.execution
        self.graph_hash, self._graph_file, self._graph_crc32 = meta.graph_hash, meta.graph_file, meta.graph_crc32
        self.output_names, self.redacted = meta.output_names, meta.redacted
        origin = meta.origin
        self.origin = (
            None if origin is None else converted(origin, NonFiniteOrigin, path, what="the origin in the snapshot")
        )

    @classmethod
    def open(cls, path: str | Path) -> Snapshot:
        """Open the directory of a snapshot, or what `pack` made of one, or a directory that holds one alone.

        Raises:
            UsageError: There is nothing there, or a directory of several snapshots.
            CorruptError: It is damaged, or of a newer schema.
        """
        path = here(path)
        if is_regular(path):
            packed = None if path.suffix in (".pt", ".pth", ".npz", ".json") else TensorFile(path)
            if packed is None or layout.META not in packed.metadata:
                raise CorruptError("not a packed snapshot", got=str(path), hint="glass snapshot pack SNAPSHOT")
            return cls(path, *parsed_meta(packed.metadata[layout.META], path), packed)
        meta = path / layout.META
        if not meta.is_file():
            found = sorted(item.parent for item in path.glob(f"*/{layout.META}")) if path.is_dir() else []
            inside = [item.name for item in found if not item.name.endswith(".partial")]
            if len(inside) == 1:
                return cls.open(path / inside[0])
            raise UsageError(
                "not a snapshot",
                got=str(path),
                expected=f"one of its {len(inside)} snapshots, such as {path / inside[-1]}" if inside else None,
                hint="give the directory of one execution, or a packed file",
            )
        return cls(path, *read_meta(path), None)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of all inputs in the order of the graph's placeholders."""
        return tuple(entry.name for entry in self.inputs)

    @functools.cached_property
    def graph(self) -> ExportedProgram:
        """The graph: its placeholders take `arguments()`, its results are called `output_names`.

        Run it with `graph.graph_module(*arguments)` or an `fx.Interpreter`; nodes carry modules and source lines.

        Raises:
            UsageError: The snapshot has none; says why.
            CorruptError: It is damaged, or is not the one that belongs to the inputs.
        """
        if self.graph_hash is None:
            raise UsageError(f"the snapshot {self.path.name} has no graph", got=str(self.meta.get("graph_problem")))
        if self._graph_file == layout.ONNX_GRAPH:
            assert self.onnx is not None
            exported = self.onnx.exported
        else:
            exported = self._copied(load_graph)
        placeholders = sum(node.op == "placeholder" for node in exported.graph.nodes)
        if placeholders != len(self.inputs):
            raise CorruptError(
                f"{self._graph_file} does not belong to {layout.META}",
                got=f"{placeholders} inputs",
                expected=f"{len(self.inputs)}",
            )
        if not self.output_names:
            exported.graph.output_node().args = ((),)
            exported.graph_module.recompile()
        return exported

    @functools.cached_property
    def onnx(self) -> TranslatedFile | None:
        """The ONNX file that the graph is; None where it is none. Its weights are inputs, and have no values in it.

        Raises:
            CorruptError: It is damaged.
        """
        if self.graph_hash is None or self._graph_file != layout.ONNX_GRAPH:
            return None
        try:
            return self._copied(lambda path: translate_file(read_onnx(path, with_data=False)))
        except UsageError as error:
            raise CorruptError(f"{layout.ONNX_GRAPH} cannot be read", got=f"{error.what}: {error.got}") from error

    def _copied(self, read: Callable[[Path], _T]) -> _T:
        """Read the graph from a file of its own, whose bytes were checked."""
        with tempfile.TemporaryDirectory() as directory:
            copy = Path(directory, self._graph_file)
            copy.write_bytes(bytes_of(self._graph_bytes()))
            return read(copy)

    @functools.cached_property
    def rng_states(self) -> dict[str, Tensor]:
        """State of each device's generator before the run: uint8 tensors by device, "cpu" always among them."""
        return {device: self._values(entry) for device, entry in self._rng.items()}

    def input(self, name: str, *, device: str | torch.device = "cpu") -> Any:
        """Return an input as it was before the run: a tensor with its strides, or a plain value.

        Raises:
            UnknownNameError: There is no such input.
            UsageError: Its value was not kept.
            CorruptError: Its bytes are not what was written.
        """
        return self._value(self._entry(self.inputs, name, "input"), device)

    def output(self, name: str, *, device: str | torch.device = "cpu") -> Any:
        """Return an output; raises as `input`."""
        return self._value(self._entry(self.outputs or (), name, "output"), device)

    def arguments(self, *, device: str | torch.device = "cpu") -> list[Any]:
        """Return new values of all inputs in the order of the graph's placeholders; raises as `input`."""
        return [self._value(entry, device) for entry in self.inputs]

    def statistics(self, entry: SnapshotEntry) -> dict[str, Any] | None:
        """Return `results.Summary` of an input or output as a dict; None if not numeric."""
        if entry.statistics is not None or not entry.is_tensor or entry.file is None:
            return entry.statistics
        return summarize(self._values(entry)).to_dict()

    def to_dict(self, *, statistics: bool = False) -> dict[str, Any]:
        """Return everything but values as JSON values."""

        def described(entries: tuple[SnapshotEntry, ...]) -> list[dict[str, Any]]:
            return [
                {**entry.to_dict(), **({"statistics": self.statistics(entry)} if statistics else {})}
                for entry in entries
            ]

        outputs = None if self.outputs is None else described(self.outputs)
        rng = {device: entry.to_dict() for device, entry in self._rng.items()}
        return {**self.meta, "inputs": described(self.inputs), "outputs": outputs, "rng": rng}

    def pack(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write all of the snapshot into one file, which `open` takes as well, and return its path.

        Args:
            path: A safetensors file; see `snapshot_layout`.
            overwrite: Replace a file that is there.

        Raises:
            UsageError: The file exists, or cannot be written.
            CorruptError: Something of the snapshot cannot be read.
        """
        path = place(path)
        if path.exists() and not overwrite:
            raise UsageError("the file exists already", got=str(path), hint="replace it with --overwrite")
        stored = {}
        for entry in (*self.inputs, *(self.outputs or ()), *self._rng.values()):
            if entry.file is not None:
                stored[f"{entry.file}/{entry.key}"] = self._stored(entry)
        if self.graph_hash is not None:
            stored[self._graph_file] = self._graph_bytes()
        try:
            with delivered(path) as file, aside(file) as new:
                write_tensors(new, stored, {layout.META: sealed(self.to_dict())})
        except OSError as error:
            raise UsageError("cannot write the packed snapshot", got=f"{error.strerror or error} ({path})") from error
        return path

    def _entry(self, entries: tuple[SnapshotEntry, ...], name: str, what: str) -> SnapshotEntry:
        for entry in entries:
            if entry.name == name:
                return entry
        raise UnknownNameError(f"{what} of the snapshot", name, [entry.name for entry in entries])

    def _value(self, entry: SnapshotEntry, device: str | torch.device) -> Any:
        if entry.left_out is not None or (entry.is_tensor and entry.file is None):
            raise UsageError(
                f"the value of {entry.name!r} is not in the snapshot {self.path.name}",
                got=entry.left_out or "a redacted snapshot",
            )
        if not entry.is_tensor:
            try:
                return layout.plain_value(entry)
            except (KeyError, TypeError, ValueError) as error:
                raise damaged(f"the snapshot {self.path.name}", self.path, error) from error
        tensor = self._values(entry)
        if torch.device(device).type != "cpu":
            tensor = tensor.to(device)
        return tensor.requires_grad_(entry.requires_grad and tensor.is_floating_point())

    def _values(self, entry: SnapshotEntry) -> Tensor:
        return restored(self._stored(entry), entry.dtype, entry.shape, entry.stride)

    def _stored(self, entry: SnapshotEntry) -> Tensor:
        assert entry.file is not None and entry.key is not None
        if self._packed is not None:
            stored = self._packed.read(f"{entry.file}/{entry.key}")
        else:
            if entry.file not in self._files:
                self._files[entry.file] = TensorFile(self.path / entry.file, inside=self.path)
            stored = self._files[entry.file].read(entry.key)
        if crc32(bytes_of(stored)) != entry.crc32:
            raise CorruptError(f"the bytes of {entry.name!r} are not what was written", got=f"{self.path / entry.file}")
        return stored

    def _graph_bytes(self) -> Tensor:
        if self._packed is not None:
            return self._checked(self._packed.read(self._graph_file))
        data = read_bytes(self.path / self._graph_file, most=MAX_BYTES, inside=self.path)
        return self._checked(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0))

    def _checked(self, content: Tensor) -> Tensor:
        if self._graph_crc32 is not None and crc32(bytes_of(content)) != self._graph_crc32:
            raise CorruptError("the bytes of the graph are not what was written", got=str(self.path / self._graph_file))
        return content


def list_snapshots(directory: str | Path) -> tuple[ListedSnapshot, ...]:
    """Return every snapshot of a directory, by name; those that were never finished, and damaged ones, too.

    Raises:
        UsageError: There is none.
    """
    root = here(directory)
    try:
        found = sorted(path for path in root.iterdir() if path.is_dir())
    except OSError as error:
        raise UsageError("cannot read a directory of snapshots", got=f"{error.strerror} ({root})") from error
    listed = []
    for path in found:
        if path.name.startswith(".") and path.name.endswith(".partial"):
            listed.append(ListedSnapshot(path.name, "unfinished", num_bytes=_size(path)))
        elif (path / layout.META).exists():
            listed.append(_listed(path))
    if not listed:
        raise UsageError(
            "no snapshots", got=str(root), hint="glass run ENGINE --snapshot DIR, or glass.snapshots.take(DIR)"
        )
    return tuple(listed)


def _listed(path: Path) -> ListedSnapshot:
    try:
        snapshot = Snapshot.open(path)
    except CorruptError as error:
        return ListedSnapshot(path.name, "damaged", num_bytes=_size(path), problem=error.got)
    has = {
        "graph": snapshot.graph_hash is not None,
        "inputs": bool(snapshot.inputs),
        "outputs": snapshot.outputs is not None,
        "redacted": snapshot.redacted,
    }
    origin = snapshot.origin
    return ListedSnapshot(
        path.name,
        snapshot.reason,
        tuple(word for word, there in has.items() if there),
        None if origin is None else str(origin),
        _size(path),
    )


def _size(path: Path) -> int:
    return sum(item.stat().st_size for item in path.iterdir() if item.is_file())
