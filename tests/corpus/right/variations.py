"""Interpret a program as another, legitimate implementation would: other kernels, other order, unrounded registers.

What a compiler or a vendor's library may do without being wrong. A side made of this is judged as an engine is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.replay.replay import Replay
from glassengine.numerics.bounds import attention_parts
from glassengine.numerics.float64 import target_of
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import is_tensor_node, op_name
from glassengine.program.representation.outputs import is_view
from glassengine.program.representation.program import Program
from tests.corpus.right.node_side import NodeSide

Kernel = Callable[..., Any]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _split_product(left: Tensor, right: Tensor, parts: int = 4) -> Tensor:
    """Left [..., M, K] @ right [..., K, N], K in several parts, summed from the last to the first, in float32."""
    size = left.shape[-1]
    step = max(1, math.ceil(size / parts))
    total: Tensor | None = None
    for start in reversed(range(0, size, step)):
        part = _wide(left[..., start : start + step]) @ _wide(right[..., start : start + step, :])
        total = part if total is None else total + part
    assert total is not None
    return total


def _double_product(left: Tensor, right: Tensor) -> Tensor:
    return left.double() @ right.double()


def _products(product: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Kernel]:
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = product(x, weight.mT)
        return (y if bias is None else y + bias).to(x.dtype)

    def addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return (product(x, weight) * alpha + _wide(bias) * beta).to(x.dtype)

    def matmul(x: Tensor, y: Tensor) -> Tensor:
        return product(x, y).to(x.dtype)

    return {"linear": linear, "addmm": addmm, "mm": matmul, "bmm": matmul, "matmul": matmul}


def _silu(x: Tensor) -> Tensor:
    return (_wide(x) * torch.sigmoid(_wide(x))).to(x.dtype)


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    y = _wide(x)
    inner = (
        torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y * y * y))
        if approximate == "tanh"
        else torch.erf(y * math.sqrt(0.5))
    )
    return (0.5 * y * (1 + inner)).to(x.dtype)


def _softmax(x: Tensor, dim: int, dtype: Any = False) -> Tensor:
    y = _wide(x)
    power = torch.exp2((y - y.amax(dim, keepdim=True)) * math.log2(math.e))
    result = power / power.sum(dim, keepdim=True)
    return result.to(dtype if isinstance(dtype, torch.dtype) else x.dtype)


def _rsqrt(x: Tensor) -> Tensor:
    return (1 / _wide(x).sqrt()).to(x.dtype)


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    dims = list(range(x.dim())) if dim is None else dim
    count = math.prod(x.shape[d] for d in dims)
    return (_wide(x).flip(dims).sum(dims, keepdim=keepdim) * (1 / count)).to(kwargs.get("dtype") or x.dtype)


def _layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Tensor:
    y = _wide(x)
    dims = list(range(x.dim() - len(shape), x.dim()))
    centered = y - y.mean(dims, keepdim=True)
    y = centered / (centered.square().mean(dims, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def _power(x: Tensor, exponent: Any) -> Tensor:
    if exponent == 2:
        return x * x
    return (_wide(x) * _wide(x) * _wide(x)).to(x.dtype) if exponent == 3 else torch.pow(x, exponent)


def _written_out(*args: Any, **kwargs: Any) -> Tensor:
    """Attention op by op, scores and probabilities rounded to the dtype, as transformers' eager attention."""
    query = args[0]
    _, _, value, scores, _, _ = attention_parts(args, kwargs)
    probabilities = scores.float().softmax(-1).nan_to_num(0.0).to(query.dtype)
    return probabilities @ value


