"""The reference as a graph of simple operations in float64, in which one can be changed at a time.

Operations of several steps (softmax, norms, attention, losses) are written out, so that a mistake inside of one is the
change of one simple operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from glassengine.kernels.trace import ReferenceTrace, is_mutable, wide
from glassengine.numerics.float64 import retarget, target_of
from glassengine.ops.traits import base_name, traits_of

Change = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Value of an op, its arguments -> another value."""


class WrittenOut:
    """A traced reference as simple ops in float64, with all values on some inputs."""

    def __init__(self, trace: ReferenceTrace, inputs: Sequence[Any]) -> None:
        from torch._functorch.compile_utils import fx_graph_cse
        from torch.fx.experimental.proxy_tensor import make_fx

        assert trace.module is not None
        leaves = [wide(leaf) for leaf in pytree.tree_leaves(list(inputs))]
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        module = trace.module

        def call(*given: Tensor) -> Any:
            all_of = list(leaves)
            for i, tensor in zip(tensors, given, strict=True):
                all_of[i] = tensor
            return _Expanding(module).run(*all_of)[0]

        self.inputs = [leaves[i] for i in tensors]
        make = make_fx(call, tracing_mode="real", pre_dispatch=True, _error_on_data_dependent_ops=False)
        with torch.no_grad():
            self.module: GraphModule = make(*[t.clone() for t in self.inputs])
        self.module.graph.eliminate_dead_code()
        if not any(is_mutable(n) for n in self.module.graph.nodes):
            # What is written twice is computed once, or a mistake would be in one of two places.
            self.module.graph = fx_graph_cse(self.module.graph)
        self.nodes = [n for n in self.module.graph.nodes if n.op == "call_function"]
        self.placeholders = [n for n in self.module.graph.nodes if n.op == "placeholder"]
        self.is_pure = not any(is_mutable(n) for n in self.nodes)
        self.values: dict[Node, Any] = {}
        self.results = self.run({})

    @torch.no_grad()
    def run(self, changes: Mapping[Node, Change], inputs: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        """Return the results with the values of some ops, or some inputs, replaced."""
        is_first = not self.values
        env: dict[Node, Any] = {}
        results: list[Tensor] = []
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                place = self.placeholders.index(node)
                value = (inputs or {}).get(place, self.inputs[place])
                env[node] = value if self.is_pure else value.clone()
            elif node.op == "get_attr":
                env[node] = getattr(self.module, node.target)
            elif node.op == "call_function":
                is_same = not is_first and self.is_pure and node not in changes
                if is_same and all(env[s] is self.values[s] for s in node.all_input_nodes):
                    env[node] = self.values[node]
                    continue
                args, kwargs = self.given(node, env)
                env[node] = node.target(*args, **kwargs)
                if node in changes:
                    env[node] = changes[node](env[node], args, kwargs)
            else:
                args = map_aggregate(node.args, lambda n: env[n] if isinstance(n, Node) else n)
                results = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor)]
        if is_first:
            self.values = env
        return results

    def given(self, node: Node, env: Mapping[Node, Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of an op."""
        env = self.values if env is None else env
        return map_aggregate((node.args, node.kwargs), lambda n: env[n] if isinstance(n, Node) else n)


class _Expanding(Interpreter):
    """Runs a graph in float64 with ops of several steps written out."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self._is_pure = not any(is_mutable(node) for node in module.graph.nodes)

    def run_node(self, n: Node) -> Any:
        if n.op == "get_attr":
            return wide(super().run_node(n))
        if n.op != "call_function":
            return super().run_node(n)
        given: tuple[Any, Any] = self.fetch_args_kwargs_from_env(n)
        args, kwargs = map_aggregate(given[0], _retargeted), map_aggregate(given[1], _retargeted)
        is_cast = traits_of(n).casts and isinstance(args[0], Tensor) and args[0].is_floating_point()
        if is_cast and self._is_pure and n.meta["val"].is_floating_point():
            return args[0]
        if base_name(n.target) == "mul" and args[0] is args[1]:
            return torch.square(args[0])
        formula = _FORMULAS.get(base_name(n.target))
        if formula is not None:
            found = formula(*args, **kwargs)
            if found is not None:
                return found
        call: Any = target_of(n) if isinstance(n.target, torch._ops.OpOverload) else n.target
        value = call(*args, **kwargs)
        is_alias = isinstance(value, Tensor) and args and value is args[0] and not is_mutable(n)
        return value.clone() if is_alias else value


def _retargeted(value: Any) -> Any:
    # What is in float64 already would be cast once more, and the cast be an op of the graph.
    return value if isinstance(value, Tensor) and value.dtype is torch.float64 else retarget(value)


def _softmax(x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
    e = torch.exp(x - x.amax(dim, keepdim=True))
    return e / e.sum(dim, keepdim=True)


def _log_softmax(x: Tensor, dim: int, *_: Any, **__: Any) -> Tensor:
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    top = x.amax(dim, keepdim=True)
    found = torch.log(torch.exp(x - top).sum(dim, keepdim=True)) + top
    dims = [dim] if isinstance(dim, int) else list(dim)
    return found if keepdim or len(dims) != 1 else found.squeeze(dims[0])


def _normalized(x: Tensor, dims: list[int], eps: float) -> Tensor:
    centered = x - x.mean(dims, keepdim=True)
    return centered / torch.sqrt(torch.square(centered).mean(dims, keepdim=True) + eps)


def _layer_norm(x: Tensor, shape: Any, w: Any = None, b: Any = None, eps: float = 1e-5, *_: Any) -> Tensor:
    y = _normalized(x, list(range(-len(shape), 0)), eps)
    y = y if w is None else y * w
    return y if b is None else y + b


def _rms_norm(x: Tensor, shape: Any, w: Any = None, eps: float | None = None) -> Tensor:
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    y = x / torch.sqrt(torch.square(x).mean(list(range(-len(shape), 0)), keepdim=True) + eps)
    return y if w is None else y * w


def _group_norm(x: Tensor, groups: int, w: Any = None, b: Any = None, eps: float = 1e-5, *_: Any) -> Tensor:
    channel = [-1, *[1] * (x.dim() - 2)]
    y = _normalized(x.reshape(x.shape[0], groups, -1), [-1], eps).reshape(x.shape)
    y = y if w is None else y * w.reshape(channel)
    return y if b is None else y + b.reshape(channel)


def _linear(x: Tensor, w: Tensor, b: Any = None) -> Tensor:
    y = x @ w.mT
    return y if b is None else y + b


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False
) -> Tensor:  # fmt: skip
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    s = torch.matmul(q, k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = torch.ones(s.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        s = torch.where(mask, s, -math.inf) if mask.dtype is torch.bool else s + mask
    return torch.matmul(_softmax(s, -1), v)


def _cross_entropy(
    x: Tensor, t: Tensor, w: Any = None, reduction: int = 1, ignore: int = -100, smoothing: float = 0.0
) -> Tensor | None:
    is_plain = x.dim() == 2 and not t.is_floating_point() and w is None and not smoothing
    if not is_plain or bool((t == ignore).any()) or reduction == 0:
        return None
    terms = -torch.gather(_log_softmax(x, 1), 1, t[:, None]).squeeze(1)
    return terms.mean() if reduction == 1 else terms.sum()


def _variance(x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    dims = args[0] if args else kwargs.get("dim")
    if isinstance(dims, (bool, type(None))):
        return None
    correction = kwargs.get("correction", 1)
    correction = 1 if correction is None else correction
    dims = [dims] if isinstance(dims, int) else list(dims)
    n = math.prod(x.shape[d] for d in dims)
    square = torch.square(x - x.mean(dims, keepdim=True)).mean(dims, keepdim=kwargs.get("keepdim", False))
    return square if not correction else square * (n / max(n - correction, 1))


_FORMULAS: dict[str, Callable[..., Any]] = {
    "softmax": _softmax, "_softmax": _softmax, "log_softmax": _log_softmax, "logsumexp": _logsumexp,
    "layer_norm": _layer_norm, "rms_norm": _rms_norm, "group_norm": _group_norm, "linear": _linear,
    "scaled_dot_product_attention": _attention, "cross_entropy_loss": _cross_entropy, "var": _variance,
    "silu": lambda x: x * torch.sigmoid(x), "rsqrt": lambda x: 1 / torch.sqrt(x),
    "pow": lambda x, e: torch.square(x) if isinstance(x, Tensor) and isinstance(e, int) and e == 2 else None
}  # fmt: skip
