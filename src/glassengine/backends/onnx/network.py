"""The ONNX graph of an engine: read and checked, its layers named after the program's nodes, and listed.

A runtime follows what the file says of its data, so the file is checked before a runtime opens it. The converter keeps
in each ONNX node the FX node that it came from. A layer that yields the value of an FX node has the name of that node,
which `--add-output` takes; every other layer of the expansion is called `<node>/<operation>_<n>`.
"""

from __future__ import annotations

import importlib.util
import operator
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from glassengine.backends.protocol.attention import node_of
from glassengine.backends.protocol.backend import Layer, Network, NetworkTensor
from glassengine.errors import CorruptError
from glassengine.program.onnx.file import MAX_BYTES
from glassengine.program.onnx.session import SessionSettings, start
from glassengine.program.onnx.tensors import check_settings, check_tensors, check_texts
from glassengine.program.representation.program import Program
from glassengine.reading.documents import damaged
from glassengine.reading.files import open_regular, read_bytes

if TYPE_CHECKING:
    import onnx


NODE_KEY = "glassengine.node"
"""Key of a layer's metadata: the FX node that it carries out, alone or in part."""

OPTIMIZE_LIMIT_BYTES = 1 << 30
"""Above this size of the weights the graph is not optimized once more to be listed: that writes them all."""

_STANDARD = ("", "ai.onnx")
_SIZES = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
_HANDLE = re.compile(r"glass node (\w+)\n")


def mark_nodes(graph: torch.fx.Graph) -> None:
    """Give every node a handle that survives the converter, which traces the graph again and renumbers it.

    Of all that a node carries the stack trace is what the converter copies and never looks into. Sizes have no handle,
    since all nodes share them; one of several results has that of the op.
    """
    for node in graph.nodes:
        if node.op == "call_function" and not isinstance(node.meta.get("val"), _SIZES):
            op = node.args[0] if node.target is operator.getitem else node
            node.meta["stack_trace"] = f"glass node {op.name}\n{node.meta.get('stack_trace') or ''}"


def name_layers(graph: Any, converted: torch.fx.Graph, program: Program) -> None:
    """Name every layer of a converted graph after the program's node that it carries out.

    Args:
        graph: An `onnx_ir` graph whose outputs are those of `program`, in order; its values have the converter's names.
        converted: The graph that was translated: the program's, traced again. Its nodes have the names of the values.
        program: In the functional form that was converted, with the handles of `mark_nodes`.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    results = dict(zip(map(id, graph.outputs), (node.name for node in _results(converted)), strict=True))
    origin = {node.name: _handle(node.meta.get("stack_trace")) for node in converted.nodes}
    # A node may have become several; the last of them yields its value.
    last = {node: name for name, node in origin.items() if node in nodes and node_of(node) == node}
    values = {node.name: node.meta.get("val") for node in converted.nodes}
    yields = {name: node for node, name in last.items() if _same_kind(values[name], nodes[node].meta["val"])}
    counts: Counter[tuple[str, str]] = Counter()
    taken: set[str] = set()
    for layer in graph:
        names = [results.get(id(value), value.name) for value in layer.outputs]
        whole = next((yields[name] for name in names if name in yields), None)
        node = whole or node_of(_handle(layer.metadata_props.get("pkg.torch.onnx.stack_trace")))
        if whole is not None and whole not in taken:
            layer.name = whole
            taken.add(whole)
        else:
            layer.name = f"{node or 'shared'}/{layer.op_type}_{counts[node, layer.op_type]}"
            counts[node, layer.op_type] += 1
        if node:
            layer.metadata_props[NODE_KEY] = node


def _results(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.output_node().args[0] if isinstance(node, torch.fx.Node)]  # type: ignore[union-attr]


def _handle(stack_trace: str | None) -> str:
    found = _HANDLE.search(stack_trace or "")
    return found[1] if found else ""


def _same_kind(one: Any, other: Any) -> bool:
    """Whether two fake tensors have one dtype and the same fixed sizes; dynamic ones have other symbols."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    sizes = zip(one.shape, other.shape, strict=False)
    fixed = all(a == b for a, b in sizes if isinstance(a, int) and isinstance(b, int))
    return one.dtype == other.dtype and one.dim() == other.dim() and fixed


def list_network(path: Path, program: Program, runtime: str) -> Network:
    """Return the layers of an ONNX file."""
    model = read_graph(path)
    # The layers of a file that was given to us as it is know nothing of nodes; their values do.
    values = program.onnx.values if program.onnx is not None else {}
    producers = {name: (node,) for node, name in values.items()}
    return _network(model, producers, _readable_sizes(model.graph, program), f"ONNX, as it was given to {runtime}.")


