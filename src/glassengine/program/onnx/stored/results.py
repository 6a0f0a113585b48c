"""Results of an ONNX file that are no tensors of numbers: the tensors that they are made of take their place.

ZipMap(probabilities) -> list of dicts      becomes  probabilities
SequenceConstruct(a, b) -> sequence         becomes  a, b
text (labels of a classifier)               is left out, where there is another result
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from glassengine.reading.files import printable

if TYPE_CHECKING:
    import onnx

logger = logging.getLogger("glassengine")

_STRING = 8
_MADE_OF = ("ZipMap", "SequenceConstruct", "Optional", "Identity")


def return_tensors(graph: onnx.GraphProto, file: str) -> None:
    """Let a graph return tensors of numbers instead of containers made of them; change nothing else.

    Args:
        graph: Of the file.
        file: Name, for warnings.
    """
    others = [value for value in graph.output if not _is_tensor(value)]
    if not others:
        return
    makers = {name: node for node in graph.node for name in node.output}
    kept = [value for value in graph.output if _is_tensor(value)]
    names = {value.name for value in kept}
    for value in others:
        found = [name for name in _tensors_of(value.name, makers) if name in makers and name not in names]
        names.update(found)
        kept += [_named(name) for name in found]
        said = f"replaced by {', '.join(map(printable, found))}" if found else "it is not judged"
        logger.warning("%s returns %s, which is not a numeric tensor: %s", file, printable(value.name), said)
    if not kept:
        return
    del graph.output[:]
    graph.output.extend(kept)
    _leave_out(graph, {value.name for value in others} - names)


def _is_tensor(value: onnx.ValueInfoProto) -> bool:
    return value.type.HasField("tensor_type") and value.type.tensor_type.elem_type != _STRING


def _named(name: str) -> onnx.ValueInfoProto:
    from onnx import ValueInfoProto

    return ValueInfoProto(name=name)


def _tensors_of(name: str, makers: dict[str, onnx.NodeProto]) -> Iterator[str]:
    node = makers.get(name)
    if node is None or node.op_type not in _MADE_OF:
        return
    for source in node.input:
        inner = makers.get(source)
        if inner is not None and inner.op_type in _MADE_OF:
            yield from _tensors_of(source, makers)
        elif node.op_type != "Identity":
            yield source


def _leave_out(graph: onnx.GraphProto, unread: set[str]) -> None:
    """Remove the nodes that only make what is left out."""
    returned = {value.name for value in graph.output}
    read = _read(graph)
    waiting = [node for node in graph.node if unread.intersection(node.output)]
    while waiting:
        node = waiting.pop()
        if any(name in returned or name in read for name in node.output) or node not in graph.node:
            continue
        graph.node.remove(node)
        read = _read(graph)
        waiting += [other for other in graph.node if set(other.output) & set(node.input)]


def _read(graph: onnx.GraphProto) -> set[str]:
    read = {name for node in graph.node for name in node.input}
    return read | {value for node in graph.node for entry in node.attribute for value in _inside(entry)}


def _inside(entry: onnx.AttributeProto) -> Iterator[str]:
    for graph in [entry.g] if entry.HasField("g") else entry.graphs:
        for node in graph.node:
            yield from node.input
            for inner in node.attribute:
                yield from _inside(inner)
