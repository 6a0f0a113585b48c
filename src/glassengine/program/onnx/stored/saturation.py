"""Products of uint8 and int8, which many x86 processors add in pairs of 16 bits that overflow.

The numbers of a weight stay the same if it is stored as uint8 with a zero point that is 128 larger, and products of
uint8 are exact everywhere. So the graph as it is written is run in this form: what a kernel of the user's session loses
by saturation is not a mistake of the file, but it is a cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx

    from glassengine.program.onnx.stored.file import OnnxFile

_SHIFT = 128
_OF_PRODUCTS = {"MatMulInteger": (1, 3), "ConvInteger": (1, 3)}
_OF_OPERATORS = {"QLinearMatMul": (3, 5), "QLinearConv": (3, 5), "QGemm": (3, 5)}
"""Operator -> places of its weight and of the zero point of that; the zero point of what it multiplies is at 2."""


def in_uint8(file: OnnxFile, model: onnx.ModelProto) -> bool:
    """Store weights of int8 that uint8 is multiplied by as uint8.

    Args:
        file: Whose weights they are.
        model: A copy of its graph, which is changed.

    Returns:
        Whether there are any.
    """
    from onnx import TensorProto, numpy_helper

    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    made: set[str] = set()

    def shifted(name: str) -> str:
        new = f"{name} in uint8"
        if new not in made:
            made.add(new)
            value = (file.weights()[name].short() + _SHIFT).byte() if name else None
            array = np.array(_SHIFT, np.uint8) if value is None else value.contiguous().numpy()
            model.graph.initializer.append(numpy_helper.from_array(array, new))
        return new

    for node in model.graph.node:
        places = (_OF_PRODUCTS | _OF_OPERATORS).get(node.op_type)
        if places is None or types.get(node.input[places[0]]) != TensorProto.INT8:
            continue
        if node.op_type in _OF_OPERATORS and types.get(node.input[2]) != TensorProto.UINT8:
            continue
        node.input.extend([""] * (places[1] + 1 - len(node.input)))
        zero = node.input[places[1]]
        if zero and zero not in types:
            continue
        for place in places:
            node.input[place] = shifted(node.input[place])
    return bool(made)
