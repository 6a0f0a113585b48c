"""The graph of a snapshot on disk: a `torch.export` archive without weights, written from any captured graph.

A captured graph is flat: every placeholder becomes a user input, and a tensor that the graph holds itself becomes one
more of them. Nothing is traced again, so what is read back is the graph that was captured, node by node.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._export.verifier import TrainingIRVerifier
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from glassengine.errors import CorruptError
from glassengine.executable.graph import attribute
from glassengine.program.representation.archive import inert_archive, load_archive
from glassengine.program.user_code.tracing import fast_writing

_SYMBOLS = {torch.SymInt: SymIntArgument, torch.SymFloat: SymFloatArgument, torch.SymBool: SymBoolArgument}


@dataclass(frozen=True)
class FlatGraph:
    """A captured graph that holds no tensors.

    Attributes:
        module: Every input is a placeholder.
        constants: Tensors that the captured graph held itself, in the order of the placeholders they became, which
            stand behind those it had.
    """

    module: GraphModule
    constants: Mapping[str, torch.Tensor]


def flatten(module: GraphModule, *, with_source: bool = True) -> FlatGraph:
    """Return a copy of a captured graph, with the tensors that it holds as further inputs.

    Without `with_source` it has no lines of the user's code.
    """
    module = copy.deepcopy(module)
    last = None
    for node in module.graph.nodes:
        if node.op == "placeholder":
            last = node
    constants: dict[str, torch.Tensor] = {}
    for node in list(module.graph.nodes):
        value = attribute(module, str(node.target)) if node.op == "get_attr" else None
        if not isinstance(value, torch.Tensor):
            continue
        place = module.graph.inserting_before(None) if last is None else module.graph.inserting_after(last)
        with place:
            last = module.graph.placeholder(f"constant_{len(constants)}")
        last.meta = {"val": node.meta["val"] if "val" in node.meta else _fake(module, value)}
        node.replace_all_uses_with(last)
        module.graph.erase_node(node)
        constants[last.name] = value
    for node in module.graph.nodes:
        node.meta = _plain_meta(node, with_source)
    _share_mode(module)
    _complete_values(module)
    module.recompile()
    return FlatGraph(module, constants)


def graph_archive(flat: FlatGraph) -> bytes:
    """Return the content of the file of a flat graph.

    Raises:
        Exception: Any error of torch for a graph that it cannot write.
    """
    module = flat.module
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    results = module.graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    results = results or (None,)  # torch cannot write a graph that only writes to its inputs
    module.graph.output_node().args = (tuple(results),)
    inputs = [InputSpec(InputKind.USER_INPUT, _argument(node), None) for node in placeholders]
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, _argument(result), None) for result in results]
    calling = ModuleCallSignature(
        inputs=[spec.arg for spec in inputs],
        outputs=[spec.arg for spec in outputs],
        in_spec=pytree.tree_structure((tuple(range(len(inputs))), {})),
        out_spec=pytree.tree_structure(tuple(range(len(outputs)))),
    )
    exported = ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict={},
        range_constraints=_ranges(module),
        module_call_graph=[ModuleCallEntry("", calling)],
        # Of graphs that torch.compile captures some write to their inputs, which this dialect allows.
        verifiers=[TrainingIRVerifier],
        example_inputs=((), {}),
    )
    exported._guards_code = []  # code, which a reader would have to trust
    buffer = io.BytesIO()
    with fast_writing():
        torch.export.save(exported, buffer)
    return buffer.getvalue()


def load_graph(path: Path) -> ExportedProgram:
    """Return the graph of a file with `graph_archive`; its placeholders are flat user inputs. Reading it runs no code.

    A graph that had no results returns None.

    Raises:
        CorruptError: The file is missing, damaged, holds more than a graph, or calls an operation that this process
            does not know.
    """
    archive = inert_archive(path)
    try:
        return load_archive(archive)
    except Exception as error:
        text = str(error).strip().splitlines()
        raise CorruptError(
            f"{path.name} cannot be read",
            got=f"{type(error).__name__}: {text[-1] if text else ''}",
            hint="import the library that defines its custom operations first, and use the torch it was written with",
        ) from error


def _ranges(module: GraphModule) -> dict[Any, Any]:
    """Return the range of every symbol in the sizes of a graph, as the tracer of it knows them."""
    environment = getattr(_fake_mode(module), "shape_env", None)
    return {} if environment is None else dict(environment.var_to_range)


def _plain_meta(node: Node, with_source: bool) -> dict[str, Any]:
    """What the archive can hold of a node: its value, its source lines and its modules."""
    kept = ("val", "stack_trace") if with_source else ("val",)
    meta = {key: node.meta[key] for key in kept if node.meta.get(key) is not None}
    stack = node.meta.get("nn_module_stack") or {}
    meta["nn_module_stack"] = {
        str(key): (path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
        for key, (path, kind) in stack.items()
    }
    return meta


def _argument(value: Any) -> Any:
    if not isinstance(value, Node):
        return ConstantArgument(name="", value=value)
    content = value.meta.get("val")
    if isinstance(content, torch.Tensor):
        return TensorArgument(name=value.name)
    symbol = _SYMBOLS.get(type(content))
    return ConstantArgument(name=value.name, value=content) if symbol is None else symbol(name=value.name)


def _fake(module: GraphModule, value: torch.Tensor) -> torch.Tensor:
    """Return `value` as the other nodes of a graph know theirs: without data."""
    mode = _fake_mode(module)
    return value.detach().to("meta") if mode is None else mode.from_tensor(value.detach(), static_shapes=True)


def _fake_mode(module: GraphModule) -> Any:
    return next(iter(_fake_modes(module)), None)


def _fake_modes(module: GraphModule) -> list[FakeTensorMode]:
    values = pytree.tree_leaves([node.meta.get("val") for node in module.graph.nodes])
    return list(dict.fromkeys(value.fake_mode for value in values if isinstance(value, FakeTensor)))


def _share_mode(module: GraphModule) -> None:
    """Make the values of all nodes fakes of one mode: a graph of one operation has those of its caller."""
    if len(_fake_modes(module)) < 2:
        return
    mode = FakeTensorMode()

    def renewed(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(renewed, node.meta["val"])


def _complete_values(module: GraphModule) -> None:
    """Compute, without data, what untraced nodes lack: those of a graph of one operation."""
    if all("val" in node.meta for node in module.graph.nodes if node.op == "call_function"):
        return
    mode = _fake_mode(module) or FakeTensorMode()
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*values)
