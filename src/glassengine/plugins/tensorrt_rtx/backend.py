"""Back-end "tensorrt_rtx": the same ONNX, compiled by TensorRT for RTX, and the network that it makes of it.

What is built is a plan that any supported GPU finishes compiling when it loads it. The network is strongly typed: each
tensor has the dtype that the program gives it, and products of float32 are never done in TF32.

Running has never been tried on hardware. Tensors go through torch: inputs are brought to the GPU, results go where the
inputs were, and an updated cache is copied over the old one, wherever that lies.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch

from glassengine.accelerators import require_device
from glassengine.backends.onnx.backend import OnnxBackend
from glassengine.backends.onnx.export import MODEL_FILE, OPSET
from glassengine.backends.protocol.backend import LARGEST, Capabilities, Layer, Network, NetworkTensor, Run
from glassengine.backends.protocol.io import read_io
from glassengine.errors import BackendError
from glassengine.program.representation.program import SMALLEST, OnnxGraph, Program
from glassengine.reading.documents import read_document
from glassengine.reading.files import read_bytes

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


PLAN_FILE = "model.plan"
_MAX_PLAN_BYTES = 1 << 40
UNBOUNDED = 1024
"""Largest value of a dynamic size to which nothing sets a bound: a plan has one for every size."""


class TensorRtRtxBackend(OnnxBackend):
    """The graph, compiled ahead of time for every GPU of compute capability 8.0, 8.6, 8.9 and 12.0 or later."""

    name = "tensorrt_rtx"
    title = "TensorRT-RTX"
    package = "tensorrt_rtx_bindings"
    install = "pip install 'glassengine[tensorrt-rtx]'"
    capabilities = Capabilities(
        dtypes=("float32", "float16", "bfloat16"), kv="mutated", portable=True, devices=("cuda",)
    )

    def options(self, program: Program) -> dict[str, Any]:
        """Return how the program is converted and compiled, as the builder itself says it."""
        trt = self._runtime()
        builder = trt.Builder(logger_of(trt))
        config = _configured(trt, builder)
        return {
            "opset": OPSET,
            "optimize": True,
            "strongly_typed": True,
            "tf32": config.get_flag(trt.BuilderFlag.TF32),
            "flags": sorted(name for name, flag in trt.BuilderFlag.__members__.items() if config.get_flag(flag)),
            "workspace_bytes": config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE),
            "builder_optimization_level": config.builder_optimization_level,
            "compute_capabilities": "8.0, 8.6, 8.9, 12.0 and later",
            "profile": {
                name: {"min": low, "opt": best, "max": high} for name, low, best, high in shape_ranges(program)
            },
        }

    def build(self, program: Program, directory: Path) -> None:
        """Convert to ONNX, compile that into `model.plan`, and keep the listing of the network in its place.

        Raises:
            BackendError: ONNX cannot express the program, or TensorRT-RTX cannot compile it; carries what it said.
        """
        super().build(program, directory)
        trt = self._runtime()
        logger = logger_of(trt)
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(directory / MODEL_FILE)):
            said = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors)) or logger.text()
            raise BackendError("TensorRT-RTX cannot read the program", got=said[:2000])
        config = _configured(trt, builder)
        profile = builder.create_optimization_profile()
        for name, low, best, high in shape_ranges(program):
            profile.set_shape(name, low, best, high)
        config.add_optimization_profile(profile)
        listing = listing_of(network, super().network(program, directory))
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise BackendError("TensorRT-RTX cannot compile the program", got=logger.text()[:2000])
        (directory / PLAN_FILE).write_bytes(memoryview(plan))
        write_listing(listing, directory)
        # The plan has the weights; they need not be there twice. An engine of an ONNX file has them from there alone.
        if program.onnx is None:
            for path in directory.glob(f"{MODEL_FILE}*"):
                path.unlink()

    def network(self, program: Program, directory: Path) -> Network:
        """Return the network that TensorRT-RTX made of the ONNX graph, before its own fusions.

        Raises:
            CorruptError: The listing was not written by `build`.
        """
        return read_listing(directory)

    def _require_taken(self, source: OnnxGraph, directory: Path) -> None:
        """Leave that to `build`, which compiles the graph."""

    def _open(self, runtime: Any, directory: Path) -> Run:
        return LoadedPlan(runtime, directory).run

    def _optimized(self, directory: Path, program: Program, network: Network) -> Network | None:
        return None


def _configured(trt: Any, builder: Any) -> Any:
    """Return the configuration of every build; what is not set here is the default of TensorRT-RTX, and listed."""
    config = builder.create_builder_config()
    # On by default: float32 would then have the ten bits of a TF32 mantissa.
    config.clear_flag(trt.BuilderFlag.TF32)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    return config


_Shape = tuple[int, ...]


def shape_ranges(program: Program) -> list[tuple[str, _Shape, _Shape, _Shape]]:
    """Return smallest, likeliest and largest shape of each input; a decode step of one sequence is the likeliest."""
    ranges = _ranges(program)

    def sizes(shape: tuple[int | str, ...], at: int) -> _Shape:
        return tuple(size if isinstance(size, int) else ranges[size][at] for size in shape)

    return [
        (port.name, sizes(port.shape, 0), sizes(port.shape, 1), sizes(port.shape, 2))
        for port in program.inputs
        if any(isinstance(size, str) for size in port.shape)
    ]


def _ranges(program: Program) -> dict[str, _Shape]:
    """Return dynamic size -> its smallest, likeliest and largest value."""
    largest: Mapping[str, int] = program.metadata.get(LARGEST, {})
    smallest: Mapping[str, int] = program.metadata.get(SMALLEST, {})
    bounds = {str(symbol): bound for symbol, bound in program.exported.range_constraints.items()}
    ranges: dict[str, _Shape] = {}
    for name in dict.fromkeys(size for port in program.inputs for size in port.shape if isinstance(size, str)):
        low, high = 1, largest.get(name)
        # The bounds of a language model's sizes are those of the tracer; the engine has its own.
        if high is None and name in bounds:
            low = smallest.get(name, int(bounds[name].lower))
            has_end = bounds[name].upper < sys.maxsize // 2
            high = int(bounds[name].upper) if has_end else None
        high = max(UNBOUNDED, low) if high is None else high
        ranges[name] = (low, high if name == "cache" else low, high)
    return ranges


def logger_of(trt: Any) -> Any:
    """Return a logger that keeps errors to be part of ours, and stays silent."""

    class Kept(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.lines.append(text)

        def text(self) -> str:
            return "; ".join(self.lines) or "no reason was given"

    return Kept()


class LoadedPlan:
    """A plan, loaded when it is first run: what an engine is can be read where it cannot run."""

    def __init__(self, trt: Any, directory: Path) -> None:
        self._trt = trt
        self._directory = directory
        self._logger = logger_of(trt)
        self._order = read_io(directory)
        self._results = dict(zip(self._order.outputs, read_listing(directory).outputs, strict=True))

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one step; the cache tensors in `inputs` hold the new state afterwards, other inputs are unchanged."""
        context = self._context
        here = next((tensor.device for tensor in inputs.values()), torch.device("cuda"))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            bound = {name: inputs[name].contiguous().to(self._place(name)) for name in self._order.inputs}
            for name, tensor in bound.items():
                if not context.set_input_shape(name, tuple(tensor.shape)):
                    self._refuse(name, tensor)
                context.set_tensor_address(name, tensor.data_ptr())
            results = {name: self._bind(graph_name) for name, graph_name in self._results.items()}
            if not context.execute_async_v3(stream.cuda_stream):
                raise BackendError("TensorRT-RTX cannot run the plan", got=self._logger.text())
        # What was allocated on this stream may be used and freed on any other from here on.
        stream.synchronize()
        for past, present in self._order.caches.items():
            inputs[past].copy_(results.pop(present))
        return {name: value.to(here) for name, value in results.items()}

    @cached_property
    def _context(self) -> Any:
        require_device("cuda", "running what tensorrt_rtx built", hint="to run it here, build with --backend inductor")
        self._runtime = self._trt.Runtime(self._logger)
        plan = read_bytes(self._directory / PLAN_FILE, most=_MAX_PLAN_BYTES, inside=self._directory)
        engine = self._runtime.deserialize_cuda_engine(plan)
        context = None if engine is None else engine.create_execution_context()
        if context is None:
            got = f"{torch.cuda.get_device_name()}: {self._logger.text()}"
            raise BackendError("TensorRT-RTX cannot load the plan", got=got[:2000])
        return context

    def _place(self, name: str) -> str:
        # What decides on sizes is read by the host.
        is_host = self._context.engine.get_tensor_location(name) == self._trt.TensorLocation.HOST
        return "cpu" if is_host else "cuda"

    def _bind(self, name: str) -> torch.Tensor:
        shape = tuple(self._context.get_tensor_shape(name))
        if any(size < 0 for size in shape):
            raise BackendError(f"the size of output {name!r} depends on values", got=str(list(shape)))
        dtype = getattr(torch, dtype_name(self._context.engine.get_tensor_dtype(name)))
        tensor = torch.empty(shape, dtype=dtype, device=self._place(name))
        self._context.set_tensor_address(name, tensor.data_ptr())
        return tensor

    def _refuse(self, name: str, tensor: torch.Tensor) -> None:
        low, _, high = self._context.engine.get_tensor_profile_shape(name, 0)
        raise BackendError(
            f"the plan has no room for input {name!r}",
            got=str(list(tensor.shape)),
            expected=f"{list(low)} to {list(high)}",
            hint="build it with --max-batch-size and --max-seq-len as needed",
        )
