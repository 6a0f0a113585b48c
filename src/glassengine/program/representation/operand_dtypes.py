"""Products of two dtypes: torch refuses them when they are run, but traces them without a word."""

from __future__ import annotations

import torch

from glassengine.errors import UsageError
from glassengine.ops.traits import traits_of
from glassengine.program.representation.program import Program


def require_one_dtype(program: Program) -> None:
    """Check that each product multiplies numbers of one dtype.

    Raises:
        UsageError: One does not; says where, and which inputs have another dtype than the weights.
    """
    for node in program.graph.nodes:
        if not traits_of(node).multiplies:
            continue
        values = [source.meta.get("val") for source in node.all_input_nodes]
        dtypes = dict.fromkeys(v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())
        if len(dtypes) < 2:
            continue
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        site = program.sites.by_node[node.name][0]
        weights = {tensor.dtype for tensor in program.weights().values() if tensor.is_floating_point()}
        of_weights = {str(dtype).removeprefix("torch.") for dtype in weights}
        others = [port for port in program.inputs if "float" in port.dtype and port.dtype not in of_weights]
        given = ", ".join(f"{port.name} is {port.dtype}" for port in others[:5])
        raise UsageError(
            f"the forward multiplies numbers of two dtypes at {site.source or site.name}",
            got=" by ".join(names),
            expected="one dtype: torch refuses others when it runs them",
            hint=f"{given}: give it in the dtype of the weights, or build with --dtype {others[0].dtype}"
            if given
            else None,
        )
