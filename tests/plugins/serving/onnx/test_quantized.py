"""Weights in blocks of a few bits, beside what ONNX Runtime makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from glassengine.errors import CorruptError
from glassengine.plugins.serving.onnx.quantized import of_experts, of_gather, of_matmul, unpacked
from glassengine.program.onnx.session import start


def run(kind: str, inputs: dict[str, Any], weights: dict[str, np.ndarray[Any, Any]], **attributes: Any) -> torch.Tensor:
    node = helper.make_node(kind, [*inputs, *weights], ["y"], domain="com.microsoft", **attributes)
    if kind == "GatherBlockQuantized":
        first, *rest = weights
        node = helper.make_node(kind, [first, *inputs, *rest], ["y"], domain="com.microsoft", **attributes)
    values = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in inputs.items()
    ]
    held = [numpy_helper.from_array(x, n) for n, x in weights.items()]
    graph = helper.make_graph(
        [node], "one", values, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], held
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return torch.from_numpy(start(model.SerializeToString(), options).run(None, inputs)[0])


@pytest.mark.parametrize("columns", [64, 80])
@pytest.mark.parametrize("with_zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_have_the_weights_of_the_runtime(bits: int, with_zeros: bool, columns: int) -> None:
    random, rows, block = np.random.default_rng(0), 8, 32
    blocks = -(-columns // block)
    packed = random.integers(0, 256, (rows, blocks, block * bits // 8), dtype=np.uint8)
    parts = {"b": packed, "s": random.standard_normal(rows * blocks).astype(np.float32)}
    if with_zeros:
        parts["z"] = random.integers(0, 256, rows * (-(-blocks * bits // 8)), dtype=np.uint8)
    options = {"K": columns, "N": rows, "bits": bits, "block_size": block}
    expected = run("MatMulNBits", {"x": np.eye(columns, dtype=np.float32)}, parts, **options).T
    tensors = [torch.from_numpy(parts[name]) for name in parts]
    found = of_matmul(options, [None, *tensors])
    assert found.value.shape == (rows, columns) and found.step is not None
    torch.testing.assert_close(found.value, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(found.step[:, 0], tensors[1].reshape(rows, blocks)[:, 0].abs())


@pytest.mark.parametrize("with_zeros", [False, True])
def test_tables_have_the_rows_of_the_runtime(with_zeros: bool) -> None:
    random, rows, width, block = np.random.default_rng(1), 6, 64, 32
    parts: dict[str, np.ndarray[Any, Any]] = {"b": random.integers(0, 256, (rows, width // 2), dtype=np.uint8)}
    parts["s"] = random.standard_normal((rows, width // block)).astype(np.float32)
    if with_zeros:
        parts["z"] = random.integers(0, 256, (rows, 1), dtype=np.uint8)
    options = {"bits": 4, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
    expected = run("GatherBlockQuantized", {"i": np.arange(rows)}, parts, **options)
    tensors = [torch.from_numpy(one) for one in parts.values()]
    found = of_gather(options, [tensors[0], None, *tensors[1:]], "uint8")
    torch.testing.assert_close(found.value, expected, rtol=1e-6, atol=1e-6)


def test_the_parts_must_fit_each_other() -> None:
    packed, scales = torch.zeros(8, 2, 16, dtype=torch.uint8), torch.ones(15)
    with pytest.raises(CorruptError, match="do not fit"):
        of_matmul({"K": 64, "N": 8, "bits": 4, "block_size": 32}, [None, packed, scales])
    with pytest.raises(CorruptError, match="do not fit"):
        of_matmul({"K": 96, "N": 8, "bits": 4, "block_size": 32}, [None, packed, torch.ones(16)])
    with pytest.raises(CorruptError, match="no known format"):
        of_matmul({"K": 64, "N": 8, "bits": 3, "block_size": 32}, [None, packed, torch.ones(16)])
    with pytest.raises(CorruptError, match="do not fit"):
        of_gather({"bits": 4, "block_size": 32}, [packed, None, scales], "uint8")


def test_experts_have_a_scale_for_each_row_or_block() -> None:
    packed = torch.arange(2 * 3 * 16, dtype=torch.uint8).reshape(2, 3, 16)
    whole = of_experts({"expert_weight_bits": 4}, packed, torch.full((2, 3), 0.5), None)
    assert whole.value.shape == (2, 3, 32)
    assert torch.equal(whole.value[0, 0, :2], (torch.tensor([0.0, 0.0]) - 8) * 0.5)
    blocks = of_experts({"expert_weight_bits": 4, "block_size": 16}, packed, torch.full((2, 3, 2), 0.5), None)
    assert torch.equal(blocks.value, whole.value)


def test_the_lowest_bits_come_first() -> None:
    assert unpacked(torch.tensor([[0x21]], dtype=torch.uint8), 4).tolist() == [[1.0, 2.0]]
    assert unpacked(torch.tensor([[0b11100100]], dtype=torch.uint8), 2).tolist() == [[0.0, 1.0, 2.0, 3.0]]
