"""OpenVINO: `torch.cdist(p=1)` gives NaN.

The converted model takes powers of negative differences: no absolute value. Control: `p=2` agrees.
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


class Distance(torch.nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x, y):
        return torch.cdist(x, y, p=self.p)


def error(module, *inputs):
    right = module(*inputs).double()
    converted = openvino.convert_model(module.eval(), example_input=inputs)
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    found = openvino.Core().compile_model(converted, "CPU", settings)([x.numpy() for x in inputs])[0]
    return ((torch.from_numpy(found).double() - right).abs().max() / right.abs().max()).item()


torch.manual_seed(0)
x, y = torch.randn(5, 7), torch.randn(4, 7)
wrong, control = error(Distance(1.0), x, y), error(Distance(2.0), x, y)
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
if not (control < 1e-5 and not wrong <= 10 * control):
    raise SystemExit("does not reproduce")
