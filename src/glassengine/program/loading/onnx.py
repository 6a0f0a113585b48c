"""An ONNX file as a `Program`: the ONNX graph is the program, its values are the sites, and its names are kept.

The graph of `torch.fx` beside it (see `translate`) is what the values are judged with; what a back-end builds is the
ONNX graph itself, with debug outputs added to it under their own names.
"""

from __future__ import annotations

import ast
import hashlib
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from glassengine.program.onnx.stored.file import OnnxFile
from glassengine.program.onnx.stored.session import OnnxModel
from glassengine.program.onnx.stored.types import UNKNOWN_SIZE, ValueType
from glassengine.program.onnx.translated import TranslatedFile, metadata_of, translate_file
from glassengine.program.representation.naming import source_line
from glassengine.program.representation.program import OnnxGraph, Port, Program
from glassengine.sites import Site, SiteTable, op_site

if TYPE_CHECKING:
    import onnx

logger = logging.getLogger("glassengine")

NAME_SCOPES = "pkg.torch.onnx.name_scopes"
"""Key of a node's metadata, as PyTorch's exporter writes it."""


def onnx_program(file: OnnxFile, *, metadata: dict[str, Any] | None = None) -> Program:
    """Return the program of an ONNX file.

    Raises:
        UsageError: The graph is not valid, or takes or returns something that is not a tensor.
    """
    found = translate_file(file)
    ports = []
    for name in found.inputs:
        kind = found.types[name]
        ports.append(Port(name, found.values[name].name, _dtype_name(kind), kind.shape or ()))
    return Program(
        found.exported,
        _sites(file.path.name, found),
        "module",
        tuple(ports),
        {name: node.name for name, node in found.results.items()},
        {},
        None,
        dict(metadata or {}),
        OnnxGraph(file, {node.name: name for name, node in found.values.items()}),
    )


def onnx_model(file: OnnxFile, program: Program) -> OnnxModel:
    """Return the file as a module whose taps are the sites of its program."""
    observed = [site.name for site in program.sites if site.kind == "op"]
    return OnnxModel(file, observed, [port.name for port in program.inputs])


def _sites(file: str, found: TranslatedFile) -> SiteTable:
    """Return the sites: inputs, then every value that is a tensor of a known type, results under two names."""
    prints: dict[str, str] = {name: _hash(f"input {name}") for name in found.values}
    value_of = {node: name for name, node in found.values.items()}
    node_names = Counter(proto.name for _, proto in found.protos.values())
    occurrences: Counter[tuple[str, str]] = Counter()
    returned = set(found.results.values())
    sites = []
    for name in found.inputs:
        sites.append(_site(f".:in.{name}", "module", found.values[name], "input", found.types[name], prints[name]))
    num_unknown = 0
    for node, (index, proto) in found.protos.items():
        name = value_of[node]
        prints[name] = _fingerprint(proto, list(proto.output).index(name), prints)
        kind = found.types.get(name)
        if kind is None or kind.dtype is None:
            num_unknown += 1
            continue
        aliases = [node.name] if node.name != name else []
        if proto.name and node_names[proto.name] == 1 and proto.name != name:
            aliases.append(proto.name)
        scope = _scope(proto)
        if scope is not None:
            aliases.append(op_site(scope, proto.op_type, occurrences[scope, proto.op_type]))
            occurrences[scope, proto.op_type] += 1
        source = source_line(node) or _in_file(file, index, proto)
        sites.append(_site(name, "op", node, proto.op_type, kind, prints[name], source, tuple(aliases)))
        if node in returned:
            sites.append(_site(f".:out.{name}", "module", node, proto.op_type, kind, prints[name], source))
    if num_unknown:
        logger.warning("%d values of %s are not tensors of a known type, and have no sites", num_unknown, file)
    return SiteTable(sites)


def _site(
    name: str,
    kind: str,
    node: Node,
    op: str,
    value: ValueType,
    fingerprint: str,
    source: str | None = None,
    aliases: tuple[str, ...] = (),
) -> Site:
    shape = value.shape if value.shape is not None else (UNKNOWN_SIZE,)
    return Site(name, kind, node.name, op, _dtype_name(value), shape, {}, source, fingerprint, aliases)


def _dtype_name(kind: ValueType) -> str:
    return str(kind.dtype).removeprefix("torch.")


def _in_file(file: str, index: int, proto: onnx.NodeProto) -> str:
    """Return a line as of source code: the file, the number of the node, and the node."""
    call = f"{proto.op_type}({', '.join(proto.input)})"
    return f"{file}:{index}: {proto.name} = {call}" if proto.name else f"{file}:{index}: {call}"


def _fingerprint(proto: onnx.NodeProto, index: int, prints: dict[str, str]) -> str:
    attributes = sorted((entry.name, entry.SerializeToString(deterministic=True)) for entry in proto.attribute)
    read = [prints.get(name, name) for name in proto.input]
    return _hash(repr((proto.domain, proto.op_type, index, attributes, read)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _scope(proto: onnx.NodeProto) -> str | None:
    """Return the module path that PyTorch's exporter noted, whose last part is the op."""
    text = metadata_of(proto, NAME_SCOPES)
    try:
        scopes = ast.literal_eval(text) if text else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    if not isinstance(scopes, list) or len(scopes) < 2 or not all(isinstance(part, str) for part in scopes):
        return None
    return scopes[-2] or "."
