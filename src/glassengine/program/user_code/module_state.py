"""What a module remembers from one forward to the next: buffers, tensors and numbers that its attributes hold.

A key/value cache of a reference implementation is such state: written in place, or replaced, in attributes or in
objects that these hold. It is taken as it is before a step, put into the module while that step is exported or run,
and the module gets its own back afterwards.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from glassengine.program.user_code.object_state import PLAIN, copies, differ, is_state, name_of, put, tensors_of
from glassengine.sites import port_leaves

_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has: hooks, the tables of parameters and submodules, its mode."""

STATE = "state."
"""What the names of results begin with that are buffers after a forward; their paths follow.

Only the next forward reads them, and two implementations may lay out their state differently, so that they are not
compared as results.
"""

Place = tuple[str, str]
"""Path of a submodule, and name of its attribute."""


@dataclass(frozen=True)
class ModuleState:
    """What the attributes of a module hold, parameters and submodules left out; tensors are copies.

    Attributes:
        buffers: The registered ones.
        attributes: All others: tensors, plain values, containers, and objects that hold such.
    """

    buffers: Mapping[Place, torch.Tensor | None]
    attributes: Mapping[Place, Any]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """Return the state of a module."""
        parts = list(module.named_modules())
        buffers = {(path, name): tensor for path, part in parts for name, tensor in part._buffers.items()}
        attributes = {(path, name): value for path, part in parts for name, value in _own(part).items()}
        return cls(buffers, attributes).copy(module)

    def copy(self, module: nn.Module) -> ModuleState:
        """Return a state with copies of what this one holds, but for the parts of the module."""
        return ModuleState(*copies((self.buffers, self.attributes), module.modules()))

    def differs_from(self, other: ModuleState) -> bool:
        """Whether a forward between the two changed something that the next one may read."""
        return differ((self.buffers, self.attributes), (other.buffers, other.attributes))


@contextlib.contextmanager
def holding(module: nn.Module, state: ModuleState | None, *, as_buffers: bool = False) -> Iterator[None]:
    """Let a module remember `state`, a copy of it, and give it back what it had; None is what it has.

    Args:
        module: The module.
        state: Of `ModuleState.of`.
        as_buffers: Register tensors that are no buffers as such meanwhile: an exporter takes others for constants,
            which nothing may change.
    """
    state = ModuleState.of(module) if state is None else state.copy(module)
    parts = dict(module.named_modules())
    before = {
        path: (dict(part._buffers.items()), set(part._non_persistent_buffers_set), _own(part))
        for path, part in parts.items()
    }
    for path, part in parts.items():
        for name in [name for name, _ in part._buffers.items() if (path, name) not in state.buffers]:
            del part._buffers[name]
        for name in _own(part):
            if (path, name) not in state.attributes:
                del part.__dict__[name]
    for (path, name), tensor in state.buffers.items():
        _set_buffer(parts[path], name, tensor)
    for (path, name), value in state.attributes.items():
        parts[path].__dict__[name] = value
    filled = _as_buffers(module, state) if as_buffers else None
    try:
        yield
    finally:
        if filled is not None:
            filled.remove()
        for path, (buffers, others, own) in before.items():
            part = parts[path]
            for name in [name for name, _ in part._buffers.items() if name not in buffers]:
                del part._buffers[name]
            for name, tensor in buffers.items():
                _set_buffer(part, name, tensor)
            part._non_persistent_buffers_set = others
            for name in _own(part):
                del part.__dict__[name]
            part.__dict__.update(own)


def own_copies(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that a forward may write to: each call of a user's code gets its own."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, (*PLAIN, torch.dtype, torch.device)):
            return leaf
        try:
            return copy.deepcopy(leaf)
        except Exception:  # an object of the user's that cannot be copied is given as it is
            return leaf

    found: dict[str, Any] = pytree.tree_map(copied, dict(arguments))
    return found


def run_with(
    module: nn.Module, state: ModuleState | None, arguments: Mapping[str, Any]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return what a forward returns, and the tensors among its arguments that it has written to, as it leaves them.

    Args:
        module: Runs as it is.
        state: What the module remembers before it; None leaves it to itself.
        arguments: By name; the forward gets copies of them.
    """
    given = own_copies(arguments)
    with contextlib.nullcontext() if state is None else holding(module, state):
        returned = module(**given)
    before, after = (dict(port_leaves("", dict(one))) for one in (arguments, given))
    return returned, {n.lstrip("."): after[n] for n in before if n in after and differ(before[n], after[n])}


def run_alone(module: nn.Module, arguments: Mapping[str, Any], *, are_copies: bool = False) -> Any:
    """Return what a forward returns, without gradients; the module remembers nothing of it, and writes to copies."""
    with torch.no_grad(), holding(module, None):
        return module(**(arguments if are_copies else own_copies(arguments)))


def states_before(module: nn.Module, steps: Sequence[Mapping[str, Any]]) -> list[ModuleState]:
    """Return what a module remembers before each of several steps that follow each other; itself it is left as it is.

    Raises:
        Exception: Any error of its forward.
    """
    states = [ModuleState.of(module)]
    with holding(module, states[0]), torch.no_grad():
        for step in steps[:-1]:
            module(**own_copies(step))
            states.append(ModuleState.of(module))
    return states


def remembers(module: nn.Module, step: Mapping[str, Any]) -> bool:
    """Whether a forward changes what a module holds.

    Raises:
        Exception: Any error of its forward.
    """
    before = ModuleState.of(module)
    with holding(module, before), torch.no_grad():
        module(**own_copies(step))
        return before.differs_from(ModuleState.of(module))


def _as_buffers(module: nn.Module, state: ModuleState) -> RemovableHandle:
    """Register the tensors of a state that its module has now, and let each forward find them where they were.

    A forward leaves what it traced in the objects of a state; so the next one gets new objects.
    """
    parts = dict(module.named_modules())
    known = {id(tensor): place for place, tensor in state.buffers.items()}
    ways = []
    for keys, tensor in list(tensors_of(state.attributes, parts.values())):
        (_, (path, attribute)), *others = keys
        if id(tensor) not in known:
            name = name_of([(True, attribute), *others])
            if not others:
                del parts[path].__dict__[attribute]
            while hasattr(parts[path], name):
                name += "_"
            parts[path].register_buffer(name, tensor, persistent=False)
            known[id(tensor)] = (path, name)
        if others or known[id(tensor)] != (path, attribute):
            ways.append((keys, known[id(tensor)]))
    mixed = {place: value for place, value in state.attributes.items() if place[1] in vars(parts[place[0]])}

    def fill(*_: Any) -> None:
        found = copies(mixed, parts.values(), lambda tensor: tensor)
        for keys, (path, name) in ways:
            put(found, keys, parts[path]._buffers[name])
        for (path, name), value in found.items():
            parts[path].__dict__[name] = value

    return module.register_forward_pre_hook(fill)


def _set_buffer(part: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    if isinstance(part, torch.jit.ScriptModule):
        setattr(part, name, tensor)  # its table of buffers is a copy
    else:
        part._buffers[name] = tensor


def _own(part: nn.Module) -> dict[str, Any]:
    """Return the attributes of one module that may be state."""
    if isinstance(part, torch.jit.ScriptModule):
        return {}
    return {name: value for name, value in vars(part).items() if name not in _OF_TORCH and is_state(value)}
