"""A recording of a serving engine by the names of a program, and what its products read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from glassengine.backends.accuracy.calibration import of_any_runtime
from glassengine.errors import UsageError
from glassengine.judge.sides.recorded import RecordedTensors
from glassengine.numerics.quantization.activations import READERS, Read
from glassengine.ops.traits import traits_of
from glassengine.program.representation.program import Program
from glassengine.recording.read.source import TensorSource
from glassengine.serving.alignment import numbers_of, table_of
from glassengine.serving.ggml.types import READ_AS
from glassengine.sites import matches


class Alignment:
    """A recording whose layout has tables.

    Args:
        source: The recording; its metadata name layout and architecture.
        program: The baseline's.
        config: The checkpoint's.
        layout: In place of the one that the recording names.

    Raises:
        UsageError: No layout is known.
    """

    def __init__(self, source: TensorSource, program: Program, config: Any, layout: str | None = None) -> None:
        layout = layout or source.metadata.get("layout")
        if layout is None:
            raise UsageError("the recording names no layout", got=str(source.path), hint="--layout ggml, or --map FILE")
        self.source = source
        self.table = table_of(layout, str(source.metadata.get("architecture")), numbers_of(config))
        self.tensors = RecordedTensors(source, program, self.table.rules)
        self.kernels = of_any_runtime()
        self.rounded: dict[str, torch.dtype] = {
            site.node: getattr(torch, dtype)
            for site in program.sites
            for pattern, dtype in self.table.rounded.items()
            if matches(pattern, site.name)
        }


def operands_of(alignment: Alignment, program: Program) -> tuple[dict[str, Callable[[torch.Tensor], Read]], set[str]]:
    """Return what the products of a recording read of their activations, by node, and the types that they read."""
    graph = alignment.source.metadata.get("graph") or {}
    found: dict[str, Callable[[torch.Tensor], Read]] = {}
    kinds: set[str] = set()
    nodes = {node.name: node for node in program.graph.nodes}
    for site in program.sites:
        known = alignment.tensors.names(site)
        node = nodes.get(site.node)
        if known is None or node is None or not traits_of(node).reads_memory:
            continue
        types = {_type_of_weight(graph, name) for name in known[0]} - {None}
        read = {READ_AS[kind] for kind in types if kind in READ_AS}
        if len(read) == 1:
            (kind,) = read
            found[site.node] = READERS[kind]
            kinds.add(kind)
    return found, kinds


def _type_of_weight(graph: dict[str, Any], site: str) -> str | None:
    """Return the type of the weight that a product of the recording reads, as `TYPES` calls it."""
    node = graph.get(site)
    if node is None or not node["sources"]:
        return None
    first = node["sources"][0]
    if site.rpartition("/")[2].startswith("add.") and "/mul_mat" in first:
        return _type_of_weight(graph, first)  # a product with a bias
    weight = graph.get(first)
    return str(weight["type"]).upper() if weight is not None else None


def hidden_kinds(alignment: Alignment) -> set[str]:
    """Return what quantized products read that no site of the program is: those of experts, which choose their rows."""
    graph = alignment.source.metadata.get("graph") or {}
    types = {_type_of_weight(graph, site) for site in graph if "/mul_mat_id." in site}
    return {READ_AS[kind] for kind in types if kind in READ_AS}
