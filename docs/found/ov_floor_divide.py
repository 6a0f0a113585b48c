"""OpenVINO: `floor_divide` of negative integers truncates.

-7 // 2 is -4 in PyTorch and -3 in the converted model. Control: the same division of floats agrees.
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


class Divide(torch.nn.Module):
    def forward(self, x, y):
        return torch.floor_divide(x, y)


def error(module, *inputs):
    right = module(*inputs).double()
    converted = openvino.convert_model(module.eval(), example_input=inputs)
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    found = openvino.Core().compile_model(converted, "CPU", settings)([x.numpy() for x in inputs])[0]
    return ((torch.from_numpy(found).double() - right).abs().max() / right.abs().max()).item()


torch.manual_seed(0)
x, y = torch.tensor([-7, 7, -5, 9]), torch.tensor([2, 2, 3, -4])
wrong, control = error(Divide(), x, y), error(Divide(), x.float(), y.float())
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
if not (control < 1e-5 and not wrong <= 10 * control):
    raise SystemExit("does not reproduce")
