"""OpenVINO: `decimals` of `torch.round` is ignored.

`torch.round(x, decimals=1)` rounds to whole numbers in the converted model. Control: without `decimals` both agree.
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


class Round(torch.nn.Module):
    def __init__(self, decimals):
        super().__init__()
        self.decimals = decimals

    def forward(self, x):
        return torch.round(x, decimals=self.decimals)


def error(module, *inputs):
    right = module(*inputs).double()
    converted = openvino.convert_model(module.eval(), example_input=inputs)
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    found = openvino.Core().compile_model(converted, "CPU", settings)([x.numpy() for x in inputs])[0]
    return ((torch.from_numpy(found).double() - right).abs().max() / right.abs().max()).item()


torch.manual_seed(0)
x = torch.randn(9) * 10
wrong, control = error(Round(1), x), error(Round(0), x)
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
if not (control < 1e-5 and not wrong <= 10 * control):
    raise SystemExit("does not reproduce")
