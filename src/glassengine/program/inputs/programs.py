"""Inputs for stored programs: those in the file, and made-up ones of the sizes that it states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Interpreter, Node
from torch.utils import _pytree as pytree

from glassengine.errors import UsageError
from glassengine.program.export.examples import named_inputs
from glassengine.program.inputs.observe import Use, Watch, uses_of
from glassengine.program.inputs.search import Target, Values, made_up
from glassengine.program.kinds.steps import MadeUp
from glassengine.program.loading.exported_file import StoredModule
from glassengine.program.representation.program import Program


def stored_inputs(module: nn.Module, program: Program) -> MadeUp:
    """Return inputs for a stored program: those in its file first, then made-up ones that it takes.

    Args:
        module: Of `read_stored`; runs the file as it is.
        program: Likewise.

    Raises:
        UsageError: None are in the file, and the model takes none of those that were tried.
    """
    if not isinstance(module, StoredModule):
        name = str(program.metadata["model"])
        return made_up(Target(name, program.inputs, lambda values: module(**values), _uses_by_graph(program)))
    return _of_exported(module, program)


def inputs_in_file(module: nn.Module) -> list[dict[str, Any]] | None:
    """Return the inputs that the file of a stored program keeps; None where it keeps none."""
    given = module.given if isinstance(module, StoredModule) else None
    return None if given is None else MadeUp([dict(given)], num_in_file=1)


def _uses_by_graph(program: Program) -> Any:
    """Return a function that interprets the graph which an ONNX file is judged with."""

    def uses(values: Values) -> dict[str, Use]:
        own = {name: value.clone() for name, value in values.items()}
        watch = Watch(own)
        by_node = {port.node: own[port.name] for port in program.inputs} | program.weights()
        given = [by_node[node.name] for node in program.graph.find_nodes(op="placeholder")]
        try:
            with torch.no_grad(), watch:
                _Watched(program, watch).run(*given, enable_io_processing=False)
        except Exception:  # what was seen until then is of use, too
            if all(use == Use() for use in watch.uses.values()):
                raise
        return watch.uses

    return uses


class _Watched(Interpreter):
    """Says of nodes that are no ops of torch what their results depend on."""

    def __init__(self, program: Program, watch: Watch) -> None:
        super().__init__(program.exported.graph_module)
        self._watch = watch

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            self._watch.depends(result, self.fetch_args_kwargs_from_env(n))
        return result


def _of_exported(module: StoredModule, program: Program) -> MadeUp:
    """Return the inputs of a `.pt2` file, and made-up ones whose sizes it allows."""
    given = module.given
    if given is None:
        names = [port.name for port in program.inputs]
        if any(not name.isidentifier() for name in names):
            raise UsageError(
                "give inputs with --inputs: the file holds none, and its arguments are nested",
                got=", ".join(names),
                expected="a dict of its keyword arguments",
            )
        tree: dict[str, Any] = dict.fromkeys(names, torch.empty(0)) | dict(program.metadata.get("fixed_inputs", {}))
    else:
        tree = dict(given)

    def nested(values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        leaves, spec = pytree.tree_flatten(tree)
        fresh = iter(values[name] for name in named_inputs(tree))
        filled = [next(fresh) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return dict(pytree.tree_unflatten(filled, spec))

    def run(values: Values) -> Any:
        return module(**nested(values))

    def uses(values: Values) -> dict[str, Use]:
        own = {name: value.clone() for name, value in values.items()}
        return uses_of(lambda: module(**nested(own)), own)

    limits = {}
    for symbol, allowed in program.exported.range_constraints.items():
        low, high = (int(bound) if bound.is_Integer else None for bound in (allowed.lower, allowed.upper))
        limits[str(symbol)] = (low or 1, min(high or 1 << 30, 1 << 30))
    known: dict[str, int] = {}
    plain = None
    if given is not None:
        plain = {name: value.detach() for name, value in named_inputs(given).items()}
        for port in program.inputs:
            for name, size in zip(port.shape, plain[port.name].shape, strict=True):
                if isinstance(name, str):
                    known.setdefault(name, size)
    target = Target(str(program.metadata["model"]), program.inputs, run, uses, limits, known, plain)
    try:
        made = made_up(target)
    except UsageError:
        if given is None:
            raise
        made = MadeUp()
    steps = [nested(step) for step in made]
    if given is None:
        return MadeUp(steps, recipes=made.recipes)
    return MadeUp([tree, *steps], recipes=made.recipes, num_in_file=1)
