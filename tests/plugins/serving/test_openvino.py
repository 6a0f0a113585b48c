"""Names of a traced graph: repetitions are numbered by what is made of what, not by the converter's order."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import openvino
import pytest
import torch
from openvino import opset13 as ops
from torch import nn

from glassengine.errors import UsageError
from glassengine.plugins.serving.openvino import held, key_of, observed
from glassengine.serving.protocol import ServingOptions, open_served


def named(node: Any, name: str) -> Any:
    node.set_friendly_name(name)
    return node


def test_repetitions_are_numbered_where_each_is_made_of_the_one_before() -> None:
    x = ops.parameter([1, 4], np.float32)
    norm = "__module.model.norm"
    root = named(ops.sqrt(x), f"{norm}/aten::rsqrt/Sqrt")
    inverse = named(ops.divide(ops.constant(1.0, np.float32), root), f"{norm}/aten::rsqrt/Divide")
    # The converter's numbers are the other way round.
    first = named(ops.multiply(x, inverse), f"{norm}/aten::mul/Multiply_1")
    second = named(ops.multiply(first, ops.constant(2.0, np.float32)), f"{norm}/aten::mul/Multiply")
    # Two that are made of the same are not told apart.
    left = named(ops.add(second, x), "__module.model.layers.0/aten::add/Add")
    right = named(ops.add(second, inverse), "__module.model.layers.0/aten::add/Add_1")
    # Where one was taken away, numbers say nothing; several that became one have the name of the last.
    only = named(ops.multiply(left, right), "__module.model.layers.1/aten::mul/Multiply_1")
    fused = named(ops.gelu(only, "tanh"), "__module.model.layers.0.mlp.act/aten::mul/Multiply_3")
    found = observed(openvino.Model([fused], [x]))
    assert {name: key_of(port)[0] for name, port in found.items()} == {
        "model.norm/rsqrt.0": f"{norm}/aten::rsqrt/Divide",
        "model.norm/mul.0": f"{norm}/aten::mul/Multiply_1",
        "model.norm/mul.1": f"{norm}/aten::mul/Multiply",
        "model.layers.0.mlp.act/mul.3": fused.get_friendly_name(),
    }


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4, bias=False)


@pytest.mark.parametrize("kind", ["f32", "f16", "u8"])
def test_weights_are_what_the_graph_makes_of_its_constants(kind: str) -> None:
    module = Layer()
    weight = module.layer.weight.detach()
    x = ops.parameter([1, 8], np.float32)
    if kind == "u8":
        scale = (weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True)) / 255
        zero = (-weight.amin(1, keepdim=True) / scale).round()
        integers = (weight / scale + zero).round().clamp(0, 255)
        stored = named(ops.constant(integers.numpy(), np.uint8), "self.layer.weight")
        moved = ops.subtract(ops.convert(stored, np.float32), ops.constant(zero.numpy(), np.float32))
        made = ops.multiply(moved, ops.constant(scale.numpy(), np.float32))
    else:
        stored = named(ops.constant(weight.numpy().astype("f2" if kind == "f16" else "f4")), "self.layer.weight")
        made = ops.convert(stored, np.float32) if kind == "f16" else stored
    found = held(openvino, openvino.Model([ops.matmul(x, made, False, True)], [x]), module)
    del x, stored, made
    one = found["layer.weight"]
    assert one.value is not None and one.types == ({"f32": "F32", "f16": "F16", "u8": "u8"}[kind],)
    if kind == "u8":
        assert one.step is not None and (one.step < 0).sum() == ((integers == 0) | (integers == 255)).sum()
        assert ((one.value - weight).abs() <= one.step.abs() * 0.501).all()
    else:
        assert torch.equal(one.value, weight.half().float() if kind == "f16" else weight)


def test_gains_without_a_name_are_found_by_their_module_and_numbers() -> None:
    module = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    with torch.no_grad():
        for one in module.parameters():
            one.uniform_(0.5, 1.5)
    x = ops.parameter([1, 8], np.float32)
    made: Any = x
    for name, parameter in module.named_parameters():
        where, _, leaf = name.partition(".")
        values = parameter.detach().numpy().astype("f2")
        values[3] += 0.25 if name == "1.weight" else 0
        constant = ops.convert(ops.constant(values[None]), np.float32)
        op = ops.multiply(made, constant) if leaf == "weight" else ops.add(made, constant)
        made = named(op, f"__module.{where}/aten::layer_norm/{'Multiply' if leaf == 'weight' else 'Add'}")
    found = held(openvino, openvino.Model([made], [x]), module)
    # Another gain is not taken for a rounded one: the op that reads it is wrong.
    assert sorted(found) == ["0.bias", "0.weight", "1.bias"]
    assert found["0.weight"].types == ("F16",)


def test_models_that_are_no_decoder_are_refused(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="no such file"):
        open_served(f"openvino:{tmp_path}", ServingOptions())
    (tmp_path / "openvino_model.xml").write_text("<net/>")
    served = open_served(f"openvino:{tmp_path}", ServingOptions())
    assert served is not None
    with pytest.raises(UsageError, match=re.escape("cannot read")):
        served.weights(Layer(), None)
