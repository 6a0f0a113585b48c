"""Facts about the nodes of an ONNX graph beside their values: what they read, and the numbers they use."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from glassengine.numerics.quantization.activations import READERS
from glassengine.plugins.serving.onnx.held import NORMS, HeldGraph, attributes_of
from glassengine.plugins.serving.onnx.quantized import of_matmul
from glassengine.program.onnx.stored.session import start

if TYPE_CHECKING:
    import onnx

_ATTENTION = {"GroupQueryAttention": (7, 8), "RotaryEmbedding": (2, 3)}
"""Operator -> places of the tables of cosines and sines among its inputs."""
_INT8 = 4
"""Level of accuracy at which activations may be rounded to integers of eight bits."""
_FOUR = 4


def facts_of(graph: HeldGraph, names: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return site -> operator, sources, literals, and what a product reads of its activations.

    Args:
        graph: Of the file.
        names: Value -> its name in the recording.
    """
    facts: dict[str, dict[str, Any]] = {}
    bases: dict[tuple[str, str], float | None] = {}
    for node in graph.nodes:
        if node.op_type == "Constant":
            continue
        one: dict[str, Any] = {
            "op": node.op_type.lower(),
            "sources": [names.get(name, name) for name in node.input if name],
        }
        literals = dict(_literals(node, graph, bases))
        if literals:
            one["literals"] = literals
        reads = reads_of(node)
        if reads is not None:
            one["reads"] = reads
        for name in node.output:
            if name:
                facts[names.get(name, name)] = one
    return facts


def _literals(
    node: onnx.NodeProto, graph: HeldGraph, bases: dict[tuple[str, str], float | None]
) -> Iterator[tuple[str, float]]:
    attributes = attributes_of(node)
    if node.op_type in NORMS and "epsilon" in attributes:
        yield "eps", float(attributes["epsilon"])
    if node.op_type in ("GroupQueryAttention", "MultiHeadAttention"):
        if attributes.get("scale"):
            yield "attention scale", float(attributes["scale"])
        yield "soft cap of the attention", float(attributes.get("softcap", 0.0))
        yield "heads", float(attributes.get("num_heads", 0))
        if "kv_num_heads" in attributes:
            yield "key and value heads", float(attributes["kv_num_heads"])
            yield "window", float(attributes.get("local_window_size", -1))
    places = _ATTENTION.get(node.op_type)
    if places is None or (node.op_type == "GroupQueryAttention" and not attributes.get("do_rotary", 0)):
        return
    tables = (node.input[places[0]], node.input[places[1]]) if len(node.input) > places[1] else None
    if tables is not None:
        if tables not in bases:
            bases[tables] = _base(graph.tensor(tables[0]), graph.tensor(tables[1]))
        if (base := bases[tables]) is not None:
            yield "freq_base", base


def _base(cosines: Tensor | None, sines: Tensor | None) -> float | None:
    """Return the base of the frequencies that tables [positions, half of the rotated elements] were made with."""
    if cosines is None or sines is None or cosines.dim() != 2 or cosines.shape != sines.shape:
        return None
    positions, pairs = cosines.shape
    if positions < 2 or pairs < 2:
        return None
    angles = torch.atan2(sines[1].double(), cosines[1].double())
    if not bool((angles > 0).all()):
        return None
    # The slowest one, at a position where its angle is about one: few digits are lost.
    at = max(1, min(positions - 1, int(1.0 / float(angles[-1]))))
    slowest = float(torch.atan2(sines[at, -1].double(), cosines[at, -1].double())) / at
    base = slowest ** (-pairs / (pairs - 1)) if slowest > 0 else math.inf
    expected = base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    # Frequencies that are scaled otherwise have no base.
    is_plain = bool(((angles - expected).abs() <= 1e-3 * expected).all())
    return base if is_plain else None


def reads_of(node: onnx.NodeProto) -> str | None:
    """Return what a product reads of its activations, as `READERS` calls it; None for what they are."""
    if node.op_type not in ("MatMulNBits", "QMoE"):
        return None
    attributes = attributes_of(node)
    is_level = int(attributes.get("accuracy_level", 0)) == _INT8
    bits, block = int(attributes.get("bits", 4)), int(attributes.get("block_size", 0))
    name = f"INT8_{block}"
    if node.op_type == "QMoE":
        # Experts of eight bits in blocks have a kernel that rounds, and no other.
        is_rounded = block > 0 and (is_level or int(attributes.get("expert_weight_bits", 4)) != _FOUR)
        return name if is_rounded and name in READERS else None
    if not is_level:
        return None
    return name if name in READERS and _rounds(bits, block) else None


@functools.lru_cache(maxsize=32)
def _rounds(bits: int, block: int) -> bool:
    """Whether ONNX Runtime on this machine rounds the activations of such a product: it has no kernel for some."""
    from onnx import TensorProto, helper

    rows, columns = 16, 2 * block
    random = np.random.default_rng(0)
    packed = random.integers(0, 256, (rows, 2, block * bits // 8), dtype=np.uint8)
    scales = np.ones((rows, 2), np.float32)
    x = random.standard_normal((1, columns)).astype(np.float32)
    options: dict[str, Any] = {"bits": bits, "block_size": block, "K": columns, "N": rows}
    node = helper.make_node(
        "MatMulNBits", ["x", "b", "s"], ["y"], domain="com.microsoft", accuracy_level=_INT8, **options
    )
    weights = [
        helper.make_tensor("b", TensorProto.UINT8, packed.shape, packed.tobytes(), raw=True),
        helper.make_tensor("s", TensorProto.FLOAT, scales.shape, scales.tobytes(), raw=True),
    ]
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)]
    results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, rows])]
    graph = helper.make_graph([node], "probe", values, results, weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    import onnxruntime

    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = 1
    session_options.log_severity_level = 4
    (found,) = start(model.SerializeToString(), session_options).run(None, {"x": x})
    weight = of_matmul(options, [None, torch.from_numpy(packed), torch.from_numpy(scales)]).value.double()
    given = torch.from_numpy(x)
    plain = given.double() @ weight.T
    rounded = READERS[f"INT8_{block}"](given).values.double() @ weight.T
    result = torch.from_numpy(found).double()
    return float((result - rounded).abs().max()) < float((result - plain).abs().max())
