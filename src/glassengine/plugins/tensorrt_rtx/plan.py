"""Runs a plan of TensorRT-RTX on a GPU. Untested: no supported GPU was available.

Tensors go through torch: inputs are brought to the GPU, results go where the inputs were, and an updated cache is
copied over the old one, wherever that lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from glassengine.accelerators import require_device
from glassengine.backends.protocol.io import read_io
from glassengine.errors import BackendError
from glassengine.plugins.tensorrt_rtx.network import dtype_name, read_listing
from glassengine.reading.files import read_bytes

PLAN_FILE = "model.plan"
_MAX_PLAN_BYTES = 1 << 40


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


class Plan:
    """A plan, loaded when it is first run: what an engine is can be read where it cannot run.

    Args:
        trt: The module.
        directory: What `build` wrote.
    """

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
        engine = self._runtime.deserialize_cuda_engine(self._plan())
        context = None if engine is None else engine.create_execution_context()
        if context is None:
            got = f"{torch.cuda.get_device_name()}: {self._logger.text()}"
            raise BackendError("TensorRT-RTX cannot load the plan", got=got[:2000])
        return context

    def _plan(self) -> bytes:
        return read_bytes(self._directory / PLAN_FILE, most=_MAX_PLAN_BYTES, inside=self._directory)

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
