"""`Program`: one exported graph, its table of sites, and the names of its inputs and outputs.

Invariants: the graph is functional (`run_decompositions({})`, `linear` and `scaled_dot_product_attention` whole), free
of marks, and never exported twice: an engine is always judged with the program stored beside it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from glassengine.program.kinds.causal_lm import KVLayout
from glassengine.program.onnx.file import OnnxFile
from glassengine.program.user_code.module_state import STATE
from glassengine.reading.documents import Size
from glassengine.sites import HasSites, SiteTable

_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
GRAPH_LEVEL = "run_decompositions({})"
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
    shape: tuple[Size | str, ...]


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

    @cached_property
    def nodes(self) -> dict[str, torch.fx.Node]:
        """The nodes of the graph by name."""
        return {node.name: node for node in self.graph.nodes}

    def node(self, name: str) -> torch.fx.Node:
        """Return the node called `name`."""
        return self.nodes[name]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return parameters, buffers and lifted constants by placeholder name."""
        values = {**self.exported.constants, **self.exported.state_dict}
        return {node: values[name] for node, name in self.weight_names().items()}

    def weight_names(self) -> dict[str, str]:
        """Return placeholder name -> qualified name, for parameters, buffers and lifted constants."""
        return weight_names(self.exported)

    def interpreted(self, by: torch.fx.Interpreter, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the results of one step, by node, that an interpreter of the graph makes of inputs, by name."""
        values = {port.node: inputs[port.name] for port in self.inputs} | self.weights()
        given = [values.get(node.name) for node in self.graph.find_nodes(op="placeholder")]
        specs = self.exported.graph_signature.output_specs
        with torch.no_grad():
            results = by.run(*given, enable_io_processing=False)
        return {spec.arg.name: value for spec, value in zip(specs, results, strict=True)}

    def symbols(self) -> dict[str, str]:
        """Return dynamic size ("s27") -> its name among the inputs ("batch")."""
        table: dict[str, str] = {}
        for port in self.inputs:
            sizes = self.node(port.node).meta["val"].shape
            table |= {str(size): text for size, text in zip(sizes, port.shape, strict=True) if isinstance(text, str)}
        return table

    def kept(self) -> frozenset[str]:
        """Return the placeholders that hold what the step before left: caches, and buffers that a forward writes."""
        written = {name.removeprefix(STATE) for name in self.output_nodes if name.startswith(STATE)}
        buffers = {node for node, name in self.weight_names().items() if name in written}
        return frozenset(buffers | {port.node for port in self.inputs if port.name in self.caches})

    def replace(self, exported: ExportedProgram, *, outputs: Mapping[str, str] | None = None) -> Program:
        """Return this program around another exported graph (same names), optionally with more outputs."""
        table = {**self.output_nodes, **(outputs or {})}
        return replace(self, exported=exported, output_nodes=table)


def weight_names(exported: ExportedProgram) -> dict[str, str]:
    """Return placeholder name -> qualified name, for parameters, buffers and lifted constants."""
    specs = exported.graph_signature.input_specs
    return {spec.arg.name: spec.target for spec in specs if spec.kind in _WEIGHTS and spec.target is not None}


def keep_name(node: torch.fx.Node, name: str) -> None:
    """Name a new node, also like a builtin of Python, which a graph would rename ("input" becomes "input_1")."""
    if node.name != name:
        node.name = name
        node.graph._graph_namespace._used_names.add(name)


def copied_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    """Return a copy in which every node has the name it has in `graph`.

    A plain copy renames nodes that are called like a builtin of Python ("input" becomes "input_1"), and with them what
    the signature, the sites and the aliases refer to.
    """
    # torch warns of its own specs of trees when these are copied.
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        copied = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, copied.nodes, strict=True):
        keep_name(new, old.name)
    return copied


def rebuilt(
    exported: ExportedProgram,
    graph: torch.fx.Graph,
    output_specs: Sequence[Any],
    *,
    input_specs: Sequence[Any] | None = None,
    in_spec: Any | None = None,
    out_spec: Any | None = None,
    stored: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
    **changed: Any,
) -> ExportedProgram:
    """Return an `ExportedProgram` with another graph and other outputs; weights are shared, not copied.

    Args:
        exported: What stays as it is.
        graph: The new graph.
        output_specs: Of its results.
        input_specs: Of its placeholders; None takes the old ones.
        in_spec: Nesting of the inputs; None takes the old one.
        out_spec: Nesting of the results; None takes the old one.
        stored: Old weights, or constants, by name -> the new ones.
        changed: Other arguments of `ExportedProgram`.
    """
    signature = copy.copy(exported.graph_signature)
    signature.output_specs = list(output_specs)
    signature.input_specs = list(signature.input_specs if input_specs is None else input_specs)
    calls = copy.copy(exported.module_call_graph)
    if calls and calls[0].signature is not None:
        calls[0] = copy.copy(calls[0])
        calls[0].signature = called = copy.copy(calls[0].signature)
        assert called is not None
        called.outputs = [s.arg for s in output_specs if s.kind is OutputKind.USER_OUTPUT]
        called.out_spec = called.out_spec if out_spec is None else out_spec
        if in_spec is not None:
            called.in_spec = in_spec
            called.forward_arg_names = None  # the specification has the names of the inputs
            called.inputs = [s.arg for s in signature.input_specs if s.kind is InputKind.USER_INPUT]
    parts = {
        "range_constraints": exported.range_constraints,
        "module_call_graph": calls,
        "example_inputs": exported.example_inputs,
        "verifiers": exported.verifiers,
    }
    return ExportedProgram(
        root=torch.fx.GraphModule(exported.graph_module, graph),
        graph=graph,
        graph_signature=signature,
        state_dict=stored(exported.state_dict),
        constants=stored(exported.constants),
        **{**parts, **changed},
    )


def without_dead_weights(exported: ExportedProgram, among: Collection[str] | None = None) -> ExportedProgram:
    """Return the program without parameters, buffers and constants that nothing reads; `among` limits their names."""
    placeholders = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    names = weight_names(exported)
    dead = {one for one in names if not placeholders[one].users and (among is None or names[one] in among)}
    for name in dead:
        exported.graph.erase_node(placeholders[name])
    kept = [spec for spec in exported.graph_signature.input_specs if spec.arg.name not in dead]
    targets = {spec.target for spec in kept}
    # Readers wonder about ranges of sizes that no tensor of the graph has.
    symbols = {
        symbol
        for node in exported.graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor)
        for size in value.shape
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols  # type: ignore[attr-defined]
    }
    return rebuilt(
        exported,
        exported.graph,
        exported.graph_signature.output_specs,
        input_specs=kept,
        stored=lambda table: {name: value for name, value in table.items() if name in targets},
        range_constraints={name: found for name, found in exported.range_constraints.items() if name in symbols},
    )