def _blockwise(*args: Any, **kwargs: Any) -> Tensor:
    """Attention as flash kernels do it: float32, blocks of four keys, running maximum."""
    query = args[0]
    wide = tuple(_wide(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    _, _, value, scores, _, _ = attention_parts(wide, kwargs)
    largest = torch.full_like(scores[..., :1], -1e30)
    total = torch.zeros_like(largest)
    context = torch.zeros(*scores.shape[:-1], value.shape[-1], dtype=scores.dtype)
    for start in range(0, scores.shape[-1], 4):
        block = scores[..., start : start + 4]
        peak = torch.maximum(largest, block.amax(-1, keepdim=True))
        weight, shrink = torch.exp(block - peak), torch.exp(largest - peak)
        total = total * shrink + weight.sum(-1, keepdim=True)
        context = context * shrink + weight @ value[..., start : start + 4, :]
        largest = peak
    return (context / total).nan_to_num(0.0).to(query.dtype)


@dataclass(frozen=True)
class Variation:
    """Another legitimate way to compute: kernels by op, and whether pointwise results stay in registers unrounded."""

    name: str
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    has_registers: bool = False


_FORMULAS: dict[str, Kernel] = {
    "silu": _silu,
    "gelu": _gelu,
    "softmax": _softmax,
    "_softmax": _softmax,
    "rsqrt": _rsqrt,
    "mean": _mean,
    "layer_norm": _layer_norm,
    "pow": _power,
    "scaled_dot_product_attention": _blockwise,
}

VARIATIONS = (
    Variation("same kernels"),
    Variation("split sums", _products(_split_product)),
    Variation("float64 sums", _products(_double_product)),
    Variation("other formulas", _FORMULAS),
    Variation("attention written out", {"scaled_dot_product_attention": _written_out}),
    Variation("registers", {}, has_registers=True),
    Variation("everything", {**_FORMULAS, **_products(_split_product)}, has_registers=True),
)


class VariedSide(NodeSide):
    """A program computed in a `Variation`.

    Args:
        program: As in `NodeSide`.
        nodes: Likewise.
        variation: How.
        replay: As in `NodeSide`.
        plain: Nodes of `program` that are computed as they are written: those of a planted mistake.
    """

    def __init__(
        self,
        program: Program,
        nodes: Mapping[str, str],
        variation: Variation,
        replay: Replay,
        *,
        plain: Collection[str] = (),
    ) -> None:
        super().__init__(program, nodes, replay)
        self._variation = variation
        self._plain = plain

    def _run(self, fed: Mapping[str, Tensor]) -> dict[str, Any]:
        placed = self._placed(fed)
        self._values = {}
        registers: dict[str, Tensor] = {}
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                self._values[node.name] = placed.get(node.name)
            elif node.op == "get_attr":
                self._values[node.name] = getattr(self._program.exported.graph_module, str(node.target))
            elif node.op == "call_function" and "_assert" not in str(node.target):
                self._values[node.name] = self._compute(node, registers)
        return self._values

    def _compute(self, node: Node, registers: dict[str, Tensor]) -> Any:
        name = op_name(node)
        call = self._variation.kernels.get(name, target_of(node))
        if node.name in self._plain or (name == "pow" and node.target is not torch.ops.aten.pow.Tensor_Scalar):
            call = target_of(node)
        if not self._reads_registers(node, registers):
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), self._read)
            return call(*args, **kwargs)

        def read(source: Node) -> Any:
            value = registers.get(source.name, self._values[source.name])
            return _wide(value) if isinstance(value, Tensor) and value.is_floating_point() else value

        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), read)
        value: Any = args[0] if traits_of(node).casts else call(*args, **kwargs)
        if traits_of(node).rounding is not Rounding.SUMS:
            registers[node.name] = value
        return value.to(node.meta["val"].dtype)

    def _reads_registers(self, node: Node, registers: Mapping[str, Tensor]) -> bool:
        """Whether a fused kernel computes `node`: pointwise, or moving or summing up what is in registers."""
        if not self._variation.has_registers or node.name in self._plain or not is_tensor_node(node):
            return False
        if not node.meta["val"].is_floating_point():
            return False
        is_fed = any(source.name in registers for source in node.all_input_nodes)
        traits = traits_of(node)
        if traits.rounding is Rounding.POINTWISE or traits.casts:
            return is_fed or node.meta["val"].dtype in (torch.float16, torch.bfloat16)
        return is_fed and (is_view(node) or traits.moves or traits.rounding is Rounding.SUMS)

    def _read(self, source: Node) -> Any:
        return self._values[source.name]
