"""A recording of a serving engine by the names of a program, and what its products read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from glassengine.backends.accuracy.calibration import of_any_runtime
from glassengine.errors import UsageError
from glassengine.judge.replay.reference import CoarseArithmetic
from glassengine.judge.sides.recorded import RecordedTensors
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.ops import Accumulation
from glassengine.numerics.quantization.activations import READERS, ROUNDOFF, Read
from glassengine.ops.traits import traits_of
from glassengine.plugins.serving.alignment import numbers_of, table_of
from glassengine.plugins.serving.ggml.types import READ_AS
from glassengine.plugins.serving.ggml.write import ARCHITECTURES
from glassengine.program.representation.naming import op_name
from glassengine.program.representation.outputs import is_view, weight_only_nodes
from glassengine.program.representation.program import Program
from glassengine.recording.read.source import TensorSource
from glassengine.sites import matches


class Alignment:
    """Recordings of one engine whose layout has tables.

    Args:
        sources: Case -> recording; its metadata name layout and architecture.
        program: The baseline's.
        config: The checkpoint's.
        layout: In place of the one that the recording names.

    Raises:
        UsageError: No layout is known.
    """

    def __init__(
        self, sources: Mapping[str, TensorSource], program: Program, config: Any, layout: str | None = None
    ) -> None:
        source = next(iter(sources.values()))
        layout = layout or source.metadata.get("layout")
        if layout is None:
            raise UsageError("the recording names no layout", got=str(source.path), hint="--layout ggml, or --map FILE")
        self.source = source
        architecture = source.metadata.get("architecture") or _architecture(layout, config)
        self.table = table_of(layout, str(architecture), numbers_of(config))
        self.by_case = {
            case: RecordedTensors(one, program, self.table.rules, _with_biases(one)) for case, one in sources.items()
        }
        self.tensors = next(iter(self.by_case.values()))
        self.kernels = of_any_runtime()
        self.rounded: dict[str, torch.dtype] = {
            site.node: getattr(torch, dtype)
            for site in program.sites
            for pattern, dtype in self.table.rounded.items()
            if matches(pattern, site.name)
        }


def _with_biases(source: TensorSource) -> dict[str, str]:
    """Return products of a recording -> the sums in which a bias is added to them: a layer's result is the sum."""
    graph = source.metadata.get("graph") or {}
    sums = {}
    for site, node in graph.items():
        product, *others = node.get("sources") or [""]
        is_sum = site.rpartition("/")[2].startswith("add.") and "/mul_mat." in product
        if is_sum and len(others) == 1 and others[0].endswith(".bias"):
            sums[product] = site
    return sums


def _architecture(layout: str, config: Any) -> str:
    """Return what an engine calls a kind of model of transformers."""
    model_type = str(getattr(config, "model_type", ""))
    if layout == "ggml":
        return ARCHITECTURES.get(model_type, model_type)
    if layout in ("vllm", "sglang"):
        return str((getattr(config, "architectures", None) or [model_type])[0])
    return "gemma" if model_type.startswith(("gemma2", "gemma3")) else "decoder"


def operands_of(alignment: Alignment, program: Program) -> tuple[dict[str, Callable[[torch.Tensor], Read]], set[str]]:
    """Return what the products of a recording read of their activations, by node, and the types that they read."""
    graph = alignment.source.metadata.get("graph") or {}
    readers: dict[str, Callable[[torch.Tensor], Read]] = {}
    kinds: set[str] = set()
    nodes = {node.name: node for node in program.graph.nodes}
    for site in program.sites:
        known = alignment.tensors.names(site)
        node = nodes.get(site.node)
        if known is None or node is None or not traits_of(node).reads_memory:
            continue
        read = {kind for name in known[0] if (kind := _reads(graph, name)) is not None}
        if len(read) == 1:
            (kind,) = read
            readers[site.node] = READERS[kind]
            kinds.add(kind)
    return readers, kinds


def arithmetic_of(
    alignment: Alignment, program: Program, operands: Mapping[str, Callable[[torch.Tensor], Read]], *, as_deployed: bool
) -> CoarseArithmetic:
    """Return what an engine computes more coarsely than float32, op by op.

    Args:
        alignment: Of a recording.
        program: The baseline's.
        operands: What products with weights of their own read, as `operands_of` has it.
        as_deployed: Whether the recording is of the engine as it runs by default.
    """
    kinds = operands_of(alignment, program)[1] | hidden_kinds(alignment)
    hidden = max((ROUNDOFF[kind] for kind in hidden_kinds(alignment)), default=0.0)
    table, weights = alignment.table, {node.name for node in weight_only_nodes(program)}
    summed: dict[str, Accumulation] = {}
    readers = {**operands, **{node: READERS[_AS_READ[dtype]] for node, dtype in alignment.rounded.items()}}
    cached = getattr(torch, table.deployed) if as_deployed and table.deployed else None
    for node in program.graph.nodes:
        if node.op != "call_function" or not traits_of(node).reads_memory or node.name in operands:
            continue
        if any(_origin(source).name in weights for source in node.all_input_nodes):
            if hidden:  # of experts; a roundoff is the most that a number is off, and about twice what most are
                summed[node.name] = Accumulation(u_operands=hidden / 2)
        elif cached is not None:
            readers[node.name] = READERS[_AS_READ[cached]]
            u = unit_roundoff(cached)  # what attention adds up over its keys is kept so, too
            of_values = op_name(_origin(node.all_input_nodes[0])).endswith("softmax")
            summed[node.name] = Accumulation(u_sums=u) if of_values else Accumulation(u_contexts=u)
    rounded = dict(alignment.rounded)
    if cached is not None:
        rounded |= {program.output_nodes[name]: cached for name in program.caches.values()}
    said = [_WORDS.get(kind, "8-bit activations") for kind in sorted(kinds)]
    said += [f"{table.deployed} keys and values"] * (cached is not None)
    said += ["float16 tables"] * bool(alignment.rounded)
    return CoarseArithmetic(readers, summed, rounded, tuple(dict.fromkeys(said)))


_AS_READ = {torch.float16: "F16", torch.bfloat16: "BF16"}
_WORDS = {"F16": "float16 activations", "BF16": "bfloat16 activations"}


def _origin(node: Node) -> Node:
    """Return what a tensor is rows, a view or a copy of."""
    while (is_view(node) or op_name(node) in _KEEPS) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


_KEEPS = ("index", "index_select", "clone", "contiguous", "type_as", "to", "_to_copy", "dropout")


def _reads(graph: dict[str, Any], site: str) -> str | None:
    """Return what a product of the recording reads of its activations; None where it reads them as they are."""
    node = graph.get(site) or {}
    if "op" not in node:
        return READ_AS.get(_type_of_weight(graph, site) or "")
    if node["op"] == "add":  # a product with a bias
        node = next((one for name in node["sources"] if "reads" in (one := graph.get(name) or {})), node)
    reads = node.get("reads")
    return reads if reads in READERS else None


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
    mixed = {str(node["reads"]) for node in graph.values() if node.get("op") == "qmoe" and "reads" in node}
    return {READ_AS[kind] for kind in types if kind in READ_AS} | mixed
