"""The text of `test_repro.py`: what a reproduction runs, and how it decides.

Everything here is our own; of the model there are operators, literals and escaped comments (see `function_source`).
"""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from glassengine.errors import UsageError
from glassengine.judge.pieces import Piece
from glassengine.numerics.float64 import CHECKED, retarget, target_of
from glassengine.program.representation.naming import op_name, source_line

HEADER = """\
# Reproduction written by Glass Engine {version}.
#
#     python test_repro.py        (or: python -m pytest test_repro.py)
#
# It needs {needs}, and the tensors next to it.
#
{about}

from pathlib import Path

import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
STRIDES = {strides}
DEVICES = {devices}


"""

COMPARE = '''\
def compare(results):
    """Say what is wrong with the results of `actual`; "" where rounding explains all of it."""
    expected = load("expected")
    found = [disagreement(value, expected[f"output{i}"], expected[f"allowed{i}"]) for i, value in enumerate(results)]
    return "; ".join(text for text in found if text)


'''

CHECK = '''\
def disagreement(actual, expected, allowed):
    """Say what is wrong with `actual`; "" where rounding explains all of it."""
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)} for {tuple(expected.shape)}"
    value = actual.double().cpu()
    same = (value == expected) | (value.isnan() & expected.isnan())
    error = torch.where(same, 0.0, (value - expected).abs())
    wrong = ~(error <= allowed)
    if not wrong.any():
        return ""
    worst = int((error / allowed).nan_to_num(torch.inf)[wrong].argmax())
    index = tuple(wrong.nonzero()[worst].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} values are further from float64 than rounding explains, most at "
        f"{list(index)}: {float(value[index]):.8g}, expected {float(expected[index]):.8g}, give or take "
        f"{float(allowed[index]):.3g}"
    )


def load(name):
    """Return the tensors of a file, on the device and with the memory layout in which they were recorded."""
    found = {}
    for key, tensor in load_file(HERE / f"{name}.safetensors").items():
        found[key] = tensor.to(DEVICES.get(key, "cpu"))
        if key in STRIDES:
            laid_out = torch.empty_strided(tensor.shape, STRIDES[key], dtype=tensor.dtype, device=found[key].device)
            found[key] = laid_out.copy_(found[key])
    return found


def given(names):
    tensors = load("inputs") | load("weights")
    return [tensors[name] for name in names]


'''

CHECK += COMPARE

TEST_EXPECTED = """\
def test_expected_is_what_float64_gives():
    stored = load("expected")
    doubles = [value.double() if value.is_floating_point() else value for value in given({arguments})]
    for i, value in enumerate(expected(*doubles)):
        wanted = stored[f"output{{i}}"]
        torch.testing.assert_close(value.cpu(), wanted, rtol=1e-9, atol=1e-12, equal_nan=True, check_stride=False)


"""

TEST_ACTUAL = """\
def test_actual_agrees_with_expected():
    problem = compare(actual())
    assert not problem, problem


if __name__ == "__main__":
    found = compare(actual())
    raise SystemExit(found or print("agrees with float64"))
"""

_EAGER = '''\
def actual():
    """What the candidate makes of the inputs."""
    with torch.no_grad():
        return candidate(*given({arguments}))


'''

_INDUCTOR = '''\
def actual():
    """What Inductor makes of the inputs."""
    with torch.no_grad(), torch._inductor.config.patch({settings}):
        return torch.compile(candidate, fullgraph=True, dynamic=False)(*given({arguments}))


'''

_AOT_INDUCTOR = '''\
def actual():
    """What Inductor makes of the inputs ahead of time, with the weights in the package."""
    import tempfile

    inputs, weights = load("inputs"), load("weights")

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, tensor in weights.items():
                self.register_buffer(name, tensor)

        def forward(self, **given):
            every = {{**given, **{{name: getattr(self, name) for name in weights}}}}
            return candidate(*(every[name] for name in {arguments}))

    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        exported = torch.export.export(Module(), (), kwargs=inputs)
        package = torch._inductor.aoti_compile_and_package(
            exported, package_path=folder + "/model.pt2", inductor_configs={settings}
        )
        return torch._inductor.aoti_load_package(package)(**inputs)


'''

