"""OpenVINO: `interpolate(antialias=True, align_corners=True)` runs as if corners were not aligned.

The values are those of other positions. Control: `align_corners=False` agrees. Bicubic is the same.
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


class Resize(torch.nn.Module):
    def __init__(self, corners):
        super().__init__()
        self.corners = corners

    def forward(self, x):
        return torch.nn.functional.interpolate(
            x, size=(5, 6), mode="bilinear", antialias=True, align_corners=self.corners
        )


def error(module, *inputs):
    right = module(*inputs).double()
    converted = openvino.convert_model(module.eval(), example_input=inputs)
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    found = openvino.Core().compile_model(converted, "CPU", settings)([x.numpy() for x in inputs])[0]
    return ((torch.from_numpy(found).double() - right).abs().max() / right.abs().max()).item()


torch.manual_seed(0)
x = torch.randn(2, 4, 13, 11)
wrong, control = error(Resize(True), x), error(Resize(False), x)
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
if not (control < 1e-5 and not wrong <= 10 * control):
    raise SystemExit("does not reproduce")
