"""Maps each node of an ONNX graph to the weight, bias and table that it reads, by the name of its value.

    /model/layers.0/attn/o_proj/MatMul/output_0:weight     [out, in], whether it is a MatMul, a Gemm or a MatMulNBits
    /model/layers.0/attn/qkv_proj/Add/output_0:bias        the vector that is added
    /model/embed_tokens/Gather/output_0:weight             the table, also one that is a head turned round
    /model/layers.0/input_layernorm/output_0:weight        of a norm, whatever it is fused with

An initializer is found through what only turns, casts or dequantizes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glassengine.errors import CorruptError
from glassengine.plugins.serving.onnx.quantized import Numbers, of_experts, of_gather, of_linear, of_matmul
from glassengine.program.onnx.stored.file import OnnxFile, constant_of, tensor_of, torch_dtype

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
    """Nodes and initializers of a file by name.

    Args:
        file: Checked.
    """

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
