"""OpenVINO: `beta` and `threshold` of Softplus are ignored.

`nn.Softplus(beta=2)` is log(1 + exp(2 x)) / 2; the converted model computes log(1 + exp(x)). Control: `beta=1`
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
x = torch.randn(5, 7) * 5
wrong, control = error(torch.nn.Softplus(beta=2), x), error(torch.nn.Softplus(), x)
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
if not (control < 1e-5 and not wrong <= 10 * control):
    raise SystemExit("does not reproduce")
