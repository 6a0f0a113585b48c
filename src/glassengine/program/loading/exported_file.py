"""A `.pt2` file of `torch.export.save` as a program: its graph is the program's, made functional and named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, SymBoolArgument, SymFloatArgument, SymIntArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.errors import CorruptError, UsageError, first_line
from glassengine.program.export.export import named_program
from glassengine.program.representation.archive import inert_archive, load_archive
from glassengine.program.representation.naming import Paths, is_tensor_node, op_name
from glassengine.program.representation.program import FIXED_INPUTS, Program
from glassengine.program.representation.signature import named_inputs, quiet, user_inputs
from glassengine.taps import deliver, is_heard


@dataclass(frozen=True)
class _Arguments:
    """How keyword arguments become those of the stored forward."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...]

    @classmethod
    def of(cls, exported: ExportedProgram) -> _Arguments:
        signature = exported.module_call_graph[0].signature
        assert signature is not None
        args, kwargs = signature.in_spec.children()
        names = list(signature.forward_arg_names or [])
        if len(names) < args.num_children:
            names = [f"arg_{index}" for index in range(args.num_children)]
        return cls(tuple(names[: args.num_children]), tuple(kwargs.context or ()))

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.positional, args, strict=True)), **kwargs}

    def split(self, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        missing = [name for name in (*self.positional, *self.keywords) if name not in given]
        if missing:
            raise UsageError("inputs are missing", got=", ".join(given), expected=", ".join(missing))
        return tuple(given[name] for name in self.positional), {name: given[name] for name in self.keywords}


class StoredModule(nn.Module):
    """A stored program as a module: the graph as it was stored, its op sites observable as taps.

    Args:
        exported: The program as it was stored.
        program: The same, functional and named.
    """

    def __init__(self, exported: ExportedProgram, program: Program) -> None:
        super().__init__()
        # No submodule: its own names and hooks are not the user's, and it has no modes.
        self._stored = (exported.module(),)
        self.given = _given(exported)
        self._arguments = _Arguments.of(exported)
        self._fixed: dict[str, Any] = dict(program.metadata[FIXED_INPUTS])
        self._sites = _sites_of_stored(exported, program)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weights under the names that they have in the program."""
        return self._stored[0].state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under the names that they have in the program."""
        return self._stored[0].named_parameters(*args, **kwargs)

    def values(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Run the stored graph node by node and return its tensors by op site."""
        tensors: dict[str, torch.Tensor] = {}
        self._run(inputs, tensors)
        return tensors

    def forward(self, **inputs: Any) -> Any:
        """Run the stored graph."""
        if not is_heard():
            args, kwargs = self._arguments.split({**self._fixed, **inputs})
            return self._stored[0](*args, **kwargs)
        tensors: dict[str, torch.Tensor] = {}
        result = self._run(inputs, tensors)
        for site, tensor in tensors.items():
            deliver(site, tensor)
        return result

    def _run(self, inputs: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
        args, kwargs = self._arguments.split({**self._fixed, **inputs})
        return _Observing(self._stored[0], self._sites, tensors).run(*args, *kwargs.values())


class _Observing(torch.fx.Interpreter):
    def __init__(self, module: Any, sites: Mapping[str, str], tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(module)
        self._sites = sites
        self._found = tensors

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.name in self._sites and isinstance(value, torch.Tensor):
            self._found[self._sites[n.name]] = value.clone()  # what follows may write into it
        return value


def read_exported(path: Path) -> tuple[StoredModule, Program]:
    """Read a `.pt2` file; nothing in it is executed.

    Args:
        path: The file.

    Raises:
        UsageError: It takes something else than tensors and constants, or calls ops that are not registered here.
        CorruptError: It is damaged, or holds more than a program.
    """
    archive = inert_archive(path, has_weights=True)
    try:
        with quiet():
            exported = load_archive(archive)
    except Exception as error:
        raise CorruptError(
            f"{path.name} cannot be read",
            got=f"{type(error).__name__}: {first_line(error)}",
            expected="a program of this version of torch, whose ops are registered in this process",
        ) from error
    arguments = _Arguments.of(exported)
    given = _given(exported)
    with torch.no_grad(), quiet():
        functional = exported.run_decompositions({})
    plain = (bool, int, float, str, type(None))
    fixed = {name: value for name, value in (given or {}).items() if isinstance(value, plain)}
    inputs = list(_input_names(functional, arguments))
    modules = _modules(functional.graph)
    program = named_program(functional, modules, input_names=inputs, metadata={FIXED_INPUTS: fixed})
    return StoredModule(exported, program), program


def _given(exported: ExportedProgram) -> dict[str, Any] | None:
    """Return the inputs that a program was exported with, as keyword arguments; None where they are not in the file."""
    if exported.example_inputs is None:
        return None
    return _Arguments.of(exported).named(*exported.example_inputs)


def _input_names(exported: ExportedProgram, arguments: _Arguments) -> Iterator[str]:
    """Yield what the engine calls each tensor that is given at run time: "x", "pair[0]", "options.scale"."""
    signature = exported.module_call_graph[0].signature
    assert signature is not None
    places = [torch.tensor(place) for place in range(signature.in_spec.num_leaves)]
    tree = arguments.named(*pytree.tree_unflatten(places, signature.in_spec))
    names = {int(place): name for name, place in named_inputs(tree).items()}
    specs = [spec for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    tensors = set(user_inputs(exported))
    for place, spec in enumerate(specs):
        if isinstance(spec.arg, (SymIntArgument, SymFloatArgument, SymBoolArgument)):
            raise UsageError("the program takes a number that may change", got=names[place], expected="tensors")
        if spec.arg.name in tensors:
            yield names[place]


def _modules(graph: torch.fx.Graph) -> nn.Module:
    """Return modules without content under every path of a graph's module stacks."""
    root = nn.Module()
    for node in graph.nodes:
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            module = root
            for part in path.split(".") if path and "(" not in path else ():
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
    return root


def _sites_of_stored(exported: ExportedProgram, program: Program) -> dict[str, str]:
    """Return node of the stored graph -> site in the functional one, which may call its nodes otherwise.

    The ops of a module call are those of the functional graph where there are as many of a name: one that was
    decomposed has another name.
    """

    def by_place(graph: torch.fx.Graph) -> dict[tuple[Any, ...], list[Node]]:
        paths = Paths(_modules(graph), "", graph)
        table: dict[tuple[Any, ...], list[Node]] = {}
        for node in graph.nodes:
            if is_tensor_node(node):
                table.setdefault((*paths.of(node.meta.get("nn_module_stack")), op_name(node)), []).append(node)
        return table

    sites = {site.node: site.name for site in program.sites if site.kind == "op"}
    functional = by_place(program.graph)
    site_of: dict[str, str] = {}
    for place, nodes in by_place(exported.graph).items():
        others = functional.get(place, [])
        if len(others) == len(nodes):
            site_of |= {node.name: sites[other.name] for node, other in zip(nodes, others, strict=True)}
    return site_of
