"""The network that TensorRT-RTX makes of an ONNX graph: names of its layers, and the listing that is kept of it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from glassengine.backends.protocol.backend import Layer, Network, NetworkTensor
from glassengine.reading.documents import read_document

NETWORK_FILE = "network.json"
_MAX_BYTES = 64 << 20

_ONNX_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")

# What TensorRT calls dtypes, where that is not torch's name in capitals.
_DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}


def dtype_name(dtype: Any) -> str:
    """Return torch's name of a dtype of TensorRT."""
    name: str = dtype.name
    return _DTYPES.get(name, name.lower())


def listing_of(network: Any, given: Network) -> Network:
    """Name the layers of a parsed network as all listings do, and return them.

    Args:
        network: What the parser made; its layers get the names, which profiles of the plan then show.
        given: The ONNX graph, whose layers know the nodes they are from.
    """
    nodes_of = {layer.name: layer.nodes for layer in given.layers}
    shapes = {tensor.name: tensor.shape for layer in given.layers for tensor in layer.outputs}
    shapes |= {tensor.name: tensor.shape for tensor in given.inputs}
    each = [network.get_layer(i) for i in range(network.num_layers)]
    sources = _sources(each)
    # Of the layers that one ONNX node became the last yields its value.
    last = {source: i for i, source in enumerate(sources)}
    counts: Counter[tuple[str, str]] = Counter()
    layers = []
    for i, (layer, source) in enumerate(zip(each, sources, strict=True)):
        operation, nodes = layer.type.name, tuple(nodes_of.get(source, ()))
        if source and last[source] == i:
            layer.name = source
        elif source:
            node = nodes[0] if nodes else "shared"
            layer.name = f"{node}/{operation}_{counts[node, operation]}"
            counts[node, operation] += 1
        inputs = [layer.get_input(j) for j in range(layer.num_inputs)]
        outputs = [layer.get_output(j) for j in range(layer.num_outputs)]
        layers.append(
            Layer(
                name=layer.name,
                operation=operation,
                nodes=nodes,
                inputs=tuple("" if tensor is None else tensor.name for tensor in inputs),
                outputs=tuple(_tensor(tensor, shapes) for tensor in outputs if tensor is not None),
                is_plugin=operation.startswith("PLUGIN"),
            )
        )
    ports = tuple(_tensor(network.get_input(i), shapes) for i in range(network.num_inputs))
    results = tuple(network.get_output(i).name for i in range(network.num_outputs))
    return Network(tuple(layers), ports, results, "the network of TensorRT-RTX, strongly typed, before its fusions.")


def _sources(layers: list[Any]) -> list[str]:
    """Return the ONNX node that each layer is from; "" of constants, which several nodes may read."""
    found = [_ONNX_NODE.search(layer.metadata) for layer in layers]
    names = ["" if one is None else one[1] for one in found]
    # What the parser puts in between (a vector made to fit a matrix) belongs to the layer that reads it.
    reads: dict[str, str] = {}
    for i in reversed(range(len(layers))):
        layer = layers[i]
        if not names[i] and layer.type.name != "CONSTANT":
            results = (layer.get_output(j).name for j in range(layer.num_outputs))
            names[i] = next((reads[name] for name in results if name in reads), "")
        tensors = (layer.get_input(j) for j in range(layer.num_inputs))
        reads |= {tensor.name: names[i] for tensor in tensors if tensor is not None}
    return names


def _tensor(tensor: Any, shapes: Mapping[str, str]) -> NetworkTensor:
    dtype = dtype_name(tensor.dtype)
    if shapes.get(tensor.name):
        return NetworkTensor(tensor.name, dtype, shapes[tensor.name])
    try:
        return NetworkTensor(tensor.name, dtype, f"[{', '.join(map(str, tensor.shape))}]")
    except ValueError:
        # How many dimensions it has is known when it runs.
        return NetworkTensor(tensor.name, dtype)


def write_listing(network: Network, directory: Path) -> None:
    """Write a listing beside the plan, which cannot be listed without a GPU."""
    (directory / NETWORK_FILE).write_text(json.dumps(asdict(network)))


class _Stored(msgspec.Struct):
    layers: tuple[Layer, ...]
    inputs: tuple[NetworkTensor, ...]
    outputs: tuple[str, ...]
    note: str


def read_listing(directory: Path) -> Network:
    """Inverse of `write_listing`.

    Raises:
        CorruptError: The file is missing or damaged.
    """
    found = read_document(
        directory / NETWORK_FILE, _Stored, most=_MAX_BYTES, inside=directory, what=NETWORK_FILE, nonfinite=True
    )
    return Network(found.layers, found.inputs, found.outputs, found.note)
