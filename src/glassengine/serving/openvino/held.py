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
    readers = {
        name: partial(_weight, openvino, constants[f"self.{name}"], parameter)
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if f"self.{name}" in constants
    }
    return Unread(readers)


def _weight(openvino: Any, constant: Any, parameter: Tensor) -> ServedWeight:
    stored = (constant.get_friendly_name(),)
    kind = constant.get_element_type().get_type_name()
    made = _made(constant)
    if kind in _FLOATS:
        value = _values(openvino, made[-1].output(0)).to(torch.float32)
        return as_parameter(stored, None, [value], [None], (_FLOATS[kind],), parameter)
    scales = [op for op in made if op.get_type_name() == "Multiply"]
    if kind not in _ROUNDED or len(scales) != 1:
        return ServedWeight(stored, None, types=(kind,), reason=f"numbers of the type {kind} are not compared")
    value = _values(openvino, made[-1].output(0)).to(torch.float32)
    integers = _values(openvino, made[1].output(0)).to(torch.float32)
    (scale,) = (
        _values(openvino, source.get_source_output()).to(torch.float32)
        for source in scales[0].inputs()
        if source.get_source_output().get_node().get_friendly_name() not in {op.get_friendly_name() for op in made}
    )
    bits = int(kind[1:])
    low, high = (0, 2**bits - 1) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    step = scale.abs().expand(integers.shape)
    step = torch.where((integers == low) | (integers == high), -step, step).reshape(value.shape)
    return as_parameter(stored, None, [value], [step], (kind,), parameter)


def _made(constant: Any) -> list[Any]:
    """Return a constant and what is made of it and of other constants alone."""
    found = [constant]
    while True:
        readers = list(found[-1].output(0).get_target_inputs())
        following = readers[0].get_node() if len(readers) == 1 else None
        if following is None or following.get_type_name() not in _MADE_BY or not _is_constant(following, found[-1]):
            return found
        found.append(following)


def _is_constant(op: Any, but: Any) -> bool:
    others = [source.get_source_output().get_node() for source in op.inputs()]
    rest = [one for one in others if one.get_friendly_name() != but.get_friendly_name()]
    return all(
        one.get_type_name() == "Constant" or (one.get_type_name() == "Convert" and _is_constant(one, one))
        for one in rest
    )


def _values(openvino: Any, output: Any) -> Tensor:
    """Return the values of what depends on constants alone, as OpenVINO computes them."""
    model = openvino.Model([openvino.op.Result(output)], [])
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled([])[0].copy())
