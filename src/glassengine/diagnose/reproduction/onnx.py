"""A reproduction of a divergence in an ONNX graph: its nodes as an ONNX file, their inputs, and a test without torch.

test_repro.py         runs the file by the runtime that showed the mistake, and checks the results
model.onnx            one node, or those around it where it takes more than one to go wrong
inputs.npz            tensors that enter them
expected.npz          float64 results, and how far from them rounding may lead, element by element
actual.npz            what the candidate made when it was recorded
reproduction.json     what this is about; written last
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from glassengine.diagnose.reproduction.template import COMPARE, TEST_ACTUAL, comment
from glassengine.environment import versions
from glassengine.errors import UsageError
from glassengine.judge.pieces import Piece
from glassengine.program.onnx.file import free_names
from glassengine.program.onnx.translated import ELEMENT_TYPES
from glassengine.program.representation.program import Program

if TYPE_CHECKING:
    import onnx

MODEL = "model.onnx"
ARRAYS = ("inputs.npz", "expected.npz", "actual.npz")
MAX_BYTES = 1 << 30
"""Most bytes of weights in the file."""


def onnx_files(
    program: Program,
    piece: Piece,
    runner: str,
    about: Mapping[str, Any],
    expected: Sequence[torch.Tensor],
    allowed: Sequence[torch.Tensor],
    actual: Sequence[torch.Tensor],
) -> dict[str, bytes]:
    """Return what the directory of a reproduction holds, but for the name of the test and `reproduction.json`.

    Args:
        program: The candidate's, which is an ONNX graph.
        piece: What of it is run.
        runner: "onnxruntime", "openvino" or "recorded".
        about: Label -> text, for the reader.
        expected: Float64 results.
        allowed: How far rounding may lead from each element.
        actual: What the candidate made.

    Raises:
        UsageError: The nodes cannot be written as a file of their own.
    """
    model, inputs = one_piece(program, piece, actual or expected)
    described = {**about, "inputs": ", ".join(f"{k} {v.dtype}{list(v.shape)}" for k, v in inputs.items())}
    lines = "\n".join(f"# {label:<9} {comment(str(text))}" for label, text in described.items())
    test = HEADER.format(version=versions()["glassengine"], needs=NEEDS[runner], about=lines)
    test += CHECK + RUNNERS[runner] + TEST
    outputs = {f"output{i}": value for i, value in enumerate(expected)}
    outputs |= {f"allowed{i}": value for i, value in enumerate(allowed)}
    return {
        "test_repro.py": test.encode(),
        MODEL: model.SerializeToString(),
        "inputs.npz": _npz(inputs),
        "expected.npz": _npz({name: value.numpy() for name, value in outputs.items()}),
        "actual.npz": _npz({f"output{i}": _array(value) for i, value in enumerate(actual)}),
        "reproduction.json": (
            json.dumps({**described, "runner": runner, "versions": versions()}, indent=1) + "\n"
        ).encode(),
    }


def one_piece(
    program: Program, piece: Piece, results: Sequence[torch.Tensor]
) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return the nodes of a piece as a model whose weights are initializers, and the arrays that enter it.

    Raises:
        UsageError: An input of the nodes is not available, or the weights are too large.
    """
    from onnx import helper

    assert program.onnx is not None
    source = program.onnx
    model = source.file.model
    names = {source.values[node.name] for node in piece.ops if node.name in source.values}
    protos = [proto for proto in model.graph.node if names.intersection(proto.output)]
    if not protos:
        raise UsageError("these ops are not nodes of the ONNX file", got=", ".join(node.name for node in piece.ops))
    made = {name for proto in protos for name in proto.output}
    graph = helper.make_graph(protos, "piece", [], [])
    read = list(dict.fromkeys(name for name in free_names(graph) if name not in made))
    values = {source.values[node]: tensor for node, tensor in piece.inputs.items() if node in source.values}
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    constants = {proto.output[0]: proto for proto in model.graph.node if proto.op_type == "Constant"}
    held = source.file.weights()
    inputs: dict[str, Any] = {}
    size = 0
    for name in read:
        if name in initializers:
            proto = initializers[name]
            if not proto.HasField("raw_data") and (proto.data_location or not source.file.with_data):
                proto = _initializer(name, values.get(name, held.get(name)))
            size += proto.ByteSize()
            graph.initializer.append(proto)
        elif name in constants:
            graph.node.insert(0, constants[name])
        elif name in values and values[name].dtype in ELEMENT_TYPES:
            tensor = values[name]
            inputs[name] = _array(tensor)
            graph.input.append(helper.make_tensor_value_info(name, ELEMENT_TYPES[tensor.dtype], list(tensor.shape)))
        else:
            raise UsageError(f"an input of these nodes is not available: {name}")
    if size > MAX_BYTES:
        raise UsageError("the weights of these nodes are too large for one file", got=f"{size:,} bytes")
    for node, value in zip(piece.outputs, results, strict=True):
        kind = ELEMENT_TYPES.get(program.node(node).meta["val"].dtype, 1)
        graph.output.append(helper.make_tensor_value_info(source.values[node], kind, list(value.shape)))
    opsets = list(model.opset_import)
    written = helper.make_model(graph, opset_imports=opsets, ir_version=max(4, model.ir_version))
    written.functions.extend(model.functions)
    return written, inputs


def _initializer(name: str, tensor: torch.Tensor | None) -> onnx.TensorProto:
    from onnx import numpy_helper

    if tensor is None or tensor.is_meta or tensor.dtype not in ELEMENT_TYPES:
        raise UsageError(f"a weight of these nodes is not available: {name}")
    return numpy_helper.from_array(_array(tensor), name)


def _array(tensor: torch.Tensor) -> Any:
    plain = tensor.detach().cpu().contiguous()
    return plain.float().numpy() if plain.dtype is torch.bfloat16 else plain.numpy()


def _npz(arrays: Mapping[str, Any]) -> bytes:
    content = io.BytesIO()
    plain: dict[str, Any] = {name: np.asarray(value) for name, value in arrays.items()}
    np.savez(content, **plain)
    return content.getvalue()


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
