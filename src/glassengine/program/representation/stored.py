"""A program on disk: its graph, its names, and what an ONNX file says of itself."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch.export import ExportedProgram

from glassengine.errors import CorruptError, UsageError
from glassengine.program.kinds.causal_lm import KVLayout, State
from glassengine.program.onnx.file import read_onnx
from glassengine.program.onnx.translated import TranslatedFile, translate_file, without_data
from glassengine.program.representation.archive import inert_archive, load_archive
from glassengine.program.representation.program import GRAPH_LEVEL, OnnxGraph, Port, Program
from glassengine.program.user_code.calls import RAISED
from glassengine.program.user_code.tracing import fast_reading, fast_writing
from glassengine.reading.documents import Size, converted, damaged, read_document
from glassengine.sites import Site, SiteTable

SCHEMA_VERSION = 1
_NAMES_FILE = "program.json"
_MAX_NAMES_BYTES = 256 << 20
_MAX_NAMES_ITEMS = 8_000_000
ONNX_GRAPH = "program.onnx"
"""File of an engine, in place of `program.pt2`, where MODEL was an ONNX file."""


_written: WeakKeyDictionary[ExportedProgram, tuple[str, bytes]] = WeakKeyDictionary()
"""What was written of graphs that are in use: the two engines of a check hold one graph in three places.

