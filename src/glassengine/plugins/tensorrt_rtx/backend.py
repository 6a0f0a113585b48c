"""Back-end "tensorrt_rtx": the same ONNX, compiled by TensorRT for RTX. Building needs no GPU, running does.

What is built is a plan that any supported GPU finishes compiling when it loads it. The network is strongly typed: each
tensor has the dtype that the program gives it, and products of float32 are never done in TF32.

Running has never been tried on hardware (`tensorrt_rtx_plan`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glassengine.backends.onnx.backend import OnnxBackend
from glassengine.backends.onnx.export import MODEL_FILE, OPSET
from glassengine.backends.protocol.backend import LARGEST, Capabilities, Network, Run
from glassengine.errors import BackendError
from glassengine.plugins.tensorrt_rtx.network import listing_of, read_listing, write_listing
from glassengine.plugins.tensorrt_rtx.plan import PLAN_FILE, Plan, logger_of
from glassengine.program.representation.program import SMALLEST, OnnxGraph, Program

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
        return Plan(runtime, directory).run

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
    found: dict[str, _Shape] = {}
    for name in dict.fromkeys(size for port in program.inputs for size in port.shape if isinstance(size, str)):
        low, high = 1, largest.get(name)
        # The bounds of a language model's sizes are those of the tracer; the engine has its own.
        if high is None and name in bounds:
            low = smallest.get(name, int(bounds[name].lower))
            has_end = bounds[name].upper < sys.maxsize // 2
            high = int(bounds[name].upper) if has_end else None
        high = max(UNBOUNDED, low) if high is None else high
        found[name] = (low, high if name == "cache" else low, high)
    return found
