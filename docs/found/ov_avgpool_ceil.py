"""OpenVINO: AvgPool2d with `ceil_mode` counts padding beyond the right edge.

With `ceil_mode=True, count_include_pad=True`, PyTorch divides the windows at the right and bottom edges by the
elements that lie in the input or its padding. OpenVINO divides by the whole kernel. Control: `ceil_mode=False`
agrees.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "openvino==2026.4.1",
# ]
# ///

import openvino
import torch


def error(module, *inputs):
    right = module(*inputs).double()
    converted = openvino.convert_model(module.eval(), example_input=inputs)
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    found = openvino.Core().compile_model(converted, "CPU", settings)([x.numpy() for x in inputs])[0]
    return ((torch.from_numpy(found).double() - right).abs().max() / right.abs().max()).item()


torch.manual_seed(0)
x = torch.randn(2, 4, 13, 11)
wrong, control = error(torch.nn.AvgPool2d(5, 3, 2, ceil_mode=True), x), error(torch.nn.AvgPool2d(5, 3, 2), x)
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
if not (control < 1e-5 and not wrong <= 10 * control):
    raise SystemExit("does not reproduce")
