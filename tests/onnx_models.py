"""Small ONNX models, as other authors would write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx


def onnx_text(text: str, weights: Mapping[str, Any] | None = None, *, opset: int = 20) -> onnx.ModelProto:
    """Return a checked model of a graph in ONNX's own text form.

    Args:
        text: The graph: `name (inputs) => (outputs) {nodes}`; functions may follow.
        weights: Initializers: name -> array.
        opset: Version of the operator set.
    """
    import onnx

    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}, "local" : 1]>\n{text}')
    for name, value in (weights or {}).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    onnx.checker.check_model(model)
    return model


def onnx_mlp(
    *, activation: str = "Relu", scale: float = 1.0, epsilon: float = 1e-5, width: int = 16
) -> onnx.ModelProto:
    """Return a normalization, two products, an activation and a softmax over rows of `width` numbers.

    Args:
        activation: Its operator.
        scale: Of the second matrix.
        epsilon: Of the normalization.
        width: Of the rows.
    """
    generator = np.random.default_rng(0)

    def matrix(*shape: int) -> Any:
        return generator.standard_normal(shape).astype(np.float32)

    weights = {
        "first": matrix(width, 2 * width),
        "second": scale * matrix(2 * width, 8),
        "gain": np.ones(width, np.float32),
        "shift": np.zeros(width, np.float32),
    }
    weights = {name: value.astype(np.float32) for name, value in weights.items()}
    text = f"""
    mlp (float[N, {width}] x) => (float[N, 8] y) {{
        normal = LayerNormalization <axis = -1, epsilon = {epsilon}> (x, gain, shift)
        wide = MatMul (normal, first)
        "/mlp/act" = {activation} (wide)
        scores = MatMul ("/mlp/act", second)
        y = Softmax <axis = -1> (scores)
    }}
    """
    return onnx_text(text, weights)


def onnx_control_flow(*, opset: int = 20) -> onnx.ModelProto:
    """Return a branch and a loop, which read values from around them, and a call of a function of the model."""
    generator = np.random.default_rng(1)
    weights = {
        "matrix": generator.standard_normal((4, 4)).astype(np.float32),
        "two": np.float32(2),
        "zero": np.float32(0),
        "times": np.int64(3),
    }
    text = """
    flow (float[N, 4] x) => (float[N, 4] y, float[3] means, float[N, 4] again) {
        total = ReduceSum <keepdims = 0> (x)
        positive = Greater (total, zero)
        chosen = If (positive) <
            then_branch = one () => (float[N, 4] t) { doubled = Mul (x, two) t = Tanh (doubled) },
            else_branch = other () => (float[N, 4] e) { e = Neg (x) }
        >
        last, means = Loop (times, , chosen) <
            body = body (int64 i, bool c, float[N, 4] state) => (bool c2, float[N, 4] next, float mean) {
                product = MatMul (state, matrix)
                next = Tanh (product)
                c2 = Identity (c)
                mean = ReduceMean <keepdims = 0> (next)
            }
        >
        y = local.shifted <by = 0.5> (last)
        again = Identity (y)
    }
    <domain: "local", opset_import: ["" : 20]>
    shifted <by> (a) => (b) { amount = Constant <value_float: float = @by> () b = Add (a, amount) }
    """
    return onnx_text(text.replace('["" : 20]', f'["" : {opset}]'), weights, opset=opset)
