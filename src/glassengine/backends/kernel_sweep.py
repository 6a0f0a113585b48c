"""The sweep that measures the elementwise kernels of a runtime: one-node ONNX graphs, and ops as torch exports them.

Arguments cover the range of each function: both signs, sizes from 2^-30 to where it saturates, and a dense middle.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from glassengine.backends.protocol.backend import Backend
from glassengine.errors import logger
from glassengine.numerics.bounds import has_bound, rounding_bound
from glassengine.numerics.float64 import Operation, Roundoff
from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.numerics.kernels import KernelError
from glassengine.ops.row import Rounding
from glassengine.program.export.export import export_module
from glassengine.program.loading.stored import onnx_program
from glassengine.program.onnx.file import OnnxFile
from glassengine.program.representation.naming import op_name
from glassengine.program.representation.program import Program

if TYPE_CHECKING:
    import onnx

NUM_POINTS = 1 << 16
_ROW = 64
"""Numbers of a row of a softmax."""
_LEAST_RELATIVE = 64
"""Roundoffs: an error that is relative up to here is stored as such, else as an absolute one."""
_MOST = 64
"""Roundoffs: what is further off is no approximation of the function over its range."""

_ONNX: Mapping[str, str] = {
    "real": "Sigmoid Tanh Erf Exp Softplus Softsign Elu Selu Celu Gelu Mish HardSigmoid HardSwish Atan Asinh Swish "
    "LeakyRelu ThresholdedRelu Softmax LogSoftmax Sinh Cosh",
    "angle": "Sin Cos Tan",
    "positive": "Log Sqrt Reciprocal Pow",
    "unit": "Asin Acos Atanh",
    "above_one": "Acosh",
}
"""Range -> ONNX operators."""

_TORCH: Mapping[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "real": (
        torch.sigmoid,
        torch.tanh,
        torch.erf,
        torch.erfc,
        torch.exp,
        torch.exp2,
        torch.expm1,
        nn.functional.silu,
        nn.functional.gelu,
        lambda x: nn.functional.gelu(x, approximate="tanh"),
        nn.functional.softplus,
        nn.functional.mish,
        nn.functional.elu,
        nn.functional.selu,
        nn.functional.celu,
        nn.functional.hardswish,
        nn.functional.logsigmoid,
        nn.functional.tanhshrink,
    ),
    "angle": (torch.sin, torch.cos),
    "positive": (torch.log, torch.log2, torch.log10, torch.log1p, torch.sqrt, torch.rsqrt, lambda x: x**0.375),
}
"""Range -> functions of torch, which a runtime has as they are exported."""


def sweep(backend: Backend, dtype: torch.dtype) -> dict[str, KernelError]:
    """Return op -> error of the kernels of a back-end in a dtype; operators that it does not take are left out."""
    errors: dict[str, KernelError] = {}
    with tempfile.TemporaryDirectory(prefix="glassengine-kernels-") as folder:
        for number, (program, x) in enumerate(_programs(backend, dtype, Path(folder))):
            directory = Path(folder, f"built-{number}")
            directory.mkdir()
            try:
                backend.build(program, directory)
                weights = None if backend.keeps_weights(program) else program.weights()
                results = backend.load(directory, weights)({program.inputs[0].name: x})
            except Exception as error:
                names = ", ".join(sorted({op_name(node) for node in _ops(program)}))
                logger.info("kernels of %s not measured in %s: %s: %s", backend.name, dtype, names, error)
                continue
            for name, own in _errors(program, x, results):
                if _is_accuracy(own, unit_roundoff(dtype)):
                    errors[name] = errors.get(name, KernelError()).joined(own)
                else:
                    logger.info("%s of %s in %s is far from its float64 result: %s", name, backend.name, dtype, own)
    return errors


def arguments(kind: str, dtype: torch.dtype) -> Tensor:
    """Return `NUM_POINTS` arguments [rows, 64] of a range."""
    generator = torch.Generator().manual_seed(0)
    number = NUM_POINTS // 4
    sizes = torch.exp2(torch.rand(number, generator=generator, dtype=torch.float64) * 37 - 30)
    signs = torch.where(torch.rand(number, generator=generator) < 0.5, -1.0, 1.0)
    dense = [torch.linspace(-high, high, number, dtype=torch.float64) for high in (2.0, 16.0, 90.0)]
    x = torch.cat([sizes * signs, *dense])
    if kind == "angle":
        x = torch.cat([x[: 3 * number], dense[2] * 30.0])
    elif kind == "positive":
        x = x.abs() + 2.0**-30
    elif kind == "unit":
        x = 0.999 * torch.cat([sizes * signs / 2.0**7, dense[0] / 2.0, dense[1] / 160.0, dense[2] / 90.0])
    elif kind == "above_one":
        x = 1 + x.abs()
    return x.to(dtype).reshape(-1, _ROW)


def _programs(backend: Backend, dtype: torch.dtype, folder: Path) -> Iterator[tuple[Program, Tensor]]:
    if getattr(backend, "takes_onnx", False):
        for kind, operators in _ONNX.items():
            for operator in operators.split():
                x = arguments(kind, dtype)
                file = OnnxFile(folder / f"{operator}.onnx", one_operator(operator, dtype, tuple(x.shape)))
                yield onnx_program(file, metadata={"dtype": str(dtype).removeprefix("torch.")}), x
    for kind, functions in _TORCH.items():
        x = arguments(kind, dtype)
        try:
            yield export_module(_Functions(functions), [{"x": x}]), x
        except Exception as error:
            logger.info("kernels not exported: %s", error)


class _Functions(nn.Module):
    def __init__(self, functions: tuple[Callable[[Tensor], Tensor], ...]) -> None:
        super().__init__()
        self._functions = functions

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {f"y{i}": function(x) for i, function in enumerate(self._functions)}


def one_operator(operator: str, dtype: torch.dtype, shape: tuple[int, ...]) -> onnx.ModelProto:
    """Return a graph of one node."""
    from onnx import TensorProto, helper

    kind = TensorProto.FLOAT16 if dtype is torch.float16 else TensorProto.FLOAT
    opset = 24 if operator == "Swish" else 20
    weights = [helper.make_tensor("power", kind, [], [0.375])] if operator == "Pow" else []
    options: dict[str, Any] = {"axis": -1} if operator in ("Softmax", "LogSoftmax") else {}
    node = helper.make_node(operator, ["x", *(w.name for w in weights)], ["y"], **options)
    ends = [helper.make_tensor_value_info(name, kind, shape) for name in ("x", "y")]
    graph = helper.make_graph([node], "kernel", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _ops(program: Program) -> list[torch.fx.Node]:
    returned = set(program.output_nodes.values())
    return [node for node in program.graph.nodes if node.name in returned and has_bound(op_name(node))]


def _errors(program: Program, x: Tensor, results: Mapping[str, Tensor]) -> Iterator[tuple[str, KernelError]]:
    """Yield (op, error) of each result that one op makes of the argument."""
    names = {node: name for name, node in program.output_nodes.items()}
    weights = {name: value.double() for name, value in program.weights().items()}
    given = {**weights, program.inputs[0].node: x.double()}
    for node in _ops(program):
        if any(source.name not in given for source in node.all_input_nodes):
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: given[source.name])
        args, kwargs = pytree.tree_map(_in_float64, (args, kwargs))
        target: Any = node.target
        operation = Operation(op_name(node), target, args, kwargs, target(*args, **kwargs))
        yield op_name(node), kernel_error(operation, results[names[node.name]])


def _in_float64(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def kernel_error(operation: Operation, found: Tensor) -> KernelError:
    """Return what of the error of `found` the rounding bound of its op, and the rounding of its result, leave over."""
    u, tiny = unit_roundoff(found.dtype), smallest_precise(found.dtype)
    bound = rounding_bound(operation, Roundoff(u, tiny=tiny, kernel=KernelError()))
    size = operation.exact.abs()
    judged = operation.exact.isfinite() & found.isfinite() & (size < torch.finfo(found.dtype).max)
    if bound is None or not bool(judged.any()):
        return KernelError()
    error = torch.where(judged, (found.double() - operation.exact).abs(), 0.0)
    size = torch.where(judged, size, 0.0)
    absolute, relative = _fitted((error - bound).clamp(min=0.0), size, u)
    spread = (0.0, 0.0, 0.0)
    if operation.traits.rounding is Rounding.POINTWISE:
        beyond = (error - 2 * u * size - 2 * tiny).clamp(min=0.0)
        r = float((beyond / size).where(size > 1, 0.0).nan_to_num(0.0).max())
        beyond = (beyond - r * size).clamp(min=0.0)
        x = operation.args[0].abs()
        a = float(torch.where(x <= 1, beyond, 0.0).max())
        s = float(torch.where(x > 1, (beyond - a).clamp(min=0.0) / x, 0.0).max())
        spread = (_rounded_up(a), _rounded_up(r), _rounded_up(s))
    return KernelError(_rounded_up(absolute), _rounded_up(relative), spread)


def _fitted(excess: Tensor, size: Tensor, u: float) -> tuple[float, float]:
    """Return (absolute, relative) that cover `excess`: relative ones where they are small everywhere."""
    relative = float(torch.where(excess > 0, excess / size, 0.0).max())
    if relative <= _LEAST_RELATIVE * u:
        return 0.0, relative
    absolute = float(torch.where(size <= 1, excess, 0.0).max())
    return absolute, float(torch.where(size > 1, (excess - absolute).clamp(min=0.0) / size, 0.0).max())


def _is_accuracy(error: KernelError, u: float) -> bool:
    """Whether an error is one of an approximation; one that is larger is a mistake, which has to be found."""
    return max(error.to_list()) <= _MOST * u


def _rounded_up(value: float) -> float:
    """Two digits."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")
