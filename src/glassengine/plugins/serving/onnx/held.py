"""Facts about the nodes of an ONNX graph: the weight, bias and table that each reads, and the numbers that it uses.

    /model/layers.0/attn/o_proj/MatMul/output_0:weight     [out, in], whether it is a MatMul, a Gemm or a MatMulNBits
    /model/layers.0/attn/qkv_proj/Add/output_0:bias        the vector that is added
    /model/embed_tokens/Gather/output_0:weight             the table, also one that is a head turned round
    /model/layers.0/input_layernorm/output_0:weight        of a norm, whatever it is fused with

An initializer is found through what only turns, casts or dequantizes it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from glassengine.errors import CorruptError
from glassengine.numerics.activations import READERS
from glassengine.plugins.serving.onnx.quantized import Numbers, of_experts, of_gather, of_linear, of_matmul
from glassengine.program.onnx.file import OnnxFile, constant_of, tensor_of, torch_dtype
from glassengine.program.onnx.session import SessionSettings, start

if TYPE_CHECKING:
    import onnx


NORMS = {
    "LayerNormalization": 1,
    "SimplifiedLayerNormalization": 1,
    "RMSNormalization": 1,
    "SkipLayerNormalization": 2,
    "SkipSimplifiedLayerNormalization": 2,
}
"""Operator -> place of its weight among its inputs."""
_DEEPEST = 8


@dataclass(frozen=True)
class Held:
    """A weight of a node, not read yet.

    Attributes:
        stored: Initializers that it is made of.
        read: Reads it.
    """

    stored: tuple[str, ...]
    read: Callable[[], Numbers]


class HeldGraph:
    """Nodes and initializers of a file by name."""

    def __init__(self, file: OnnxFile) -> None:
        self.file = file
        graph = file.model.graph
        self.nodes: list[onnx.NodeProto] = list(graph.node)
        self.makers = {name: node for node in self.nodes for name in node.output if name}
        self._protos = {proto.name: proto for proto in graph.initializer if torch_dtype(proto.data_type) is not None}
        for node in self.nodes:
            constant = constant_of(node)
            if constant is not None and torch_dtype(constant.data_type) is not None:
                self._protos[node.output[0]] = constant

    def tensor(self, name: str) -> Tensor | None:
        """Return an initializer or constant; None where there is none of that name."""
        proto = self._protos.get(name)
        return None if proto is None else tensor_of(proto, self.file.path)

    def type_of(self, name: str) -> str:
        """Return the element type of an initializer, in ONNX's words: FLOAT, UINT8."""
        import onnx

        return str(onnx.TensorProto.DataType.Name(self._protos[name].data_type)).lower()

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the sizes of an initializer; None where there is none of that name."""
        proto = self._protos.get(name)
        return None if proto is None else tuple(proto.dims)

    def held(self) -> dict[str, Held]:
        """Return the weights of all nodes."""
        weights: dict[str, Held] = {}
        for node in self.nodes:
            made = next((name for name in node.output if name), None)
            if made is not None:
                weights |= {f"{made}:{part}": one for part, one in self._of_node(node).items() if one is not None}
        return weights

    def _of_node(self, node: onnx.NodeProto) -> dict[str, Held | None]:
        kind, inputs = node.op_type, [*node.input, *[""] * 16]
        if kind == "MatMul":
            return {"weight": _turned(self.resolve(inputs[1]))}
        if kind == "Gemm":
            weight = self.resolve(inputs[1])
            is_turned = bool(attributes_of(node).get("transB", 0))
            return {"weight": weight if is_turned else _turned(weight), "bias": self.resolve(inputs[2])}
        if kind == "MatMulNBits":
            return {"weight": self._of_parts(node, of_matmul, inputs[1:5]), "bias": self.resolve(inputs[5])}
        if kind == "Gather":
            table = self.resolve(inputs[0])
            return {"weight": table} if table is not None and self._is_table(inputs[0]) else {}
        if kind == "GatherBlockQuantized":
            return {"weight": self._of_table(node)}
        if kind in NORMS:
            at = NORMS[kind]
            return {"weight": self.resolve(inputs[at]), "bias": self.resolve(inputs[at + 1])}
        if kind in ("Add", "Mul"):
            part = "bias" if kind == "Add" else "weight"
            vectors = [name for name in node.input if len(self._shape(name) or ()) == 1 and self._shape(name) != (1,)]
            return {part: self.resolve(vectors[0])} if len(vectors) == 1 else {}
        if kind == "GroupQueryAttention":
            return {
                "sinks": self.resolve(inputs[11]),
                "q_norm": self.resolve(inputs[14]),
                "k_norm": self.resolve(inputs[15]),
            }
        if kind in ("QMoE", "MoE"):
            return self._of_experts(node)
        return {}

    def _of_experts(self, node: onnx.NodeProto) -> dict[str, Held | None]:
        inputs = [*node.input, *[""] * 16]
        if node.op_type == "MoE":
            parts = {"weight1": 2, "bias1": 3, "weight2": 4, "bias2": 5}
            return {part: self.resolve(inputs[at]) for part, at in parts.items()}
        weights: dict[str, Held | None] = {"bias1": self.resolve(inputs[4]), "bias2": self.resolve(inputs[7])}
        for part, at, zero in (("weight1", 2, 11), ("weight2", 5, 12)):
            names = [name for name in (inputs[at], inputs[at + 1]) if name]
            if len(names) == 2 and all(name in self._protos for name in names):
                weights[part] = Held(tuple(names), lambda at=at, zero=zero: self._experts(node, at, zero))  # type: ignore[misc]
        return weights

    def _experts(self, node: onnx.NodeProto, at: int, zero: int) -> Numbers:
        names = [*node.input, *[""] * 16]
        packed, scales = self.tensor(names[at]), self.tensor(names[at + 1])
        assert packed is not None and scales is not None
        return of_experts(attributes_of(node), packed, scales, self.tensor(names[zero]))

    def _of_parts(
        self, node: onnx.NodeProto, make: Callable[[Mapping[str, Any], list[Tensor | None]], Numbers], names: list[str]
    ) -> Held | None:
        stored = tuple(name for name in names if name)
        if not stored or any(name not in self._protos for name in stored):
            return None
        attributes = attributes_of(node)
        return Held(stored, lambda: make(attributes, [None, *(self.tensor(name) for name in names)]))

    def _of_table(self, node: onnx.NodeProto) -> Held | None:
        inputs = [*node.input, *[""] * 4]
        data = self._through(inputs[0], ("Reshape",))
        stored = tuple(name for name in (data, inputs[2], inputs[3]) if name)
        if data is None or any(name not in self._protos for name in stored):
            return None
        attributes, plain = attributes_of(node), self.type_of(data)

        def read() -> Numbers:
            table, scales, zeros = self.tensor(data), self.tensor(inputs[2]), self.tensor(inputs[3])
            assert table is not None and scales is not None
            rows = scales.shape[0] if scales.dim() > 1 else _rows_of(self, inputs[0], table)
            if rows < 1 or table.numel() % rows:
                raise CorruptError("a quantized table has no whole rows", got=f"{list(table.shape)} in {rows} rows")
            return of_gather(attributes, [table.reshape(rows, -1), None, scales, zeros], plain)

        return Held(stored, read)

    def _through(self, name: str, kinds: tuple[str, ...]) -> str | None:
        for _ in range(_DEEPEST):
            if name in self._protos:
                return name
            node = self.makers.get(name)
            if node is None or node.op_type not in kinds:
                return None
            name = node.input[0]
        return None

    def _shape(self, name: str) -> tuple[int, ...] | None:
        source = self._through(name, ("Cast", "Identity"))
        return None if source is None or not self._is_float(source) else self.shape_of(source)

    def _is_float(self, name: str) -> bool:
        dtype = torch_dtype(self._protos[name].data_type)
        return dtype is not None and dtype.is_floating_point

    def _is_table(self, name: str) -> bool:
        source = self._through(name, ("Transpose", "Cast", "Identity", "DequantizeLinear"))
        return source is not None and len(self.shape_of(source) or ()) == 2

    def resolve(self, name: str, depth: int = 0) -> Held | None:
        """Return the weight that a value is, through what turns, casts or dequantizes it; None where it is none."""
        if name in self._protos:
            return Held((name,), lambda: _plain(self.tensor(name), self.type_of(name)))
        node = self.makers.get(name)
        if node is None or depth > _DEEPEST:
            return None
        if node.op_type == "DequantizeLinear":
            names = list(node.input)
            if any(one and one not in self._protos for one in names):
                return None
            attributes = attributes_of(node)
            stored = tuple(one for one in names if one)
            return Held(stored, lambda: of_linear(attributes, [self.tensor(one) for one in names]))
        if node.op_type in ("Cast", "Identity"):
            return self.resolve(node.input[0], depth + 1)
        if node.op_type == "Transpose":
            inner = self.resolve(node.input[0], depth + 1)
            order = list(attributes_of(node).get("perm", ()))
            return _turned(inner) if order in ([1, 0], []) else None
        return None


def _rows_of(graph: HeldGraph, name: str, table: Tensor) -> int:
    """Return the number of rows that a reshape gives a table; its own where it is not reshaped."""
    node = graph.makers.get(name)
    sizes = graph.tensor(node.input[1]) if node is not None and node.op_type == "Reshape" else None
    return int(sizes.flatten()[0]) if sizes is not None and sizes.numel() else int(table.shape[0])


def _plain(tensor: Tensor | None, kind: str) -> Numbers:
    assert tensor is not None
    names = {"float": "F32", "float16": "F16", "bfloat16": "BF16", "double": "F64"}
    return Numbers(tensor.float(), None, (names.get(kind, kind.upper()),))


def _turned(held: Held | None) -> Held | None:
    if held is None:
        return None

    def read() -> Numbers:
        found = held.read()
        if found.value.dim() != 2:
            return found
        return replace(found, value=found.value.T, step=None if found.step is None else found.step.T)

    return Held(held.stored, read)


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node: numbers, texts and lists of them."""
    from onnx import helper

    attributes = {}
    for entry in node.attribute:
        value = helper.get_attribute_value(entry)
        attributes[entry.name] = value.decode(errors="replace") if isinstance(value, bytes) else value
    return attributes


def whole_tensor(value: object) -> Tensor | None:
    """Return what a session returned as a tensor; None where it is no tensor of numbers."""
    kind = getattr(getattr(value, "dtype", None), "kind", "O")
    if kind not in "biuf":
        return None
    try:
        return torch.from_numpy(value)
    except TypeError:
        return None


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
    settings = SessionSettings({"intra_op_num_threads": 1})
    (found,) = start(model.SerializeToString(), settings.options()).run(None, {"x": x})
    weight = of_matmul(options, [None, torch.from_numpy(packed), torch.from_numpy(scales)]).value.double()
    given = torch.from_numpy(x)
    plain = given.double() @ weight.T
    rounded = READERS[f"INT8_{block}"](given).values.double() @ weight.T
    result = torch.from_numpy(found).double()
    return float((result - rounded).abs().max()) < float((result - plain).abs().max())
