"""The signature of a program: its inputs, its results, and the sizes and dtypes for which it holds.

Products of two dtypes are refused by torch when they run, and traced without a word. The exporter takes a size of 1 for
a constant, so a dynamic dimension is traced with another one and 2 is its bound. Most graphs are right below it
nevertheless, and a batch of 1 is what users run first: where a step of the inputs has such a size, the graph is run on
it and its results are held against those of the module.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.utils import _pytree as pytree

from glassengine.errors import UsageError
from glassengine.ops.traits import traits_of
from glassengine.program.representation.program import Program, rebuilt
from glassengine.program.user_code.module_state import STATE, run_alone
from glassengine.sites import plain_containers, port_leaves


def user_inputs(exported: ExportedProgram) -> list[str]:
    """Return the placeholders of tensors that are given at run time, in order."""
    placeholders = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    specs = exported.graph_signature.input_specs
    user = [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT and spec.arg.name in placeholders]
    return [name for name in user if isinstance(placeholders[name].meta.get("val"), torch.Tensor)]


def tensor_results_only(exported: ExportedProgram, names: list[str]) -> ExportedProgram:
    """Return the program without non-tensor results (None, numbers), and drop their names from `names`.

    Back-ends do not agree on what to return for those.
    """
    specs = exported.graph_signature.output_specs
    kept = [s.kind is not OutputKind.USER_OUTPUT or isinstance(s.arg, TensorArgument) for s in specs]
    if all(kept):
        return exported
    num_other = sum(spec.kind is not OutputKind.USER_OUTPUT for spec in specs)
    names[:] = [name for name, keep in zip(names, kept[num_other:], strict=True) if keep]
    output = exported.graph.output_node()
    output.args = (tuple(arg for arg, keep in zip(output.args[0], kept, strict=True) if keep),)
    new_specs = [spec for spec, keep in zip(specs, kept, strict=True) if keep]
    return rebuilt(exported, exported.graph, new_specs, out_spec=pytree.tree_structure(tuple(names)))


def with_state_as_results(exported: ExportedProgram, names: list[str]) -> ExportedProgram:
    """Return the program with what it would change in its buffers as results, whose names come first in `names`."""
    specs = exported.graph_signature.output_specs
    changed = [spec for spec in specs if spec.kind is OutputKind.BUFFER_MUTATION]
    if not changed:
        return exported
    kept = [spec for spec in specs if spec.kind not in (OutputKind.BUFFER_MUTATION, OutputKind.USER_OUTPUT)]
    results = [OutputSpec(OutputKind.USER_OUTPUT, spec.arg, None) for spec in changed]
    results += [spec for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    names[:0] = [f"{STATE}{spec.target}" for spec in changed]
    nodes = dict(zip((spec.arg.name for spec in specs), exported.graph.output_node().args[0], strict=True))
    order = [*kept, *results]
    exported.graph.output_node().args = (tuple(nodes[spec.arg.name] for spec in order),)
    return rebuilt(exported, exported.graph, order, out_spec=pytree.tree_structure(tuple(names)))


def require_unchanged_buffers(specs: Sequence[OutputSpec], model: str) -> None:
    """Refuse a module with state: nothing would carry it from one execution to the next."""
    changed = [str(s.target) for s in specs if s.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)]
    if changed:
        raise UsageError(
            f"{model} changes its own buffers in a forward",
            got=", ".join(changed[:5]),
            expected="a module without state: what it remembers comes in as an input",
            hint="make the buffer an argument of forward; it may be written in place",
        )


def result_names(exported: Any) -> list[str]:
    """Names of the results of a plain module: container keys, or "output" for a single tensor."""
    spec = exported.module_call_graph[0].signature.out_spec
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return [name for name, _ in _named_leaves(tree)]


def named_results(value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors among what a forward returned, by the names that an export of it gives them."""
    return {name: leaf for name, leaf in _named_leaves(value) if isinstance(leaf, torch.Tensor)}


def plain_results(value: Any) -> dict[str, Any]:
    """Return what is no tensor among what a forward returned, by the same names: numbers, text, None."""
    return {name: leaf for name, leaf in _named_leaves(value) if not isinstance(leaf, torch.Tensor)}


