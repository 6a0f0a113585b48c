"""Back-end "onnxruntime": ONNX, run by ONNX Runtime on the CPU. No compiler is needed, and the files are portable.

Inputs and outputs go through I/O binding over torch's own memory. A cache is bound as input and as output at once, so
that a step writes its slots and copies nothing; where the graph does not allow that (see `in_place_caches`) the updated
cache is copied back after the run. Either way the caller's cache tensors hold the new state.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from glassengine.backends.io import read_io, write_io
from glassengine.backends.onnx_export import IN_PLACE_KEY, MODEL_FILE, OPSET, export_onnx, refuse_bfloat16
from glassengine.backends.onnx_network import list_network, list_optimized
from glassengine.backends.protocol import Availability, Capabilities, Network, Run, Weights
from glassengine.errors import BackendError
from glassengine.program.outputs import functional_form
from glassengine.program.program import Program

_PROVIDERS = ["CPUExecutionProvider"]
_INSTALL = "pip install 'glassengine[onnx]'"

# ONNX element types (TensorProto.DataType) of what a program may take or return.
_ELEMENT_TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
}


class OnnxRuntimeBackend:
    """Converts to ONNX; running needs only the package onnxruntime."""

    name = "onnxruntime"
    # It computes float16 in float32 and drops the casts between two of its nodes.
    capabilities = Capabilities(dtypes=("float32", "float16"), kv="mutated", portable=True, wide_operands=True)

    def available(self) -> Availability:
        """Needs the three packages of the extra `onnx`."""
        for package in ("onnx", "onnxscript", "onnxruntime"):
            try:
                importlib.import_module(package)
            except ImportError as error:
                return Availability(False, f"{package} cannot be imported: {error}", _INSTALL)
        return Availability(True)

    def keeps_weights(self, program: Program) -> bool:
        """The weights are in the data file beside the graph."""
        return True

    def build(self, program: Program, directory: Path) -> None:
        """Convert.

        Raises:
            BackendError: ONNX Runtime has no CPU kernels for the program's dtype, or ONNX cannot express it.
        """
        refuse_bfloat16(program, self.capabilities)
        export_onnx(program, directory)
        write_io(functional_form(program), directory)

    def load(self, directory: Path, weights: Weights | None) -> Run:
        """Load the graph with as many threads as torch uses now.

        Raises:
            BackendError: onnxruntime is not installed.
        """
        try:
            import onnxruntime
        except ImportError as error:
            raise BackendError("back-end 'onnxruntime' cannot be used here", got=str(error), hint=_INSTALL) from error
        return _Session(onnxruntime, directory).run

    def options(self, program: Program) -> dict[str, Any]:
        """Return how the program is converted and run; threads are chosen when the engine is loaded."""
        return {
            "opset": OPSET,
            "optimize": True,
            "providers": _PROVIDERS,
            "graph_optimization_level": "all",
            "inter_op_num_threads": 1,
        }

    def network(self, program: Program, directory: Path) -> Network:
        """Return the ONNX graph; its layers are called like the nodes whose values they yield."""
        path = directory / MODEL_FILE
        network = list_network(path, program, "ONNX Runtime")
        return replace(network, optimized=list_optimized(path, program, network))


class _Session:
    """A loaded graph and how its inputs and outputs are bound."""

    def __init__(self, onnxruntime: Any, directory: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors; warnings are about the optimiser's own choices
        self._session = onnxruntime.InferenceSession(str(directory / MODEL_FILE), options, providers=_PROVIDERS)
        self._graph_outputs = [value.name for value in self._session.get_outputs()]
        in_place = self._session.get_modelmeta().custom_metadata_map[IN_PLACE_KEY].split()
        self._order = read_io(directory)
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


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a contiguous tensor lies, in the words of ONNX Runtime's binding."""
    return "cpu", 0, _ELEMENT_TYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr()
