"""What a module remembers from one forward to the next: buffers, tensors and numbers that its attributes hold.

A key/value cache of a reference implementation is such state: written in place, or replaced. It is taken as it is
before a step, put into the module while that step is exported or run, and the module gets its own back afterwards.
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

from glassengine.sites import port_leaves

_PLAIN = (bool, int, float, str, type(None))
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
        attributes: All others: tensors, plain values, and lists, tuples and dicts of such.
    """

    buffers: Mapping[Place, torch.Tensor | None]
    attributes: Mapping[Place, Any]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """Return the state of a module."""
        buffers: dict[Place, torch.Tensor | None] = {}
        attributes: dict[Place, Any] = {}
        for path, part in module.named_modules():
            for name, tensor in part._buffers.items():
                buffers[path, name] = None if tensor is None else tensor.detach().clone()
            for name, value in _own(part).items():
                attributes[path, name] = _copied(value)
        return cls(buffers, attributes)

    def differs_from(self, other: ModuleState) -> bool:
        """Whether a forward between the two changed something that the next one may read."""
        pairs = ((self.buffers, other.buffers), (self.attributes, other.attributes))
        return any(_differ(dict(one), dict(later)) for one, later in pairs)


@contextlib.contextmanager
def holding(module: nn.Module, state: ModuleState | None, *, as_buffers: bool = False) -> Iterator[None]:
    """Let a module remember `state`, a copy of it, and give it back what it had; None is what it has.

    Args:
        module: The module.
        state: Of `ModuleState.of`.
        as_buffers: Register tensors that are plain attributes as buffers meanwhile: an exporter takes others for
            constants, which nothing may change.
    """
    state = ModuleState.of(module) if state is None else state
    parts = dict(module.named_modules())
    before = {
        path: (dict(part._buffers), set(part._non_persistent_buffers_set), _own(part)) for path, part in parts.items()
    }
    for path, part in parts.items():
        for name in list(part._buffers):
            if (path, name) not in state.buffers:
                del part._buffers[name]
        for name in _own(part):
            if (path, name) not in state.attributes:
                del part.__dict__[name]
    for (path, name), tensor in state.buffers.items():
        parts[path]._buffers[name] = None if tensor is None else tensor.clone()
    for (path, name), value in state.attributes.items():
        if as_buffers and isinstance(value, torch.Tensor):
            parts[path].__dict__.pop(name, None)
            parts[path].register_buffer(name, value.clone(), persistent=False)
        else:
            parts[path].__dict__[name] = _copied(value)
    try:
        yield
    finally:
        for path, (buffers, others, own) in before.items():
            part = parts[path]
            part._buffers.clear()
            part._buffers.update(buffers)
            part._non_persistent_buffers_set = others
            for name in _own(part):
                del part.__dict__[name]
            part.__dict__.update(own)


def own_copies(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that a forward may write to: each call of a user's code gets its own."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone()
        if isinstance(leaf, (*_PLAIN, torch.dtype, torch.device)):
            return leaf
        try:
            return copy.deepcopy(leaf)
        except Exception:  # an object of the user's that cannot be copied is given as it is
            return leaf

    copies: dict[str, Any] = pytree.tree_map(copied, dict(arguments))
    return copies


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
    return returned, {n.lstrip("."): after[n] for n in before if n in after and _differ(before[n], after[n])}


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


def _own(part: nn.Module) -> dict[str, Any]:
    """Return the attributes of one module that may be state."""
    return {name: value for name, value in vars(part).items() if name not in _OF_TORCH and _is_state(value)}


def _is_state(value: Any) -> bool:
    if isinstance(value, nn.Parameter):
        return False
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        return True
    if type(value) in (list, tuple):
        return all(map(_is_state, value))
    return type(value) is dict and all(map(_is_state, value.values()))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        is_same = one.shape == other.shape and one.dtype is other.dtype
        return not (is_same and bool(((one == other) | ((one != one) & (other != other))).all()))
    if type(one) is not type(other):
        return True
    if isinstance(one, dict):
        return one.keys() != other.keys() or any(_differ(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) != len(other) or any(map(_differ, one, other))
    return bool(one != other)