def list_optimized(path: Path, program: Program, network: Network) -> Network | None:
    """Return the layers that ONNX Runtime makes of an ONNX file; None where its weights are too large to be copied.

    `network` is what `list_network` made of it.
    """
    import onnx

    if sum(tensor.nbytes for tensor in program.weights().values()) > OPTIMIZE_LIMIT_BYTES:
        return None
    producers = {tensor.name: layer.nodes for layer in network.layers for tensor in layer.outputs}
    with tempfile.TemporaryDirectory(prefix="glassengine-") as folder:
        optimized = Path(folder) / "optimized.onnx"
        start(str(path), SessionSettings({"optimized_model_filepath": str(optimized)}).options())
        note = "what ONNX Runtime runs on this processor, after its own fusions."
        model = onnx.load(optimized, load_external_data=False)
        return _network(model, producers, _readable_sizes(model.graph, program), note)


def _readable_sizes(graph: Any, program: Program) -> dict[str, str]:
    """Return symbol of the ONNX graph ("s10") -> what the program calls that size ("batch")."""
    ports = {port.name: port.shape for port in program.inputs}
    readable: dict[str, str] = {}
    for value in graph.input:
        dims = value.type.tensor_type.shape.dim
        for dim, size in zip(dims, ports.get(value.name, ()), strict=False):
            if dim.dim_param.isidentifier() and isinstance(size, str):
                readable.setdefault(dim.dim_param, size)
    return readable


def _network(model: Any, producers: Mapping[str, tuple[str, ...]], sizes: Mapping[str, str], note: str) -> Network:
    """Return the layers of `model`; `producers` maps values to FX nodes where the layers do not know their own."""
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    tensors = {value.name: _tensor(value, sizes) for value in (*graph.input, *graph.value_info, *graph.output)}
    layers = []
    for node in graph.node:
        own = [entry.value for entry in node.metadata_props if entry.key == NODE_KEY]
        nodes = tuple(dict.fromkeys(own or [n for name in node.output for n in producers.get(name, ())]))
        layers.append(
            Layer(
                name=node.name,
                operation=f"{node.domain}.{node.op_type}" if node.domain not in _STANDARD else node.op_type,
                nodes=nodes,
                inputs=tuple(node.input),
                outputs=tuple(tensors.get(name, NetworkTensor(name)) for name in node.output),
                attributes={entry.name: _attribute(entry) for entry in node.attribute},
                is_plugin=node.domain not in _STANDARD,
            )
        )
    inputs = tuple(tensors[value.name] for value in graph.input if value.name not in weights)
    return Network(tuple(layers), inputs, tuple(value.name for value in graph.output), note)


def _tensor(value: Any, readable: Mapping[str, str]) -> NetworkTensor:
    import onnx

    kind = value.type.tensor_type
    sizes: Iterable[Any] = kind.shape.dim if kind.HasField("shape") else ()
    texts = (size.dim_param or str(size.dim_value) for size in sizes)
    shape = ", ".join(re.sub(r"\b[su]\d+\b", lambda found: readable.get(found[0], found[0]), text) for text in texts)
    dtype = onnx.TensorProto.DataType.Name(kind.elem_type).lower().replace("double", "float64")
    return NetworkTensor(value.name, "float32" if dtype == "float" else dtype, f"[{shape}]")


def _attribute(entry: Any) -> Any:
    import onnx

    value = onnx.helper.get_attribute_value(entry)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, onnx.TensorProto):
        array = onnx.numpy_helper.to_array(value)
        return array.tolist() if array.size <= 16 else f"tensor {array.dtype}{list(array.shape)}"
    if isinstance(value, (onnx.GraphProto, onnx.SparseTensorProto, onnx.TypeProto)):
        return f"<{type(value).__name__}>"
    return list(value)


def check_graph(directory: Path, name: str) -> None:
    """Check the graph of an engine before a runtime opens it.

    Running needs no onnx. Without it every file beside the graph has to be a plain one, and that weights
    lie in the same directory is what ONNX Runtime checks by itself.

    Raises:
        CorruptError: It is damaged, or something in the directory is not a plain file.
    """
    if importlib.util.find_spec("onnx") is not None:
        read_graph(directory / name)
        return
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            open_regular(path, inside=directory).close()


def read_graph(path: Path) -> onnx.ModelProto:
    """Return the graph of an engine; weights that lie in other files are checked, and not read.

    Raises:
        CorruptError: It is damaged, or a weight lies outside of the engine.
    """
    import onnx

    model = onnx.ModelProto()
    raw = read_bytes(path, most=MAX_BYTES, inside=path.parent)
    try:
        model.ParseFromString(raw)
    except Exception as error:  # of protobuf, which has no types and several implementations
        raise damaged(path.name, path, error) from error
    if not model.ir_version or not model.graph.output:
        raise CorruptError(f"{path.name} is damaged", got=f"{path}: no graph with outputs")
    check_texts(model, path)
    check_settings(model, path)
    check_tensors(model, path)
    return model
