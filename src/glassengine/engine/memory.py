"""What build, run and check hold in memory at most, told before they begin.

    peak = interpreter and libraries + weights, as often as they are held at once + what is worked on at a time

The constants are measured (`python -m benchmarks size` prints expected beside measured) and count resident pages of the
process and of the compilers it starts, pages of mapped files included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glassengine.backends.protocol import Backend
from glassengine.program import Program

MEGABYTE = 10**6
LIBRARIES_BYTES = 440 * MEGABYTE
"""Python with torch and transformers imported, before any model is loaded."""
_JUDGED_BYTES_PER_ELEMENT = 20
"""Of the largest weight while its op is judged: float64, float32 and its absolute values in float64."""


@dataclass(frozen=True)
class _Costs:
    """Of a back-end: bytes that building takes at least and more for each op; copies of the weights held at once."""

    fixed_bytes: int
    bytes_per_op: int
    built: float
    loaded: float


_COSTS = {
    ("eager", False): _Costs(60 * MEGABYTE, 100_000, built=1.0, loaded=1.0),
    ("inductor", False): _Costs(450 * MEGABYTE, 200_000, built=1.0, loaded=1.0),
    ("inductor", True): _Costs(450 * MEGABYTE, 200_000, built=5.0, loaded=1.0),
    ("onnxruntime", True): _Costs(450 * MEGABYTE, 200_000, built=2.0, loaded=2.0),
    ("openvino", True): _Costs(450 * MEGABYTE, 200_000, built=2.0, loaded=2.0),
}
"""(name of a back-end, whether its files hold the weights) -> what it takes."""


def expected_peaks(programs: Sequence[Program], backend: Backend) -> dict[str, int]:
    """Return the most bytes resident in "build", "run" and "check"; empty for a back-end that nobody has measured.

    Args:
        programs: All programs of the engine.
        backend: What builds them.

    A run is that of one short sequence: caches and outputs of more come on top. A check is that of the built-in
    prompts.
    """
    costs = _COSTS.get((backend.name, backend.keeps_weights(programs[-1])))
    if costs is None:
        return {}
    weights = weights_bytes(programs)
    num_ops = sum(node.op == "call_function" for program in programs for node in program.graph.nodes)
    largest = max((tensor.numel() for program in programs for tensor in program.weights().values()), default=0)
    built = LIBRARIES_BYTES + costs.fixed_bytes + costs.bytes_per_op * num_ops + costs.built * weights
    loaded = costs.loaded * weights
    judged = LIBRARIES_BYTES + weights + 2 * loaded + _JUDGED_BYTES_PER_ELEMENT * largest
    return {
        "build": int(built),
        "run": int(LIBRARIES_BYTES + loaded),
        # The engine with outputs is in memory while the release engine is built.
        "check": int(max(built + loaded, judged)),
    }


def weights_bytes(programs: Sequence[Program]) -> int:
    """Return the bytes of parameters, buffers and constants; tensors that are the same memory count once."""
    tensors = (tensor for program in programs for tensor in program.weights().values())
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
