"""`Program`: one exported graph, its table of sites, and the names of its inputs and outputs.

Invariants: the graph is functional (`run_decompositions({})`, `linear` and `scaled_dot_product_attention` whole), free
of marks, and never exported twice: an engine is always judged with the program stored beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from glassengine.program.kinds.causal_lm import KVLayout
from glassengine.program.onnx.stored.file import OnnxFile
from glassengine.program.user_code.module_state import STATE
from glassengine.sites import HasSites, SiteTable

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

    def kept(self) -> frozenset[str]:
        """Return the placeholders that hold what the step before left: caches, and buffers that a forward writes."""
        written = {name.removeprefix(STATE) for name in self.output_nodes if name.startswith(STATE)}
        buffers = {node for node, name in self.weight_names().items() if name in written}
        return frozenset(buffers | {port.node for port in self.inputs if port.name in self.caches})

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
