"""Back-end "onnxruntime": ONNX, run by ONNX Runtime. No compiler is needed, and the files are portable.

For a GPU it needs the package onnxruntime-gpu instead of onnxruntime; this is untested.

Inputs and outputs go through I/O binding over torch's own memory. A cache is bound as input and as output at once, so
that a step writes its slots and copies nothing; where the graph does not allow that (see `in_place_caches`) the updated
cache is copied back after the run. Either way the caller's cache tensors hold the new state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from glassengine.accelerators import require_device
from glassengine.backends.onnx.backend import OnnxBackend
from glassengine.backends.onnx.export import IN_PLACE_KEY, MODEL_FILE, OPSET
from glassengine.backends.onnx.network import check_graph, list_optimized
from glassengine.backends.protocol.backend import Capabilities, Network, Run
from glassengine.backends.protocol.io import device_of, read_io
from glassengine.errors import BackendError
from glassengine.program.onnx.session import SessionSettings, start
from glassengine.program.onnx.translated import ELEMENT_TYPES
from glassengine.program.representation.program import Program

# A node that the first provider has no kernel for is left to the second.
_PROVIDERS: dict[str, list[Any]] = {
    "cpu": ["CPUExecutionProvider"],
    # In TF32 float32 would have the ten bits of its mantissa.
    "cuda": [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"],
}


class OnnxRuntimeBackend(OnnxBackend):
    """The graph as it is; ONNX Runtime optimizes it whenever it is loaded."""

    name = "onnxruntime"
    title = "ONNX Runtime"
    package = "onnxruntime"
    install = "pip install 'glassengine[onnx]'"
    # It computes float16 in float32 and drops the casts between two of its nodes.
    capabilities = Capabilities(
        dtypes=("float32", "float16"),
        kv="mutated",
        portable=True,
        wide_operands="products",
        devices=("cpu", "cuda"),
        own_kernels=True,
        native_code=False,
        batch_invariant=True,
    )

    def options(self, program: Program) -> dict[str, Any]:
        """Return how the program is converted and run; threads are chosen when the engine is loaded."""
        return {
            "opset": OPSET,
            "optimize": True,
            "providers": _PROVIDERS[device_of(program)],
            "graph_optimization_level": "all",
            "inter_op_num_threads": 1,
        }

    def _open(self, runtime: Any, directory: Path) -> Run:
        return _Session(runtime, directory).run

    def _optimized(self, directory: Path, program: Program, network: Network) -> Network | None:
        return list_optimized(directory / MODEL_FILE, program, network)


class _Session:
    """A loaded graph and how its inputs and outputs are bound."""

    def __init__(self, onnxruntime: Any, directory: Path) -> None:
        self._order = read_io(directory)
        _require_provider(onnxruntime, self._order.device)
        check_graph(directory, MODEL_FILE)
        options = SessionSettings({"inter_op_num_threads": 1}).options()
        providers = _PROVIDERS[self._order.device]
        self._session = start(str(directory / MODEL_FILE), options, providers)
        self._graph_outputs = [value.name for value in self._session.get_outputs()]
        in_place = self._session.get_modelmeta().custom_metadata_map[IN_PLACE_KEY].split()
        self._past_of = {present: past for past, present in self._order.caches.items()}
        self._in_place = {self._order.caches[past] for past in in_place}

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one step; the cache tensors in `inputs` hold the new state afterwards, other inputs are unchanged."""
        bound = {name: inputs[name].contiguous() for name in self._order.inputs}
        binding = self._session.io_binding()
        for name, tensor in bound.items():
            binding.bind_input(name, *_place(tensor))
        for name, graph_name in zip(self._order.outputs, self._graph_outputs, strict=True):
            place = _place(bound[self._past_of[name]]) if name in self._in_place else ()
            binding.bind_output(graph_name, *place)
        if self._order.device == "cuda":
            # It runs on a stream of its own, which knows nothing of what torch still does to the inputs.
            torch.cuda.synchronize()
        self._session.run_with_iobinding(binding)

        values = binding.get_outputs_as_ortvaluevector()
        tensors = list(values.to_dlpacks(torch.utils.dlpack.from_dlpack))
        for index in values.bool_tensor_indices():
            tensors[index] = tensors[index].view(torch.bool)  # DLPack hands booleans over as bytes
        results = dict(zip(self._order.outputs, tensors, strict=True))
        for present, past in self._past_of.items():
            updated = results.pop(present)
            if present not in self._in_place or bound[past] is not inputs[past]:
                inputs[past].copy_(updated)
        return results


def _require_provider(onnxruntime: Any, device: str) -> None:
    require_device(device, "an engine that onnxruntime runs on --device cuda")
    there = onnxruntime.get_available_providers()
    if device == "cuda" and "CUDAExecutionProvider" not in there:
        raise BackendError(
            "this ONNX Runtime cannot use a GPU",
            got=f"providers {', '.join(there)}",
            expected="CUDAExecutionProvider",
            hint="pip uninstall onnxruntime; pip install onnxruntime-gpu",
        )


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a contiguous tensor lies, in the words of ONNX Runtime's binding."""
    device = tensor.device
    return device.type, device.index or 0, ELEMENT_TYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr()
