"""OpenVINO: differences of uint8 saturate at 0.

3 - 10 is 249 in PyTorch (the type wraps around), 0 in the converted model. Control: values above 10 agree.
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


class Subtract(torch.nn.Module):
    def forward(self, x):
        return (x - 10).int()


def error(module, *inputs):
    right = module(*inputs).double()
    converted = openvino.convert_model(module.eval(), example_input=inputs)
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    found = openvino.Core().compile_model(converted, "CPU", settings)([x.numpy() for x in inputs])[0]
    return ((torch.from_numpy(found).double() - right).abs().max() / right.abs().max()).item()


torch.manual_seed(0)
x = torch.arange(20, dtype=torch.uint8)
wrong, control = error(Subtract(), x), error(Subtract(), x + 50)
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
if not (control < 1e-5 and not wrong <= 10 * control):
    raise SystemExit("does not reproduce")
