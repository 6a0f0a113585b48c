"""Inputs for modules and for stored programs.

The layers of a plain module say what there is to try: token ids below the smallest table for one that has tables,
images of as many channels as a convolution reads, rows as wide as a product takes. A stored program states its sizes,
and may keep inputs in its file. What the forward then does with each argument says which values it gets.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Interpreter, Node
from torch.utils import _pytree as pytree

from glassengine.errors import UsageError
from glassengine.program.inputs.observe import OpWatch, Use
from glassengine.program.inputs.search import Target, Values, made_up, no_inputs
from glassengine.program.inputs.values import WantedInput, plainest
from glassengine.program.kinds.example_inputs import MadeUp
from glassengine.program.loading.stored import StoredModule
from glassengine.program.representation.program import Port, Program
from glassengine.program.representation.signature import named_inputs
from glassengine.program.user_code.forward import forward_parameters
from glassengine.program.user_code.module_state import run_alone

_MOST_TRIED = 240
_MOST_ARGUMENTS = 4
_SIZES = {"batch": 2, "length": 7}

Kind = tuple[str, tuple[int | str, ...]]
"""dtype, and sizes: numbers, or names of sizes that may change."""
_IDS: Kind = ("int64", ("batch", "length"))


def module_inputs(module: nn.Module, name: str) -> MadeUp:
    """Return steps of keyword arguments for the forward of a module.

    Raises:
        UsageError: It takes none of what was tried.
    """
    wanted = _wanted(module)
    if wanted is None or not 0 < len(wanted) <= _MOST_ARGUMENTS or any(p.is_meta for p in module.parameters()):
        raise no_inputs(name, _unknown(module), None)
    failure: Exception | None = None
    for kinds in itertools.islice(_combinations(module, wanted), _MOST_TRIED):
        ports = tuple(Port(key, key, dtype, shape) for key, (dtype, shape) in zip(wanted, kinds, strict=True))
        try:
            _call(module, _values(ports))
        except Exception as error:  # the model's own code may raise anything
            failure = failure or error
            continue
        run = functools.partial(_call, module)
        return made_up(Target(name, ports, run, known=_SIZES, plain=_values(ports)))
    raise no_inputs(name, _unknown(module), failure)


def _wanted(module: nn.Module) -> list[str] | None:
    """Return the arguments that a forward insists on; None where they have no names."""
    found = []
    for parameter in forward_parameters(module).values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return None
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            found.append(parameter.name)
    return found


def _unknown(module: nn.Module) -> tuple[Port, ...]:
    return tuple(Port(name, name, "float32", ("?",)) for name in _wanted(module) or ())


def _combinations(module: nn.Module, wanted: list[str]) -> Iterator[tuple[Kind, ...]]:
    """Yield what the arguments may be: first all combinations of the likeliest kinds."""
    kinds = _kinds(module)
    places = itertools.product(range(len(kinds)), repeat=len(wanted))
    for chosen in sorted(places, key=lambda one: (max(one), sum(one), one)):
        yield tuple(kinds[place] for place in chosen)


def _kinds(module: nn.Module) -> list[Kind]:
    """Return what an argument of a module may be, by the layers that it has, in order."""
    parameters = [p for p in module.parameters() if p.is_floating_point()]
    dtype = str(parameters[0].dtype).removeprefix("torch.") if parameters else "float32"
    found = [kind for part in module.modules() for kind in _kinds_of(part, dtype)]
    masks: list[Kind] = [("bool", ("batch", "length")), ("int64", ("batch",)), (dtype, ("batch",))]
    widths = dict.fromkeys(p.shape[-1] for p in parameters if p.dim() > 1)
    rows: list[Kind] = [(dtype, ("batch", "length", width)) for width in list(widths)[:3]]
    rows += [(dtype, ("batch", width)) for width in list(widths)[:3]]
    return list(dict.fromkeys([*found[:8], _IDS, *rows, *masks, (dtype, ("batch", "length"))]))


def _kinds_of(part: nn.Module, dtype: str) -> list[Kind]:
    """Return what the input of one layer may be."""
    if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
        return [_IDS]
    if isinstance(part, nn.Conv2d):
        return [(dtype, ("batch", part.in_channels, size, size)) for size in (64, 32, 96, 224, 28)]
    if isinstance(part, nn.Conv1d):
        return [(dtype, ("batch", part.in_channels, size)) for size in (64, 1600, 16000)]
    if isinstance(part, nn.Conv3d):
        return [(dtype, ("batch", part.in_channels, 8, 32, 32))]
    if isinstance(part, nn.RNNBase):
        return [(dtype, ("batch", "length", part.input_size))]
    if isinstance(part, nn.Linear):
        return [(dtype, ("batch", "length", part.in_features)), (dtype, ("batch", part.in_features))]
    if isinstance(part, nn.LayerNorm):
        return [(dtype, ("batch", "length", *part.normalized_shape))]
    return []


def _values(ports: tuple[Port, ...]) -> Values:
    """Return plain values of the likeliest sizes."""
    generator = torch.Generator().manual_seed(0)
    values = {}
    for port in ports:
        shape = tuple(_SIZES[size] if isinstance(size, str) else size for size in port.shape)
        values[port.name] = plainest(WantedInput(getattr(torch, port.dtype), shape), 1, generator).value
    return values


def _call(module: nn.Module, values: Values) -> Any:
    """Run a module, which remembers nothing of it, on values that it may change.

    Raises:
        UsageError: It returns nothing that can be judged.
    """
    result = run_alone(module, values, are_copies=True)
    if result is None:
        raise UsageError("the forward returns nothing")
    return result


def stored_inputs(module: nn.Module, program: Program) -> MadeUp:
    """Return inputs for a stored program: those in its file first, then made-up ones that it takes.

    Args:
        module: Of `read_stored`; runs the file as it is.
        program: Likewise.

    Raises:
        UsageError: None are in the file, and the model takes none of those that were tried.
    """
    if isinstance(module, StoredModule):
        return _of_exported(module, program)

    def uses(values: Values) -> dict[str, Use]:
        """Interpret the graph which an ONNX file is judged with."""
        watch = OpWatch(values)
        try:
            with watch:
                program.interpreted(_Watched(program, watch), values)
        except Exception:  # what was seen until then is of use, too
            if all(use == Use() for use in watch.uses.values()):
                raise
        return watch.uses

    return made_up(Target(str(program.metadata["model"]), program.inputs, lambda values: module(**values), uses))


def inputs_in_file(module: nn.Module) -> list[dict[str, Any]] | None:
    """Return the inputs that the file of a stored program keeps; None where it keeps none."""
    given = module.given if isinstance(module, StoredModule) else None
    return None if given is None else MadeUp([dict(given)], num_in_file=1)


class _Watched(Interpreter):
    """Says of nodes that are no ops of torch what their results depend on."""

    def __init__(self, program: Program, watch: OpWatch) -> None:
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
    name, run = str(program.metadata["model"]), lambda values: module(**nested(values))
    try:
        made = made_up(Target(name, program.inputs, run, limits=limits, known=known, plain=plain))
    except UsageError:
        if given is None:
            raise
        made = MadeUp()
    steps = [nested(step) for step in made]
    in_file = [] if given is None else [tree]
    return MadeUp([*in_file, *steps], recipes=made.recipes, num_in_file=len(in_file))
