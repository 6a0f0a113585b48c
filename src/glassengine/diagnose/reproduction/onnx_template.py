"""The text of `test_repro.py` where the candidate is an ONNX graph: numpy and the runtime, no torch."""

from __future__ import annotations

from glassengine.diagnose.reproduction.template import COMPARE, TEST_ACTUAL

HEADER = """\
# Reproduction written by Glass Engine {version}.
#
#     python test_repro.py        (or: python -m pytest test_repro.py)
#
# It needs {needs}, and the files next to it.
#
{about}

from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent


"""

CHECK = '''\
def load(name):
    """Return the arrays of a file by name."""
    with np.load(HERE / f"{name}.npz", allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays.files}


def disagreement(actual, expected, allowed):
    """Say what is wrong with `actual`; "" where rounding explains all of it."""
    if actual.shape != expected.shape:
        return f"shape {actual.shape} for {expected.shape}"
    value = actual.astype(np.float64) if expected.dtype.kind == "f" else actual
    with np.errstate(invalid="ignore"):
        same = (value == expected) | ((value != value) & (expected != expected))
        error = np.where(same, 0.0, np.abs(value.astype(np.float64) - expected.astype(np.float64)))
        wrong = ~(error <= allowed)
        if not wrong.any():
            return ""
        share = np.where(wrong, np.nan_to_num(error / np.maximum(allowed, 1e-300), nan=np.inf), -1.0)
    index = np.unravel_index(int(share.argmax()), share.shape)
    return (
        f"{int(wrong.sum())} of {wrong.size} values are further from float64 than rounding explains, most at "
        f"{[int(i) for i in index]}: {float(value[index]):.9g}, expected {float(expected[index]):.9g}, give or take "
        f"{float(allowed[index]):.3g}"
    )


'''

CHECK += COMPARE

_ONNXRUNTIME = '''\
def actual():
    """What ONNX Runtime makes of the inputs."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(HERE / "model.onnx"), providers=["CPUExecutionProvider"])
    return session.run(None, load("inputs"))


'''

_OPENVINO = '''\
def actual():
    """What OpenVINO makes of the inputs."""
    import openvino

    model = openvino.Core().read_model(str(HERE / "model.onnx"))
    settings = {"INFERENCE_PRECISION_HINT": "f32", "EXECUTION_MODE_HINT": "ACCURACY"}
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    inputs = load("inputs")
    found = compiled([inputs[port.any_name] for port in compiled.inputs])
    return [found[port] for port in compiled.outputs]


'''

_RECORDED = '''\
def actual():
    """What the candidate made of the inputs when it was recorded.

    To test a mended candidate, return here what it makes of model.onnx and inputs.npz now.
    """
    recorded = load("actual")
    return [recorded[f"output{i}"] for i in range(len(recorded))]


'''

RUNNERS = {"onnxruntime": _ONNXRUNTIME, "openvino": _OPENVINO, "recorded": _RECORDED}
"""How the candidate runs -> the function `actual` of the test."""

NEEDS = {"onnxruntime": "numpy and onnxruntime", "openvino": "numpy and openvino", "recorded": "numpy"}

TEST = TEST_ACTUAL
