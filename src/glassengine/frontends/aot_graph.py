"""From the graphs of torch.compile to `CapturedGraph`: every input and output gets the name that a user knows.

TorchDynamo knows from which expression of the user's code each input is read; AOT autograd knows, for each input and
output of the graphs that it makes, which of Dynamo's it is. Here the two are put together.

Its joint graph is cut into a forward and a backward graph by torch, which lets the backward graph recompute values
rather than keep them. Where such a value is read from a tensor that the forward graph writes to, like a counter or a
running mean, that read would come after the write: torch 2.13 gives wrong gradients then, in silence
(pytorch/pytorch#197039). Here those values are kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch._aot_autograd import descriptors
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from glassengine.executable.graph import (
    CapturedGraph,
    GraphKind,
    InputKind,
    InputSpec,
    input_spec,
    mutated_placeholders,
)

_STORE = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_VARIABLE = re.compile(r"^[LG]\['(\w+)'\]")
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


@dataclass(frozen=True)
class InputSource:
    """An input of a Dynamo graph: the user's name of it, what it is, whether the caller's tensor needs gradients."""

    name: str
    kind: InputKind
    requires_grad: bool


class Names:
    """The user's names in one Dynamo graph.

    If all modules belong to one variable, as usual, paths are as in `named_modules()` of that module;
    otherwise they begin with the name of the variable.

    Attributes:
        sources: Of the inputs of the graph, in order.
        model: Class of the module that contains all others; None if there is none.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        texts = [_source_text(node) for node in placeholders]
        modules = [path for node in graph.nodes for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        roots = {text.partition("._")[0] for text in texts if _STORE.search(text)}
        roots |= {path for path in modules if not any(_is_within(path, root) for root in roots)}
        self._root = roots.pop() if len(roots) == 1 else None
        self.sources = [
            InputSource(self.path(text), _kind(text), getattr(node.meta.get("example_value"), "requires_grad", False))
            for node, text in zip(placeholders, texts, strict=True)
        ]
        self.model = next(
            (
                kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__
                for node in graph.nodes
                for path, kind in (node.meta.get("nn_module_stack") or {}).values()
                if path == self._root
            ),
            None,
        )

    @property
    def root(self) -> str:
        """The user's expression on which all modules hang, like "self"; "" where there are several."""
        return _VARIABLE.sub(r"\1", self._root or "")

    def path(self, text: str) -> str:
        """Return the user's spelling of a source or module path of Dynamo."""
        path = _STORE.sub(r".\1", text)
        if self._root is not None and _is_within(path, self._root):
            path = path[len(self._root) :].lstrip(".")
        return _VARIABLE.sub(r"\1", path)


def captured(module: GraphModule, kind: GraphKind, names: Names, taps: Sequence[str] = ()) -> CapturedGraph:
    """Return a graph that AOT autograd hands to its compiler, with the user's names.

    Args:
        module: The graph; the module paths of its nodes are replaced by the user's.
        kind: "inference", "forward" or "backward".
        names: Of the Dynamo graph that it was made from.
        taps: Names of the last results, which AOT autograd does not know of.
    """
    written = mutated_placeholders(module.graph)
    unique = _Unique()
    inputs = []
    output: Node | None = None
    for node in module.graph.nodes:
        if node.op == "placeholder":
            inputs.append(_input(node, names, node in written, unique))
        elif node.op == "output":
            output = node
        stack = next((node.meta[key] for key in _STACKS if node.meta.get(key)), None)
        if stack is not None:
            node.meta["nn_module_stack"] = {key: (names.path(path), what) for key, (path, what) in stack.items()}
    assert output is not None
    unique = _Unique()
    results: Any = output.args[0]
    described = output.meta.get("desc") or [None] * (len(results) - len(taps))
    outputs = [
        unique(_output_name(index, value, what, names))
        for index, (value, what) in enumerate(zip(results[: len(described)], described, strict=True))
    ]
    outputs += [unique(f"tap({name})") for name in taps]
    return CapturedGraph(module, tuple(inputs), tuple(outputs), kind)


class _Unique:
    """Makes names unique: the second "x" becomes "x#2"."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def __call__(self, name: str) -> str:
        self._seen[name] += 1
        return name if self._seen[name] == 1 else self(f"{name}#{self._seen[name]}")


def _input(node: Node, names: Names, is_mutated: bool, unique: _Unique) -> InputSpec:
    what = node.meta.get("desc")
    source = _source(what, names.sources)
    name, kind, requires_grad = node.name, "other", False
    if source is not None:
        name, kind, requires_grad = source.name, source.kind, source.requires_grad
    elif isinstance(what, descriptors.TangentAOTInput):
        name, kind = f"tangent({_output_name(0, None, what.output, names)})", "tangent"
    elif not isinstance(what, descriptors.AOTInput):
        name, kind = f"saved({node.name})", "saved"
    elif isinstance(what, (descriptors.ViewBaseAOTInput, descriptors.SyntheticBaseAOTInput)):
        base = _source(what.base_of, names.sources)
        name, kind = f"base({base.name if base else node.name})", "input"
    value = node.meta["val"]
    return input_spec(value, unique(name), kind, requires_grad=requires_grad, is_mutated=is_mutated)  # type: ignore[arg-type]


def _source(what: Any, sources: Sequence[InputSource]) -> InputSource | None:
    while isinstance(what, descriptors.SubclassGetAttrAOTInput):
        what = what.base
    return sources[what.idx] if isinstance(what, descriptors.PlainAOTInput) and what.idx < len(sources) else None


def _output_name(index: int, value: Any, what: Any, names: Names) -> str:
    match what:
        case descriptors.PlainAOTOutput():
            return f"output[{what.idx}]"
        case descriptors.GradAOTOutput():
            source = _source(what.grad_of, names.sources)
            return f"grad({source.name if source else what.grad_of.expr()})"
        case descriptors.InputMutationAOTOutput():
            source = _source(what.mutated_input, names.sources)
            return f"mutated({source.name if source else what.mutated_input.expr()})"
        case descriptors.SavedForBackwardsAOTOutput() if isinstance(value, Node):
            return f"saved({value.name})"
        case descriptors.AOTOutput():
            return str(what.expr())
        case _:
            return f"output[{index}]"


def _source_text(node: Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    return node.name if source is None else str(source.name)


def _kind(text: str) -> InputKind:
    if re.search(r"\._parameters\['[^']+'\]$", text):
        return "parameter"
    return "buffer" if re.search(r"\._buffers\['[^']+'\]$", text) else "input"


def _is_within(path: str, root: str) -> bool:
    return path == root or path.startswith((f"{root}.", f"{root}["))


def partition(joint: GraphModule, joint_inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
    """Return the forward and the backward graph of a joint graph.

    Args:
        joint: The graph; what must be kept is marked in it.
        joint_inputs: Its inputs, fake.
        options: Further arguments of torch's own partitioner.
    """
    for written in mutated_placeholders(joint.graph):
        for reader in _readers(written):
            # What the user's checkpointing says of a value stands.
            reader.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    parts: tuple[GraphModule, GraphModule] = min_cut_rematerialization_partition(joint, joint_inputs, **options)
    return parts


def _readers(value: Node) -> Iterator[Node]:
    """Yield every node that computes something from `value`, through views of it, which are not copies."""
    for user in value.users:
        if not isinstance(user.target, torch._ops.OpOverload) or user.target._schema.is_mutable:
            continue
        if user.target.is_view:
            yield from _readers(user)
        else:
            yield user
