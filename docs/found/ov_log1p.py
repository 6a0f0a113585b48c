"""OpenVINO: `log1p` is log(1 + x).

All digits of small arguments are lost: log1p(1e-7) is 1.19e-7, and log1p(1e-8) is 0. `expm1` is exp(x) - 1
likewise. Control: arguments near 1 agree.
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


class Log(torch.nn.Module):
    def forward(self, x):
        return torch.log1p(x)


def error(module, *inputs):
    right = module(*inputs).double()
    converted = openvino.convert_model(module.eval(), example_input=inputs)
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    found = openvino.Core().compile_model(converted, "CPU", settings)([x.numpy() for x in inputs])[0]
    return ((torch.from_numpy(found).double() - right).abs().max() / right.abs().max()).item()


torch.manual_seed(0)
x = torch.rand(9) + 0.5
wrong, control = error(Log(), x * 1e-7), error(Log(), x)
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
if not (control < 1e-5 and not wrong <= 10 * control):
    raise SystemExit("does not reproduce")
