"""A back-end of `torch.compile` that runs the graph vLLM compiles node by node, and hands over what each node computes.

vLLM gives it the whole decoder: `compilation_config={"mode": 2, "backend": "glassengine_vllm_graph.functional"}`, with
VLLM_USE_AOT_COMPILE=0. The graph is functional ATen, so that no kernel writes into what another one has read; vLLM's
own kernels stand in it as they are. What a module gives is called as its hook would call it (`...qkv_proj/out.0`), and
what is inside of a norm or an activation after its operation: `model.layers.0.input_layernorm/ops.rsqrt.0`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

_SELF = re.compile(r"^L\['self'\]")
_ITEM = re.compile(r"\['?(\w+)'?\]")
_GIVEN = {"query": 0, "key": 1, "value": 2}
_INSIDE = re.compile(r"(norm|act|act_fn|ln_\w+)$")
_EMPTY = ("empty", "detach", "new_empty")
watchers: list[Callable[[str, torch.Tensor], None]] = []
"""Called with the name and the value of each node."""
root = ["model"]
"""Name of the module that is compiled."""


def functional(module: GraphModule, inputs: Any) -> Any:
    """Compile to functional ATen, which is run node by node."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=_observed, inference_compiler=_observed)(module, inputs)


def _observed(module: GraphModule, inputs: Any) -> Any:
    names = named(module)

    def run(*args: Any) -> Any:
        return _Observed(module, names).run(*args)

    run._boxed_call = False  # type: ignore[attr-defined]
    return run


class _Observed(Interpreter):
    def __init__(self, module: GraphModule, names: dict[Node, list[tuple[str, Node]]]) -> None:
        super().__init__(module)
        self._named = names

    def run_node(self, n: Node) -> Any:
        # What a node is given is in the environment until it has run.
        names = self._named.get(n, [])
        given = [(name, self.env[of]) for name, of in names if of is not n]
        if kernel_of(n) == "rotary_embedding":
            given += self._rotation(n)
        value = super().run_node(n)
        for name, one in [*given, *((name, value) for name, of in names if of is n)]:
            if isinstance(one, torch.Tensor):
                for watch in watchers:
                    watch(name, one)
        return value

    def _rotation(self, n: Node) -> list[tuple[str, Any]]:
        """Return the rows that a kernel reads of the table of cosines and sines."""
        given = [n.kwargs.get(name) for name in ("cos_sin_cache", "positions")]
        cache, positions = (self.env[one] if isinstance(one, Node) else None for one in given)
        if cache is None or positions is None:
            return []
        cos, sin = cache[positions.flatten()].chunk(2, -1)
        return [(f"{path_of(n)}/in.cos", cos), (f"{path_of(n)}/in.sin", sin)]


def named(module: GraphModule) -> dict[Node, list[tuple[str, Node]]]:
    """Return what is handed over when a node has run: names, and the nodes whose values have them."""
    by_node: dict[Node, list[tuple[str, Node]]] = {}
    inside = _by_module(module)
    for path, of_path in inside.items():
        nodes = [node for node in of_path if path_of(node) == path]  # of no module inside of it
        own = set(nodes)
        is_inside = _INSIDE.search(path) is not None
        whole = set(inside[path])
        results = [node for node in inside[path] if any(u not in whole for u in node.users) and not _is_empty(node)]
        sums = [node for node in nodes if _operation(node) == "add" and _is_of_tensors(node)]
        # A norm that adds the residual returns both; the sum of the last one is read by nobody else.
        others = results[:-1] if len(results) == 2 else sums[:1]
        if len(results) == 1 or (is_inside and len(results) == 2):
            for place, node in enumerate([*results[-1:], *(others if is_inside else ())]):
                by_node.setdefault(node, []).append((f"{path}/out.{place}", node))
        for node in nodes:
            given = [(f"{path}/in.{_GIVEN[word]}", one) for word, one in node.kwargs.items() if word in _GIVEN]
            by_node.setdefault(node, []).extend((name, one) for name, one in given if isinstance(one, Node))
        if not is_inside:
            continue
        first = next((node for node in nodes if node.args and isinstance(node.args[0], Node) and _has_rows(node)), None)
        if first is not None and isinstance(first.args[0], Node) and first.args[0] not in own:
            by_node[first].append((f"{path}/in.0", first.args[0]))
        counts: Counter[str] = Counter()
        for node in nodes:
            name = _operation(node)
            if kernel_of(node) is None and node not in sums and not _is_empty(node) and _has_rows(node):
                by_node[node].append((f"{path}/ops.{name}.{counts[name]}", node))
                counts[name] += 1
    return by_node


def _by_module(module: GraphModule) -> dict[str, list[Node]]:
    """Return the nodes of each module and of those inside of it, in the order of the graph; not those of the whole."""
    by_module: dict[str, list[Node]] = {}
    for node in module.graph.nodes:
        path = path_of(node) if node.op == "call_function" else root[0]
        while path.startswith(f"{root[0]}."):
            by_module.setdefault(path, []).append(node)
            path = path.rpartition(".")[0]
    return by_module


def kernel_of(node: Node) -> str | None:
    """Return the kernel that a node wraps which writes into what it is given; None for any other node."""
    wrapped = node.args[0] if node.args else None
    if "auto_functionalized" not in str(node.target) or not isinstance(wrapped, torch._ops.OpOverload):
        return None
    return wrapped._schema.name.partition("::")[2]


def _operation(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def _is_empty(node: Node) -> bool:
    return _operation(node) in _EMPTY


def _has_rows(node: Node) -> bool:
    """Whether a value has a row for each token: what is made of weights alone has sizes that do not change."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or (value.dim() > 0 and not isinstance(value.shape[0], int))


def _is_of_tensors(node: Node) -> bool:
    return len(node.args) > 1 and all(isinstance(one, Node) for one in node.args[:2])


def path_of(node: Node) -> str:
    """Return the module that a node is of, by its name in the model."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return root[0]
    path = _SELF.sub(root[0], str(list(stack.values())[-1][0]))
    return _ITEM.sub(lambda one: f".{one[1]}", path).replace("._modules", "")
