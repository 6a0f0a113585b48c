"""Stages of a program on its way to a back-end, listed: one record per node, and the text of `graph.txt`.

A listing is all that is needed to read, compare and print a graph; it holds names and numbers, no weights and no code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from glassengine.program.representation.naming import describe_shape, fingerprints, source_line
from glassengine.program.representation.program import Program, weight_names
from glassengine.program.user_code.tracing import MARK
from glassengine.reading.documents import read_document

SCHEMA_VERSION = 1
MAX_BYTES = 256 << 20
_MAX_ITEMS = 16_000_000


@dataclass(frozen=True)
class Stage:
    """One form of a program.

    Attributes:
        name: "exported", "functional", "pass-<function>" or "outputs".
        exported: The graph and its weights.
        inputs: Placeholder -> name of the input.
        outputs: Name of each result of the graph, in order.
        sites: Node -> its sites, op site first.
        symbols: Dynamic size ("s27") -> readable name ("batch").
    """

    name: str
    exported: ExportedProgram
    inputs: Mapping[str, str]
    outputs: Sequence[str]
    sites: Mapping[str, Sequence[str]]
    symbols: Mapping[str, str]


OnStage = Callable[[Stage], None]


@dataclass(frozen=True)
class NodeLine:
    """One node of a listing.

    Attributes:
        name: FX node name, as `--add-output` takes it.
        op: "placeholder", "get_attr", "call_function" or "output".
        target: What is called, e.g. "aten.linear.default"; of a placeholder the name of the weight or input.
        args: Its arguments as text, nodes written `%name`.
        inputs: The nodes among them, in order.
        literals: `args` with every node written `%`.
        dtype: torch dtype name of the result, or its type if it is not a tensor.
        shape: Its sizes as text, "[batch, sequence, 64]"; empty if it is not a tensor.
        sites: Its sites; for a graph without sites the path of its module.
        source: "file:line: code", or None.
        fingerprint: Structural hash; equal where the value is computed the same way.
    """

    name: str
    op: str
    target: str
    args: str
    inputs: tuple[str, ...]
    literals: str
    dtype: str
    shape: str
    sites: tuple[str, ...]
    source: str | None
    fingerprint: str

    def __str__(self) -> str:
        where = f"  # {' = '.join(self.sites)}" if self.sites else ""
        return f"{self.name}: {self.dtype}{self.shape} = {self.op} {self.target}({self.args}){where}"


def stage_of(program: Program, name: str) -> Stage:
    """Return `program` as a stage."""
    names: dict[str, list[str]] = {}
    for output, node in program.output_nodes.items():
        names.setdefault(node, []).append(output)
    specs = program.exported.graph_signature.output_specs
    outputs = [names[spec.arg.name].pop(0) if names.get(spec.arg.name) else spec.arg.name for spec in specs]
    # What a value goes into can be read from the graph; dozens of modules may take the same one.
    sites = {
        node: [site.name for site in found if site.kind == "op" or ":in" not in site.name]
        for node, found in program.sites.by_node.items()
    }
    inputs = {port.node: port.name for port in program.inputs}
    return Stage(name, program.exported, inputs, outputs, sites, program.symbols())


def shown_nodes(graph: torch.fx.Graph) -> list[Node]:
    """Return the nodes of a graph without the marks that name tensors while a model is traced."""
    return [node for node in graph.nodes if node.target is not MARK]


def list_nodes(stage: Stage) -> list[NodeLine]:
    """Return the listing of a stage, in graph order."""
    graph = stage.exported.graph
    names = weight_names(stage.exported) | dict(stage.inputs)
    prints = fingerprints(graph, names)
    lines = []
    for node in shown_nodes(graph):
        dtype, shape = _describe(node.meta.get("val"), stage.symbols)
        args = ", ".join([*map(_text, node.args), *(f"{key}={_text(value)}" for key, value in node.kwargs.items())])
        inputs = tuple(re.findall(r"%(\w+)", args)) if node.all_input_nodes else ()
        lines.append(
            NodeLine(
                name=node.name,
                op=node.op,
                target=names.get(node.name, str(node.target)) if node.op == "placeholder" else str(node.target),
                args=args,
                inputs=inputs,
                literals=re.sub(r"%\w+", "%", args),
                dtype=dtype,
                shape=shape,
                sites=tuple(stage.sites.get(node.name) or _module_path(node, stage)),
                source=source_line(node),
                fingerprint=prints[node],
            )
        )
    return lines


def graph_text(lines: Iterable[NodeLine]) -> str:
    """Return the content of `graph.txt`: one line per node."""
    return "".join(f"{line}\n" for line in lines)


def graph_json(lines: Iterable[NodeLine]) -> str:
    """Return the content of `graph.json`: the listing for programs."""
    nodes = ",\n".join(json.dumps(asdict(line)) for line in lines)
    return f'{{"schema_version": {SCHEMA_VERSION}, "nodes": [\n{nodes}\n]}}\n'


class _Listing(msgspec.Struct):
    nodes: list[NodeLine]


def read_listing(path: Path, *, inside: Path | None = None) -> list[NodeLine]:
    """Return the listing stored in a `graph.json`.

    Args:
        path: The file.
        inside: The directory of the artifacts that it belongs to; None is its own.

    Raises:
        CorruptError: The file is missing, damaged, too large, or of a newer schema.
    """
    limits: dict[str, Any] = {"what": "the listing of a graph", "version": SCHEMA_VERSION, "items": _MAX_ITEMS}
    return read_document(path, _Listing, most=MAX_BYTES, inside=inside or path.parent, **limits).nodes


def _text(value: Any) -> str:
    """Return one argument as text; the same in every process."""
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return repr(value).replace("%", "\\x25")  # a percent sign is the mark of a node
    return str(value)


def _describe(value: Any, symbols: Mapping[str, str]) -> tuple[str, str]:
    if isinstance(value, torch.Tensor):
        shape, _ = describe_shape(value, symbols)
        return str(value.dtype).removeprefix("torch."), f"[{', '.join(map(str, shape))}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(''.join(_describe(item, symbols)) for item in value)})", ""
    kinds = ((torch.SymInt, "int"), (torch.SymFloat, "float"), (torch.SymBool, "bool"))
    return next((text for kind, text in kinds if isinstance(value, kind)), type(value).__name__), ""


def _module_path(node: Node, stage: Stage) -> list[str]:
    stack = node.meta.get("nn_module_stack")
    path = str(list(stack.values())[-1][0]) if stack and not stage.sites else ""
    return [path] if path else []
