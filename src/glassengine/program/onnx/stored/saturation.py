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
_OPERATORS = {
    **dict.fromkeys(("MatMulInteger", "ConvInteger"), (1, 3)),
    **dict.fromkeys(("QLinearMatMul", "QLinearConv", "QGemm"), (3, 5)),
}
"""Operator -> places of its weight and of the zero point of that."""


def in_uint8(file: OnnxFile, model: onnx.ModelProto) -> None:
    """Store weights of int8 that uint8 is multiplied by as uint8, in a copy of a file's graph."""
    from onnx import TensorProto, numpy_helper

    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for node in model.graph.node:
        places = _OPERATORS.get(node.op_type, (0, 0))
        if not any(places) or types.get(node.input[places[0]]) != TensorProto.INT8:
            continue
        node.input.extend([""] * (places[1] + 1 - len(node.input)))
        # The zero point of what is multiplied is at 2: that of integers which the graph makes itself is uint8.
        is_uint8 = types.get(node.input[2], TensorProto.UINT8) == TensorProto.UINT8
        if not is_uint8 or node.input[places[1]] not in (*types, ""):
            continue
        for place in places:
            name = node.input[place]
            node.input[place] = new = f"{name} in uint8"
            if new not in types:
                types[new] = TensorProto.UINT8
                own = file.weights()[name].numpy() if name else np.array(0)
                value = (own.astype(np.int16) + _SHIFT).astype(np.uint8)
                model.graph.initializer.append(numpy_helper.from_array(value, new))
