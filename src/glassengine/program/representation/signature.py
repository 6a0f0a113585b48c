"""What the signature of an exported program says: its inputs, the names of its results, what it would change."""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.utils import _pytree as pytree

from glassengine.errors import UsageError
from glassengine.program.representation.program import rebuilt
from glassengine.program.user_code.module_state import STATE
from glassengine.sites import plain_containers


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
    num_other = sum(spec.kind is not OutputKind.USER_OUTPUT for spec in specs) - len(changed)
    kept = [spec for spec in specs if spec.kind not in (OutputKind.BUFFER_MUTATION, OutputKind.USER_OUTPUT)]
    results = [OutputSpec(OutputKind.USER_OUTPUT, spec.arg, None) for spec in changed]
    results += [spec for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    assert len(kept) == num_other
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


def _print_nothing(*_: object, **__: object) -> None:
    pass


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporter's deprecation noise off the user's screen, and what it prints of errors that it raises anyway.

    That is a traceback, and all of the graph until then, hundreds of lines.
    """
    tracing = logging.getLogger("torch._subclasses.fake_tensor")
    was = tracing.disabled
    exporter = importlib.import_module("torch.export._trace").__dict__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tracing.disabled = True
        exporter["print"] = _print_nothing
        try:
            yield
        finally:
            tracing.disabled = was
            exporter.pop("print", None)
