"""Back-end "openvino": the same ONNX, compiled by OpenVINO for the CPU when it is loaded. Portable; no compiler needed.

OpenVINO computes in bfloat16 by default wherever the processor can, so the precision is always said. Inputs are views
of torch's memory. Where the graph allows it (`onnx_export.in_place_caches`) the updated cache is written over the old
one; elsewhere it is copied back. Either way the caller's cache tensors hold the new state.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from glassengine.backends.onnx.backend import OnnxBackend
from glassengine.backends.onnx.export import IN_PLACE_KEY, MODEL_FILE, OPSET
from glassengine.backends.onnx.network import read_graph
from glassengine.backends.protocol.backend import Capabilities, Layer, Network, NetworkTensor, Run
from glassengine.backends.protocol.io import read_io
from glassengine.program.representation.program import Program

_SETTINGS = {
    "INFERENCE_PRECISION_HINT": "f32",
    "EXECUTION_MODE_HINT": "ACCURACY",
    "PERFORMANCE_HINT": "LATENCY",
    "NUM_STREAMS": 1,
    "ENABLE_CPU_PINNING": False,
}


class OpenVinoBackend(OnnxBackend):
    """The graph as it is; OpenVINO compiles it for this processor whenever it is loaded."""

    name = "openvino"
    title = "OpenVINO"
    package = "openvino"
    install = "pip install 'glassengine[openvino]'"
    # Its casts between float16 and float32 may vanish between two of its nodes.
    capabilities = Capabilities(
        dtypes=("float32", "float16"),
        kv="mutated",
        portable=True,
        wide_operands="products",
        own_kernels=True,
        native_code=False,
    )

    def options(self, program: Program) -> dict[str, Any]:
        """Return how the program is converted and compiled; threads are chosen when the engine is loaded."""
        return {"opset": OPSET, "optimize": True, "device": "CPU", **_SETTINGS}

    def _open(self, runtime: Any, directory: Path) -> Run:
        return _Request(runtime, directory).run

    def _optimized(self, directory: Path, program: Program, network: Network) -> Network | None:
        return _running(directory, network)


class _Request:
    """A compiled graph and how its inputs and outputs are bound."""

    def __init__(self, openvino: Any, directory: Path) -> None:
        metadata = {item.key: item.value for item in read_graph(directory / MODEL_FILE).metadata_props}
        in_place = metadata[IN_PLACE_KEY].split()
        self._request = _compiled(directory).create_infer_request()
        self._tensor = openvino.Tensor
        self._order = read_io(directory)
        self._past_of = {present: past for past, present in self._order.caches.items()}
        self._in_place = {self._order.caches[past] for past in in_place}

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one step; the cache tensors in `inputs` hold the new state afterwards, other inputs are unchanged."""
        bound = {name: inputs[name].contiguous() for name in self._order.inputs}
        for index, tensor in enumerate(bound.values()):
            self._request.set_input_tensor(index, self._shared(tensor))
        for index, name in enumerate(self._order.outputs):
            if name in self._in_place:
                self._request.set_output_tensor(index, self._shared(bound[self._past_of[name]]))
        self._request.infer()

        results = {}
        for index, name in enumerate(self._order.outputs):
            if name not in self._in_place:
                # The memory of an output is used again by the next run.
                results[name] = torch.from_numpy(self._request.get_output_tensor(index).data.copy())
        for present, past in self._past_of.items():
            if present not in self._in_place:
                inputs[past].copy_(results.pop(present))
            elif bound[past] is not inputs[past]:
                inputs[past].copy_(bound[past])
        return results

    def _shared(self, tensor: torch.Tensor) -> Any:
        return self._tensor(tensor.numpy(), shared_memory=True)


@cache
def shared_core() -> Any:
    """Return the one `openvino.Core` of this process, which is never freed.

    Each core sets a signal stack of its own and sets back the one before when it is freed. Two cores that are freed
    in the order in which they were made leave a signal stack that is unmapped, and the next signal is a crash.
    """
    return import_module("openvino").Core()


def _compiled(directory: Path) -> Any:
    core = shared_core()
    settings = {**_SETTINGS, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    model = core.read_model(str(directory / MODEL_FILE))
    compiled = core.compile_model(model, "CPU", settings)
    changed = [
        result
        for result, output in zip(model.get_results(), compiled.outputs, strict=True)
        if not result.get_output_partial_shape(0).compatible(output.partial_shape)
    ]
    if changed:
        for result in changed:
            _read_from_concatenation(result)
        compiled = core.compile_model(model, "CPU", settings)
    return compiled


def _read_from_concatenation(result: Any) -> None:
    """Take a result of the graph from the concatenation that OpenVINO makes of its node.

    It computes the rotation of a part of each head and its concatenation with the rest of the head as one, and then
    gives the whole head to all who read the sum that ends the rotation.
    """
    from openvino import opset13 as ops

    for reader in result.input(0).get_source_output().get_target_inputs():
        node = reader.get_node()
        if node.get_type_name() != "Concat":
            continue
        axis = node.get_attributes()["axis"]
        sizes = [port.get_partial_shape()[axis] for port in node.inputs()[: reader.get_index() + 1]]
        if all(size.is_static for size in sizes):
            *before, size = (size.get_length() for size in sizes)
            start = sum(before)
            part = ops.slice(node.output(0), [start], [start + size], [1], [axis])
            result.input(0).replace_source_output(part.output(0))
            return


def _running(directory: Path, given: Network) -> Network:
    """Return the layers that OpenVINO makes of `given`, which it calls like layers and results of that."""
    nodes_of = {layer.name: layer.nodes for layer in given.layers}
    nodes_of |= {tensor.name: layer.nodes for layer in given.layers for tensor in layer.outputs}
    model = _compiled(directory).get_runtime_model()
    layers = []
    for op in model.get_ordered_ops():
        information = {key: value.astype(str) for key, value in op.get_rt_info().items()}
        made_of = information.get("originalLayersNames", "").split(",")
        layers.append(
            Layer(
                name=op.get_friendly_name(),
                operation=information.get("layerType", op.get_type_name()),
                nodes=tuple(dict.fromkeys(node for name in made_of for node in nodes_of.get(name, ()))),
                inputs=tuple(source.get_source_output().get_node().get_friendly_name() for source in op.inputs()),
                outputs=(NetworkTensor(op.get_friendly_name(), information.get("outputPrecisions", "")),),
                attributes={"implementation": information.get("primitiveType", "")},
            )
        )
    names = tuple(port.get_node().get_friendly_name() for port in model.outputs)
    inputs = tuple(NetworkTensor(port.get_node().get_friendly_name()) for port in model.inputs)
    return Network(tuple(layers), inputs, names, "what OpenVINO runs on this processor, after its own fusions.")
