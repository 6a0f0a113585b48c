"""What build, run and check hold in memory at most, told before they begin.

    build   libraries + weights + copies of them that the compiler packs + what compiling takes
    run     libraries + weights as the back-end holds them
    check   libraries + weights + two engines + float64 copies of the largest weight while its op is judged

The constants are measured (`python -m benchmarks size` prints expected beside measured). They count resident pages of
the process and of the compilers it starts, pages of mapped files included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from glassengine.backends.protocol.backend import Backend
from glassengine.program import Program
from glassengine.program.representation.naming import op_name

LIBRARIES_BYTES = 440_000_000
"""Python with torch and transformers imported, before any model is loaded."""
RUNTIME_BYTES = 360_000_000
"""Python with torch and what a run imports."""
_JUDGED_BYTES_PER_ELEMENT = 14
_JUDGED_WIDE_BYTES_PER_ELEMENT = 32
"""Of the largest weight while its op is judged; the second where operands may be wider, and noise is put on them."""


def expected_peaks(programs: Sequence[Program], backend: Backend) -> dict[str, int]:
    """Return the most bytes resident in "build", "run" and "check"; empty for an unmeasured back-end.

    A run is that of one short sequence, a check that of the built-in prompts: caches and outputs of more come on top.

    Args:
        programs: All programs of the engine.
        backend: What builds them.
    """
    costs = backend.capabilities.memory.get(backend.keeps_weights(programs[-1]))
    if costs is None:
        return {}
    weights, packed = weights_bytes(programs), _packed_bytes(programs)
    num_ops = sum(node.op == "call_function" for program in programs for node in program.graph.nodes)
    largest = max((tensor.numel() for _, tensor in _stored(programs)), default=0)
    is_wide = backend.capabilities.wide_operands == "products"
    held = LIBRARIES_BYTES + weights
    compiling = costs.packed * packed + costs.fixed_bytes + costs.bytes_per_op * num_ops
    loaded = costs.mapped * weights + costs.loaded * packed
    judging = largest * (_JUDGED_WIDE_BYTES_PER_ELEMENT if is_wide else _JUDGED_BYTES_PER_ELEMENT)
    return {
        "build": int(held + compiling),
        "run": int(RUNTIME_BYTES + loaded),
        # The engine with outputs is in memory while the release engine is built.
        "check": int(held + max(compiling + costs.observed_bytes + loaded, 2 * loaded + judging)),
    }


def weights_bytes(programs: Sequence[Program]) -> int:
    """Return the bytes of parameters, buffers and constants; tensors that are the same memory count once."""
    return sum({tensor.data_ptr(): tensor.nbytes for _, tensor in _stored(programs)}.values())


def _packed_bytes(programs: Sequence[Program]) -> int:
    """Bytes of the weights where each has the layout that its op wants: one that is tied to an embedding has two."""
    kinds: dict[tuple[int, bool], int] = {}
    for node, tensor in _stored(programs):
        for user in node.users:
            kinds[tensor.data_ptr(), op_name(user) == "embedding"] = tensor.nbytes
    return sum(kinds.values())


def _stored(programs: Sequence[Program]) -> Iterator[tuple[torch.fx.Node, torch.Tensor]]:
    for program in programs:
        weights = program.weights()
        for node in program.graph.find_nodes(op="placeholder"):
            if node.name in weights:
                yield node, weights[node.name]
