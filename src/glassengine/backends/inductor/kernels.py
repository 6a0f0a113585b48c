"""The kernels and library calls of a compiled package, as a network.

Inductor writes beside its code from which nodes of the program each kernel came. Inputs and outputs of a kernel are not
in that table: they are read off the program, as the values that enter and leave the set of its nodes.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

from glassengine.backends.inductor.grouped_queries import node_of
from glassengine.backends.protocol.backend import Layer, Network, NetworkTensor
from glassengine.errors import BackendError, CorruptError
from glassengine.program.listing.listing import list_nodes, stage_of
from glassengine.program.representation.program import Program
from glassengine.reading.documents import parsed
from glassengine.reading.files import open_regular

_TABLE = "kernel_information.json"
_MAX_TEXT_BYTES = 256 << 20
_OF_THIS_MACHINE = re.compile(r"^// .*\.(wrapper|kernel)\.(cpp|o)\b.*\n", re.MULTILINE)
_NOTE = (
    "Kernels and library calls in the order of the generated code (inductor_wrapper.cpp, inductor_kernel.cpp). Inputs "
    "and outputs are what enters and leaves the nodes of a kernel; one that recomputes a node names it again."
)


def list_kernels(program: Program, package: Path) -> Network:
    """Return the network of a compiled package.

    Raises:
        BackendError: The package does not tell where its kernels came from.
    """
    table, sources = _read(package)
    if table is None:
        raise BackendError("Inductor did not say which nodes its kernels came from", got=f"no {_TABLE} in the package")
    lines = {line.name: line for line in list_nodes(stage_of(program, ""))}
    graph_nodes = {node.name: node for node in program.graph.nodes}
    order = {name: index for index, name in enumerate(graph_nodes)}
    layers: list[Layer] = []
    given: set[str] = set()
    for name, entry in table.items():
        nodes = tuple(sorted({node for node in _nodes(entry) if node in order}, key=order.__getitem__))
        inside = set(nodes)
        entering = {source for node in nodes for source in lines[node].inputs if source not in inside}
        leaving = [n for n in nodes if n not in given and not {user.name for user in graph_nodes[n].users} <= inside]
        given.update(leaving)
        layers.append(
            Layer(
                name=name,
                operation=name.partition(":")[0],
                nodes=nodes,
                inputs=tuple(sorted(entering, key=order.__getitem__)),
                outputs=tuple(NetworkTensor(node, lines[node].dtype, lines[node].shape) for node in leaving),
            )
        )
    in_layers = {node for layer in layers for node in layer.nodes}
    others = [node for node in program.graph.nodes if node.op == "call_function" and node.name not in in_layers]
    rest = [node.name for node in others if lines[node.name].dtype not in ("NoneType", "int")]
    note = _NOTE + (f" Nodes that Inductor attributes to no kernel: {', '.join(rest)}." if rest else "")
    inputs = tuple(NetworkTensor(port.node, port.dtype, lines[port.node].shape) for port in program.inputs)
    results = tuple(dict.fromkeys(program.output_nodes.values()))
    return Network(tuple(layers), inputs, results, note, sources)


def kernel_nodes(package: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Return (name of a kernel's span, nodes of the program that it computes) in the order of execution.

    A package has such spans where it was built with TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE=1.
    """
    table, _ = _read(package)
    return [(name.partition(":")[0], _nodes(entry)) for name, entry in (table or {}).items()]


def _nodes(entry: Mapping[str, list[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(node_of, entry["pre_grad_nodes"])))


def _read(package: Path) -> tuple[Mapping[str, Mapping[str, list[str]]] | None, dict[str, str]]:
    """Return Inductor's table of kernels, None where it wrote none, and the generated code by file name."""
    sources: dict[str, str] = {}
    table: Mapping[str, Mapping[str, list[str]]] | None = None
    with open_regular(package, inside=package.parent) as opened, zipfile.ZipFile(opened) as archive:
        for info in archive.infolist():
            if info.filename.endswith((_TABLE, ".cpp")) and info.file_size > _MAX_TEXT_BYTES:
                raise CorruptError("a file of a package is too large", got=f"{info.filename}: {info.file_size:,}")
            if info.filename.endswith(_TABLE):
                table = parsed(archive.read(info), dict[str, dict[str, list[str]]], info.filename, what=_TABLE)
            for kind in ("wrapper", "kernel"):
                if info.filename.endswith(f".{kind}.cpp"):
                    sources[f"inductor_{kind}.cpp"] = _OF_THIS_MACHINE.sub("", archive.read(info).decode())
    return table, sources
