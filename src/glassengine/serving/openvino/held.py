"""What a file of OpenVINO holds for each parameter: constants by the traced names, and what makes numbers of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.serving.parameters import Unread, as_parameter
from glassengine.serving.protocol import ServedWeight

_FLOATS = {"f32": "F32", "f16": "F16", "bf16": "BF16", "f64": "F64"}
_ROUNDED = ("u8", "i8", "u4", "i4")
_MADE_BY = ("Convert", "Subtract", "Multiply", "Reshape")
"""What a constant goes through on its way to a product: its zero, its scale, its groups put together."""


def held(openvino: Any, model: Any, module: nn.Module) -> Unread:
    """Return what a file has for the parameters of a module, read when it is asked for.

    Args:
        openvino: The package.
        model: Read, not compiled.
        module: The checkpoint's.
    """
    constants = {op.get_friendly_name(): op for op in model.get_ordered_ops() if op.get_type_name() == "Constant"}
    found = {
        name: constants.get(f"self.{name}", constants.get(f"self.{name}_compressed"))
        for name, _ in module.named_parameters(remove_duplicate=False)
    }
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return Unread(
        {
            name: partial(_weight, openvino, model, constant, parameters[name])
            for name, constant in found.items()
            if constant is not None
        }
    )


def _weight(openvino: Any, model: Any, constant: Any, parameter: Tensor) -> ServedWeight:
    """Return one weight; `model` is given lest it be gone, and what reads the constant with it."""
    stored = (constant.get_friendly_name(),)
    kind = constant.get_element_type().get_type_name()
    values = _values(openvino, constant)
    if kind in _FLOATS:
        return as_parameter(stored, None, [values], [None], (_FLOATS[kind],), parameter)
    arithmetic = _arithmetic(constant)
    if kind not in _ROUNDED or "Multiply" not in arithmetic:
        return ServedWeight(stored, None, types=(kind,), reason=f"numbers of the type {kind} are not compared")
    bits = int(kind[1:])
    low, high = (0, 2**bits - 1) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    scale = _values(openvino, arithmetic["Multiply"])
    zero = _values(openvino, arithmetic["Subtract"]) if "Subtract" in arithmetic else 0.0
    step = scale.abs().expand(values.shape)
    step = torch.where((values == low) | (values == high), -step, step).reshape(parameter.shape)
    value = ((values - zero) * scale).reshape(parameter.shape)
    return as_parameter(stored, None, [value], [step], (kind,), parameter)


def _arithmetic(constant: Any) -> dict[str, Any]:
    """Return the constants that are subtracted from integers, and that they are multiplied with."""
    found: dict[str, Any] = {}
    op = constant
    while True:
        readers = list(op.output(0).get_target_inputs())
        following = readers[0].get_node() if len(readers) == 1 else None
        if following is None or following.get_type_name() not in _MADE_BY:
            return found
        others = [one.get_source_output().get_node() for one in following.inputs()]
        other = next((one for one in others if one.get_friendly_name() != op.get_friendly_name()), None)
        while other is not None and other.get_type_name() == "Convert":
            other = other.input(0).get_source_output().get_node()
        if other is not None and other.get_type_name() != "Constant":
            return found
        if other is not None:
            found[following.get_type_name()] = other
        op = following


def _values(openvino: Any, constant: Any) -> Tensor:
    """Return the numbers of a constant in float32, those of four bits one by one."""
    wide = openvino.opset13.convert(constant, "f32")
    compiled = openvino.compile_model(openvino.Model([wide], []), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled([])[0].copy())