_ONNXRUNTIME = '''\
def actual():
    """What ONNX Runtime makes of the inputs."""
    import onnxruntime

    class Module(torch.nn.Module):
        def forward(self, {parameters}):
            return candidate({parameters})

    arguments = dict(zip({arguments}, given({arguments})))
    program = torch.onnx.export(
        Module(), (), kwargs=arguments, input_names=list(arguments), dynamo=True, opset_version=20, verbose=False
    )
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = {{entry.name for entry in session.get_inputs()}}
    results = session.run(None, {{name: tensor.numpy() for name, tensor in arguments.items() if name in wanted}})
    return [torch.from_numpy(value) for value in results]


'''

_RECORDED = '''\
def actual():
    """What the candidate made of the inputs when it was recorded.

    To test a mended candidate, return here what it makes of {inputs} now.
    """
    recorded = load("actual")
    return [recorded[f"output{{i}}"] for i in range(len(recorded))]


'''

RUNNERS = {
    "eager": _EAGER,
    "inductor": _INDUCTOR,
    "aot_inductor": _AOT_INDUCTOR,
    "onnxruntime": _ONNXRUNTIME,
    "recorded": _RECORDED,
}
"""How the candidate runs -> the function `actual` of the test."""

NEEDS = {"onnxruntime": "torch, safetensors, onnxscript and onnxruntime"}
NEEDS_ALWAYS = "torch and safetensors"


_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_MAX_COMMENT = 160


def comment(text: str) -> str:
    """Return `text` as what may follow a # on one line."""
    escaped = text.encode("unicode_escape").decode("ascii")
    return escaped if len(escaped) <= _MAX_COMMENT else escaped[: _MAX_COMMENT - 3] + "..."


def function_source(name: str, piece: Piece, arguments: Mapping[str, str], *, float64: bool = False) -> str:
    """Return a function that computes the outputs of `piece`, as a tuple.

    Args:
        name: Of the function.
        piece: What it computes.
        arguments: Name of each input of the piece -> name of the parameter.
        float64: Write float64 for the floating dtypes in the graph.

    Raises:
        UsageError: The piece has an operator or a literal that cannot be written down.
    """
    names: dict[Node, str] = {}
    lines = [f"def {name}({', '.join(arguments[given] for given in piece.inputs)}):"]
    for node, given in zip(piece.module.graph.find_nodes(op="placeholder"), piece.inputs, strict=True):
        names[node] = arguments[given]
    before = None
    for node in piece.ops:
        names[node] = f"v{len(names)}"
        if (source := source_line(node)) is not None and source != before:
            lines.append(f"    # {comment(source)}")
            before = source
        lines.append(f"    {names[node]} = {_call(node, names, float64)}")
    results = [names[node] for node in piece.module.graph.output_node().args[0]]  # type: ignore[union-attr,index]
    return "\n".join([*lines, f"    return ({', '.join(results)},)", ""])


def _call(node: Node, names: Mapping[Node, str], float64: bool) -> str:
    args, kwargs = node.args, dict(node.kwargs)
    if node.target is operator.getitem:
        return f"{_literal(args[0], names)}[{_literal(args[1], names)}]"
    target = target_of(node) if float64 and op_name(node) not in CHECKED else node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise UsageError(f"an operator cannot be written as source: {target}")
    if float64:
        args, kwargs = (torch.fx.node.map_aggregate(value, retarget) for value in (args, kwargs))  # type: ignore[assignment]
    written = [_literal(value, names) for value in args]
    written += [f"{_identifier(key)}={_literal(value, names)}" for key, value in kwargs.items()]
    namespace, _, rest = str(target).partition(".")
    operation = ".".join(_identifier(part) for part in (namespace, *rest.split(".")))
    return f"torch.ops.{operation}({', '.join(written)})"


def _identifier(text: str) -> str:
    if not _NAME.fullmatch(text) or keyword.iskeyword(text):
        raise UsageError(f"a name cannot be written as source: {text!r}")
    return text


def _literal(value: Any, names: Mapping[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        inside = ", ".join(_literal(item, names) for item in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside},)"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return f"torch.{_identifier(str(value).removeprefix('torch.'))}"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    raise UsageError(f"a literal cannot be written as source: {type(value).__name__}")
