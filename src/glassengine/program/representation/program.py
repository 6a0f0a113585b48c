"""`Program`: one exported graph, its table of sites, and the names of its inputs and outputs.

Invariants: the graph is functional (`run_decompositions({})`, `linear` and `scaled_dot_product_attention` whole), free
of marks, and never exported twice: an engine is always judged with the program stored beside it.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from glassengine.errors import CorruptError, UsageError
from glassengine.program.kinds.causal_lm import KVLayout
from glassengine.program.kinds.states import State
from glassengine.program.onnx.exported import TranslatedFile, translate_file, without_data
from glassengine.program.onnx.stored.file import OnnxFile, read_onnx
from glassengine.program.store.archive import inert_archive, load_archive
from glassengine.program.user_code.raised import RAISED
from glassengine.program.user_code.tracing import fast_reading, without_collections
from glassengine.reading.documents import Size, converted, damaged, read_document
from glassengine.sites import HasSites, Site, SiteTable

SCHEMA_VERSION = 1
GRAPH_LEVEL = "run_decompositions({})"
_NAMES_FILE = "program.json"
_MAX_NAMES_BYTES = 256 << 20
_MAX_NAMES_ITEMS = 8_000_000
ONNX_GRAPH = "program.onnx"
"""File of an engine, in place of `program.pt2`, where MODEL was an ONNX file."""
CALLED_AS = "called_as"
"""Key of the metadata, for models that call one module by several names."""
FIXED_INPUTS = "fixed_inputs"
"""Key of the metadata: non-tensor arguments of a plain module that became part of the graph."""
SMALLEST = "smallest"
"""Key of the metadata: dynamic size of a plain module -> the size below the exporter's bound that was tried."""


@dataclass(frozen=True)
class Port:
    """One input of a program: name, dtype, shape (ints, or names of dynamic sizes), and the placeholder behind it."""

    name: str
    node: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class OnnxGraph:
    """The ONNX graph that a program is: its file, and the name in it of each node's value."""

    file: OnnxFile
    values: Mapping[str, str]


@dataclass
class Program(HasSites):
    """An exported, functional, named program.

    Attributes:
        exported: The `ExportedProgram`; cache updates are in its signature as input mutations.
        sites: Names of its tensors.
        kind: "causal_lm" (the inputs of `causal_lm.CausalLM`) or "module".
        inputs: User inputs in order.
        output_nodes: Name of each result -> node: user outputs, then `present_*` caches, then added outputs.
        caches: `past_*` input -> `present_*` output.
        layout: Cache layout of a causal LM.
        metadata: dtype, model name, class, parameter fingerprint and the like; JSON values.
        onnx: Where MODEL is an ONNX file, the graph that is built; `exported` is what its values are judged with.
    """

    exported: ExportedProgram
    sites: SiteTable
    kind: str
    inputs: tuple[Port, ...]
    output_nodes: dict[str, str]
    caches: dict[str, str]
    layout: KVLayout | None
    metadata: dict[str, Any] = field(default_factory=dict)
    onnx: OnnxGraph | None = None

    @property
    def generates(self) -> bool:
        """Whether it is that of the steps of a model that generates: caches in, logits and caches out."""
        return self.kind == "causal_lm"

    @property
    def called_as(self) -> dict[str, str]:
        """Name by which hooks know a call -> name here; only for modules with several aliases (see `hooks`)."""
        return dict(self.metadata.get(CALLED_AS, {}))

    @property
    def graph(self) -> torch.fx.Graph:
        """The functional graph."""
        graph: torch.fx.Graph = self.exported.graph
        return graph

    def node(self, name: str) -> torch.fx.Node:
        """Return the node called `name`."""
        found: torch.fx.Node = next(node for node in self.graph.nodes if node.name == name)
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Return parameters, buffers and lifted constants by placeholder name."""
        table: dict[str, torch.Tensor] = {}
        for spec in self.exported.graph_signature.input_specs:
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                assert spec.target is not None
                store = self.exported.state_dict
                value = store[spec.target] if spec.target in store else self.exported.constants[spec.target]
                table[spec.arg.name] = value
        return table

    def weight_names(self) -> dict[str, str]:
        """Return placeholder name -> qualified name, for parameters, buffers and lifted constants."""
        return {
            spec.arg.name: spec.target
            for spec in self.exported.graph_signature.input_specs
            if spec.target is not None and spec.kind is not InputKind.USER_INPUT
        }

    def replace(self, exported: ExportedProgram, *, outputs: Mapping[str, str] | None = None) -> Program:
        """Return this program around another exported graph (same names), optionally with more outputs."""
        table = {**self.output_nodes, **(outputs or {})}
        return replace(self, exported=exported, output_nodes=table)


def copied_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Return a copy in which every node has the name it has in `graph`.

    A plain copy renames nodes that are called like a builtin of Python ("input" becomes "input_1"), and with them what
    the signature, the sites and the aliases refer to.
    """
    copied = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, copied.nodes, strict=True):
        if new.name != old.name:
            new.name = old.name
            copied._graph_namespace._used_names.add(old.name)
    return copied


def rebuilt(
    exported: ExportedProgram, graph: torch.fx.Graph, output_specs: Sequence[Any], *, out_spec: Any | None = None
) -> ExportedProgram:
    """Return an `ExportedProgram` with another graph and other outputs; weights are shared, not copied."""
    signature = copy.copy(exported.graph_signature)
    signature.output_specs = list(output_specs)
    root = torch.fx.GraphModule(exported.graph_module, graph)
    calls = copy.copy(exported.module_call_graph)
    if calls and calls[0].signature is not None:
        calls[0] = copy.copy(calls[0])
        calls[0].signature = called = copy.copy(calls[0].signature)
        assert called is not None
        called.outputs = [s.arg for s in output_specs if s.kind is OutputKind.USER_OUTPUT]
        called.out_spec = called.out_spec if out_spec is None else out_spec
    return ExportedProgram(
        root=root,
        graph=graph,
        graph_signature=signature,
        state_dict=exported.state_dict,
        range_constraints=exported.range_constraints,
        module_call_graph=calls,
        example_inputs=exported.example_inputs,
        constants=exported.constants,
        verifiers=exported.verifiers,
    )


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
    with without_collections():
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


class _Port(msgspec.Struct):
    name: str
    node: str
    dtype: str
    shape: tuple[Size | str, ...]


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
    inputs: tuple[_Port, ...]
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
    told: dict[str, Any] = {"what": path.name, "version": SCHEMA_VERSION, "nonfinite": True}
    names = read_document(path, _Names, most=_MAX_NAMES_BYTES, inside=directory, items=_MAX_NAMES_ITEMS, **told)
    converted(names.metadata, _Metadata, path, what=f"the metadata of {path.name}")
    try:
        sites = SiteTable(Site(**msgspec.structs.asdict(site)) for site in names.sites)
    except UsageError as error:
        raise damaged(path.name, path, f"{error.what}: {error.got}") from error
    states = tuple(State(*state) for state in names.states)
    return {
        "kind": names.kind,
        "inputs": tuple(Port(port.name, port.node, port.dtype, port.shape) for port in names.inputs),
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
    return Program(
        exported,
        data["sites"],
        data["kind"],
        data["inputs"],
        data["output_nodes"],
        data["caches"],
        data["layout"],
        data["metadata"],
        graph,
    )