Beside the bytes is what the graph was like, since a pass may change it in place.
"""


def save_program(program: Program, directory: Path) -> None:
    """Write `program.pt2` or `program.onnx` (graph only, no weights) and `program.json` (names) into `directory`."""
    if program.onnx is not None:
        specs = program.exported.graph_signature.output_specs
        bare = without_data(program.onnx.file, [program.onnx.values[spec.arg.name] for spec in specs])
        (directory / ONNX_GRAPH).write_bytes(bare.SerializeToString())
    else:
        _save_graph(program, directory)
    _save_names(program, directory)


def _save_graph(program: Program, directory: Path) -> None:
    path = directory / "program.pt2"
    exported = program.exported
    like = f"{exported.graph}{exported.graph_signature}{exported.range_constraints}"
    if (earlier := _written.get(exported)) is not None and earlier[0] == like:
        path.write_bytes(earlier[1])
        return
    bare = copy.copy(program.exported)
    bare._state_dict = {name: _without_data(value) for name, value in program.exported.state_dict.items()}
    bare._constants = {name: _without_data(value) for name, value in program.exported.constants.items()}
    bare._guards_code = []  # code, which a reader would have to trust; inputs are checked by the engine
    # torch would end the process where its own writes fail.
    buffer = io.BytesIO()
    with fast_writing():
        torch.export.save(bare, buffer)
    path.write_bytes(buffer.getvalue())
    _written[exported] = like, buffer.getvalue()


def _save_names(program: Program, directory: Path) -> None:
    data = {
        "schema_version": SCHEMA_VERSION,
        "graph_level": GRAPH_LEVEL,
        "kind": program.kind,
        "inputs": [vars(port) for port in program.inputs],
        "output_nodes": program.output_nodes,
        "caches": program.caches,
        "layout": program.layout and [list(layer) for layer in program.layout.layers],
        "states": [[state.name, state.dtype, list(state.shape)] for state in program.layout.states]
        if program.layout
        else [],
        "metadata": program.metadata,
        "sites": [site.to_dict() for site in program.sites],
    }
    (directory / _NAMES_FILE).write_text(json.dumps(data, indent=1))


def _without_data(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    bare = value.detach().to("meta")
    is_parameter = isinstance(value, torch.nn.Parameter)
    return torch.nn.Parameter(bare, requires_grad=value.requires_grad) if is_parameter else bare


class _Site(msgspec.Struct):
    name: str
    kind: Literal["op", "module", "tap", "kv"]
    node: str
    op: str
    dtype: str
    shape: tuple[Size | str, ...]
    axes: dict[str, Size]
    source: str | None
    fingerprint: str
    aliases: tuple[str, ...] = ()


class _Metadata(msgspec.Struct):
    """Those that are used."""

    dtype: str | None = None
    model: str | None = None
    called_as: dict[str, str] = {}
    fixed_inputs: dict[str, Any] = {}
    smallest: dict[str, int] = {}
    vocab_size: Size | None = None
    max_position_embeddings: Size | None = None


class _Names(msgspec.Struct):
    """The content of `program.json`."""

    schema_version: int
    kind: Literal["causal_lm", "module"]
    inputs: tuple[Port, ...]
    output_nodes: dict[str, str]
    caches: dict[str, str]
    layout: tuple[tuple[Size, Size, Size], ...] | None
    metadata: dict[str, Any]
    sites: tuple[_Site, ...]
    states: tuple[tuple[str, str, tuple[Size, ...]], ...] = ()


def load_names(directory: Path) -> dict[str, Any]:
    """Return the content of `program.json` as objects (`SiteTable`, `Port`, `KVLayout`); needs no weights and no graph.

    Raises:
        CorruptError: The file is missing, damaged or of a newer schema.
    """
    path = directory / _NAMES_FILE
    # Arguments that were built in may be infinite.
    limits: dict[str, Any] = {"what": path.name, "version": SCHEMA_VERSION, "nonfinite": True}
    names = read_document(path, _Names, most=_MAX_NAMES_BYTES, inside=directory, items=_MAX_NAMES_ITEMS, **limits)
    converted(names.metadata, _Metadata, path, what=f"the metadata of {path.name}")
    try:
        sites = SiteTable(Site(**msgspec.structs.asdict(site)) for site in names.sites)
    except UsageError as error:
        raise damaged(path.name, path, f"{error.what}: {error.got}") from error
    states = tuple(State(*state) for state in names.states)
    return {
        "kind": names.kind,
        "inputs": names.inputs,
        "output_nodes": names.output_nodes,
        "caches": names.caches,
        "layout": KVLayout(names.layout, states) if names.layout else None,
        "metadata": names.metadata,
        "sites": sites,
    }


def load_graph(directory: Path) -> ExportedProgram:
    """Return the graph that `save_program` wrote, its weights on the meta device. Reading it runs no code.

    Raises:
        CorruptError: The file is missing, damaged, or holds more than `save_program` writes.
    """
    if (directory / ONNX_GRAPH).is_file():
        return _stored_onnx(directory).exported
    path = directory / "program.pt2"
    archive = inert_archive(path)
    try:
        with fast_reading():
            return load_archive(archive)
    except Exception as error:
        raise CorruptError(f"{path.name} cannot be read", got=f"{type(error).__name__}: {error}") from error


def _stored_onnx(directory: Path) -> TranslatedFile:
    try:
        return translate_file(read_onnx(directory / ONNX_GRAPH, with_data=False))
    except UsageError as error:
        raise CorruptError(f"{ONNX_GRAPH} cannot be read", got=f"{error.what}: {error.got}") from error
    except RAISED as error:
        raise damaged(ONNX_GRAPH, directory, f"{type(error).__name__}: {error}") from error


def load_program(directory: Path, weights: Mapping[str, torch.Tensor]) -> Program:
    """Load what `save_program` wrote and fill in `weights` (qualified name -> tensor, shared, not copied).

    Raises:
        CorruptError: A file is damaged, or a weight is missing or has another shape or dtype.
    """
    data = load_names(directory)
    stored = _stored_onnx(directory) if (directory / ONNX_GRAPH).is_file() else None
    exported = load_graph(directory) if stored is None else stored.exported
    for store in (exported.state_dict, exported.constants):
        for name, placeholder in store.items():
            if not isinstance(placeholder, torch.Tensor):
                continue
            value = weights.get(name)
            if value is None or value.shape != placeholder.shape or value.dtype != placeholder.dtype:
                raise CorruptError(
                    f"weight {name!r} does not fit the stored program",
                    got="nothing" if value is None else f"{value.dtype} {tuple(value.shape)}",
                    expected=f"{placeholder.dtype} {tuple(placeholder.shape)}",
                )
            # torch refuses to save a program whose parameters are not `Parameter`.
            is_parameter = isinstance(placeholder, torch.nn.Parameter)
            store[name] = torch.nn.Parameter(value, requires_grad=False) if is_parameter else value
    graph = None
    if stored is not None:
        file = replace(stored.file, held=dict(exported.state_dict))
        graph = OnnxGraph(file, {node.name: name for name, node in stored.values.items()})
    known = {node.name for node in exported.graph.nodes}
    named = {site.node for site in data["sites"]} | {port.node for port in data["inputs"]}
    if unknown := (named | set(data["output_nodes"].values())) - known:
        raise CorruptError(
            f"program.json does not belong to {'program.pt2' if stored is None else ONNX_GRAPH}",
            got=f"names of other nodes: {', '.join(sorted(unknown)[:5])}",
        )
    return Program(exported, onnx=graph, **data)
