"""The floats that a quantized ONNX file stands for: the same graph without its grids.

    QDQ        x -> QuantizeLinear -> DequantizeLinear -> op      becomes  x -> op
    QOperator  QLinearConv(x, ..., w, ..., b)                     becomes  Conv(x, w, b)
    dynamic    DynamicQuantizeLinear -> MatMulInteger -> Cast -> Mul by both scales    becomes  MatMul

Values keep the names that the file has for their floats, so that the two are judged beside each other by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from glassengine.errors import UsageError
from glassengine.program.onnx.file import OnnxFile, free_names
from glassengine.program.onnx.grids import SMALL, GridNames, grids_of

Exact = Callable[[Tensor, Tensor], Tensor | None]
"""Takes the numbers that a quantized weight stands for and their steps; returns what was quantized, if known."""

_OF_TWO = ("Add", "Mul")
_OF_ONE = ("Sigmoid", "LeakyRelu", "Softmax", "AveragePool", "GlobalAveragePool", "ReduceMean")
_RELU6 = 6.0
_OWN = ("channels_last", "opset")
"""Attributes that only the operators on integers have."""


def without_grids(file: OnnxFile, exact: Exact) -> onnx.ModelProto:
    """Return the graph of a quantized file in floats.

    Raises:
        UsageError: The file computes with integers in a way that is not known.
    """
    return _Twin(file, exact).model()


class _Twin:
    def __init__(self, file: OnnxFile, exact: Exact) -> None:
        self._file, self._exact = file, exact
        self._grids, self._weights = grids_of(file)
        self._floats: dict[str, str] = {}
        """Integers, or numbers made of them -> the floats that they stand for."""
        self._scales: set[str] = {grid.scale for grid in self._grids.values()}
        self._products: dict[str, onnx.NodeProto] = {}
        """Products of integers, and what is made of them before they are scaled."""
        self._nodes: list[onnx.NodeProto] = []
        self._held: dict[str, Tensor] = {}

    def model(self) -> onnx.ModelProto:
        source = self._file.model
        returned = {value.name for value in source.graph.output}
        for node in source.graph.node:
            self._take(node, returned)
        if self._products:
            raise _unknown(next(iter(self._products.values())))
        read = {name for node in self._nodes for name in node.input}
        inner = (entry.g for node in self._nodes for entry in node.attribute if entry.HasField("g"))
        read |= {name for graph in inner for name in free_names(graph)}
        graph = helper.make_graph(self._nodes, source.graph.name or "graph", source.graph.input, source.graph.output)
        for name, tensor in {**self._file.weights(), **self._held}.items():
            if name in read and name not in {made for node in self._nodes for made in node.output}:
                plain = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
                graph.initializer.append(numpy_helper.from_array(plain.contiguous().numpy(), name))
        return helper.make_model(graph, opset_imports=list(source.opset_import), ir_version=max(4, source.ir_version))

    def _take(self, node: onnx.NodeProto, returned: set[str]) -> None:
        kind, inputs = node.op_type, list(node.input)
        if kind == "DynamicQuantizeLinear":
            self._floats[node.output[0]] = self._float(inputs[0])
            self._scales.update(node.output[1:2])
        elif kind == "QuantizeLinear":
            self._floats[node.output[0]] = self._float(inputs[0])
            self._cut(node.output[0])
        elif kind == "DequantizeLinear":
            self._floats[node.output[0]] = self._float(inputs[0])
            if node.output[0] in returned and node.output[0] != self._float(inputs[0]):
                self._add("Identity", [self._float(inputs[0])], node.output[0], node)
        elif kind in ("MatMulInteger", "ConvInteger"):
            made = copy.deepcopy(node)
            made.op_type = kind.removesuffix("Integer")
            del made.input[:]
            made.input.extend(map(self._float, inputs[:2]))
            self._products[node.output[0]] = made
        elif kind == "Cast" and inputs[0] in self._products:
            self._products[node.output[0]] = self._products.pop(inputs[0])
        elif kind == "Mul" and self._scales.intersection(inputs):
            product = next((name for name in inputs if name in self._products), None)
            if product is None:
                self._scales.add(node.output[0])
                return
            made = self._products.pop(product)
            made.output[0] = node.output[0]
            self._nodes.append(made)
        elif kind.startswith("QLinear") or kind == "QGemm":
            self._of_operator(node)
        else:
            self._of_other(node)

    def _of_operator(self, node: onnx.NodeProto) -> None:
        kind, inputs = node.op_type.removeprefix("QLinear"), list(node.input)
        if kind in ("Conv", "MatMul") or kind in _OF_TWO:
            read = [inputs[0], inputs[3], *(inputs[8:9] if kind == "Conv" else [])]
        elif kind == "QGemm":
            kind, read = "Gemm", [inputs[0], inputs[3], *inputs[6:7]]
        elif kind in _OF_ONE:
            read = inputs[:1]
        elif kind == "Concat":
            read = inputs[2::3]
        else:
            raise _unknown(node)
        made = node.output[0]
        stands_for = self._grids[made].stands_for if made in self._grids else made
        self._floats[made] = stands_for
        self._add(kind, [self._float(name) for name in read if name], stands_for, node)
        self._cut(made)

    def _of_other(self, node: onnx.NodeProto) -> None:
        """An op that takes floats, or only moves integers: it moves what they stand for."""
        made = copy.deepcopy(node)
        del made.input[:]
        made.input.extend(self._float(name) for name in node.input)
        is_moved = any(name in self._grids and mine != name for name, mine in zip(node.input, made.input, strict=True))
        for place, name in enumerate(node.output):
            if is_moved and name in self._grids:
                self._floats[name] = self._grids[name].stands_for
                made.output[place] = self._floats[name]
        if node.domain == "com.microsoft" and "Quant" in node.op_type:
            raise _unknown(node)
        self._nodes.append(made)

    def _float(self, name: str) -> str:
        """Return the name of the floats that a value or weight stands for."""
        if name in self._floats:
            return self._floats[name]
        grid = self._grids.get(name)
        if grid is None or name not in self._weights or grid.scale not in self._weights:
            return name
        stands_for = grid.stands_for if grid.stands_for not in self._held else name
        self._floats[name] = stands_for if stands_for != name else f"{name}_floats"
        self._held[self._floats[name]] = self._weight(name, grid)
        return self._floats[name]

    def _cut(self, integers: str) -> None:
        """Do what the ends of a grid do on purpose: a quantizer leaves out a relu before a grid that begins at 0."""
        grid = self._grids.get(integers)
        zero = self._weights.get(grid.zero) if grid is not None and grid.zero is not None else None
        if grid is None or zero is None or grid.scale not in self._weights or zero.dtype not in SMALL:
            return
        limits = torch.iinfo(zero.dtype)
        if not bool((zero.long() == limits.min).all()):
            return
        source = self._floats[integers]
        self._floats[integers] = f"{source}_from_0"
        highest = (limits.max - limits.min) * self._weights[grid.scale].double()
        inputs = [source]
        if bool(((highest - _RELU6).abs() < 1e-5).all()):
            for end, value in (("low", 0.0), ("high", _RELU6)):
                inputs.append(f"{source}_{end}")
                self._held[inputs[-1]] = torch.tensor(value)
        self._add("Clip" if len(inputs) > 1 else "Relu", inputs, self._floats[integers], None)

    def _weight(self, name: str, grid: GridNames) -> Tensor:
        integers = self._weights[name]
        numbers = grid.numbers(integers, self._weights)
        steps = grid.step(self._weights, integers).expand(numbers.shape)
        known = self._exact(numbers, steps)
        return (numbers if known is None else known).to(self._weights[grid.scale].dtype)

    def _add(self, kind: str, inputs: list[str], output: str, like: onnx.NodeProto | None) -> None:
        node = helper.make_node(kind, inputs, [output], name=like.name if like is not None else output)
        if like is not None and kind != "Identity":
            node.attribute.extend(entry for entry in like.attribute if entry.name not in _OWN)
        self._nodes.append(node)


def _unknown(node: onnx.NodeProto) -> UsageError:
    return UsageError(
        f"a quantized file with {node.op_type} is judged only against an ONNX file of floats",
        got=node.name or node.output[0],
        hint="export the baseline to ONNX, and give the file that was quantized as BASELINE",
    )