def _named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in pytree.tree_flatten_with_path(plain_containers(tree))[0]:
        yield re.sub(r"\W+", ".", pytree.keystr(path)).strip(".") or "output", leaf


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporter's deprecation noise off the user's screen, and what it prints of errors that it raises anyway.

    That is a traceback, and all of the graph until then, hundreds of lines.
    """
    exporter = importlib.import_module("torch.export._trace")
    with (
        warnings.catch_warnings(action="ignore"),
        mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),
        mock.patch.object(exporter, "print", lambda *_, **__: None, create=True),
    ):
        yield


def require_one_dtype(program: Program) -> None:
    """Check that each product multiplies numbers of one dtype.

    Raises:
        UsageError: One does not; says where, and which inputs have another dtype than the weights.
    """
    for node in program.graph.nodes:
        if not traits_of(node).multiplies:
            continue
        values = [source.meta.get("val") for source in node.all_input_nodes]
        dtypes = dict.fromkeys(v.dtype for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())
        if len(dtypes) < 2:
            continue
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        site = program.sites.by_node[node.name][0]
        weights = {tensor.dtype for tensor in program.weights().values() if tensor.is_floating_point()}
        of_weights = {str(dtype).removeprefix("torch.") for dtype in weights}
        others = [port for port in program.inputs if "float" in port.dtype and port.dtype not in of_weights]
        given = ", ".join(f"{port.name} is {port.dtype}" for port in others[:5])
        raise UsageError(
            f"the forward multiplies numbers of two dtypes at {site.source or site.name}",
            got=" by ".join(names),
            expected="one dtype: torch refuses others when it runs them",
            hint=f"{given}: give it in the dtype of the weights, or build with --dtype {others[0].dtype}"
            if given
            else None,
        )


def small_sizes(module: nn.Module, program: Program, steps: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return dynamic size -> 1 for those that a step has and for which program and module agree."""
    small: dict[str, int] = {}
    for step in steps:
        leaves = [leaf for _, leaf in port_leaves(":in", dict(step))]
        tensors = {port.name: leaf for port, leaf in zip(program.inputs, leaves, strict=True)}
        of_one = {
            name
            for port in program.inputs
            for name, size in zip(port.shape, tensors[port.name].shape, strict=True)
            if isinstance(name, str) and size == 1
        }
        if of_one and _agree(module, program, step, tensors):
            small |= dict.fromkeys(of_one, 1)
    return small


def _agree(module: nn.Module, program: Program, step: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bool:
    own = {port.name: tensors[port.name].clone() for port in program.inputs}
    specs = program.exported.graph_signature.output_specs
    with torch.no_grad():
        expected = run_alone(module, step)
        try:
            results = program.interpreted(torch.fx.Interpreter(program.exported.graph_module), own)
        except RuntimeError:  # an assertion of the graph, or shapes that do not fit
            return False
    actual = [results[spec.arg.name] for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    leaves = [leaf for leaf in pytree.tree_leaves(expected) if isinstance(leaf, torch.Tensor)]
    return len(actual) == len(leaves) and all(_close(a, b) for a, b in zip(actual, leaves, strict=True))


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether both are the same but for rounding; a graph that does not hold is wrong by far more."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    tolerance = math.sqrt(torch.finfo(expected.dtype).eps)
    scale = float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max()) if expected.numel() else 0.0
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def fixed_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Non-tensor arguments: their values become part of the graph."""
    tensors = {port.removeprefix(":in.").split("[")[0].split(".")[0] for port, _ in port_leaves(":in", dict(inputs))}
    return {k: v for k, v in inputs.items() if k not in tensors and isinstance(v, (bool, int, float, str, type(None)))}


def leave_meta_device(model: nn.Module) -> bool:
    """Move a model without values off the meta device; return whether it has values.

    Kernels on meta tensors choose other layouts; untouched CPU memory costs nothing and gives the same graph.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return True
    model.to_empty(device="cpu")
    model.tie_weights()  # type: ignore[operator]
    return False


def named_inputs(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of nested keyword arguments by input name: "x", "pair[0]", "options.scale"."""
    return {port.removeprefix(":in").lstrip("."): leaf for port, leaf in port_leaves(":in", dict(inputs))}


def example_of(steps: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], Any]:
    """Return the step to trace with, and the dimensions that differ between steps."""
    flat = [pytree.tree_flatten(dict(step)) for step in steps]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise UsageError("the steps of --inputs have different keys or nesting", expected="the same in every step")
    leaves = [list(step) for step, _ in flat]
    names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(dict(steps[0]))[0]]
    differing = [_differing(name, column) for name, column in zip(names, zip(*leaves, strict=True), strict=True)]
    # A size of 1 would be taken for a constant, so a dynamic dimension is traced with another one.
    usable = [
        step
        for step in leaves
        if all(leaf.shape[i] > 1 for leaf, dims in zip(step, differing, strict=True) for i in dims or ())
    ]
    if not usable:
        raise UsageError(
            "no step of --inputs can be traced with",
            got="in each of them a dimension that differs between steps has size 0 or 1",
            expected="one step in which all of them are at least 2",
        )
    dynamic = [None if dims is None else dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for dims in differing]
    return pytree.tree_unflatten(usable[0], spec), pytree.tree_unflatten(dynamic, spec)


def as_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its elements in order, as export is given it."""
    return tensor.contiguous() if tensor.layout is torch.strided else tensor


def _differing(name: str, leaves: Sequence[Any]) -> list[int] | None:
    """Return the dimensions of one input that differ between steps; None for what is not a tensor."""
    first = leaves[0]
    if not isinstance(first, torch.Tensor):
        if any(isinstance(leaf, torch.Tensor) or leaf != first for leaf in leaves):
            raise UsageError(
                f"input {name} differs between steps and is not a tensor",
                got=", ".join(sorted({repr(leaf)[:40] for leaf in leaves})),
                expected="one value, which the program keeps as a constant",
            )
        return None
    kinds = {f"{leaf.dtype}, {leaf.dim()} dimensions" if isinstance(leaf, torch.Tensor) else "other" for leaf in leaves}
    if len(kinds) > 1:
        raise UsageError(f"input {name} is of different kinds in the steps of --inputs", got="; ".join(sorted(kinds)))
    return [i for i, sizes in enumerate(zip(*(leaf.shape for leaf in leaves), strict=True)) if len(set(sizes)) > 1]
