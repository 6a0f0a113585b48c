"""State of a module between forwards: buffers, tensors and numbers that its attributes hold.

A key/value cache of a reference implementation is such state: written in place, or replaced, in attributes or in
objects that these hold. It is taken as it is before a step, put into the module while that step is exported or run,
and the module gets its own back afterwards.

Objects are taken apart: containers by their items, others by their `__dict__` and their slots. Nothing of their code
runs: what they hold is found, copied and replaced beside their methods.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from glassengine.blocks import agree
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
        attributes = {(path, name): value for path, part in parts for name, value in _state_attributes(part).items()}
        return cls(buffers, attributes).copy(module)

    def copy(self, module: nn.Module) -> ModuleState:
        """Return a state with copies of what this one holds, but for the parts of the module."""
        return ModuleState(*copies((self.buffers, self.attributes), module.modules()))

    def differs_from(self, other: ModuleState) -> bool:
        """Whether a forward between the two changed something that the next one may read."""
        return differ((self.buffers, self.attributes), (other.buffers, other.attributes))


@contextlib.contextmanager
def applied_state(module: nn.Module, state: ModuleState | None, *, as_buffers: bool = False) -> Iterator[None]:
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
        path: (dict(part._buffers.items()), set(part._non_persistent_buffers_set), _state_attributes(part))
        for path, part in parts.items()
    }
    for path, part in parts.items():
        for name in [name for name, _ in part._buffers.items() if (path, name) not in state.buffers]:
            del part._buffers[name]
        for name in _state_attributes(part):
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
            for name in _state_attributes(part):
                del part.__dict__[name]
            part.__dict__.update(own)


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


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
    with contextlib.nullcontext() if state is None else applied_state(module, state):
        returned = module(**given)
    before, after = (dict(port_leaves("", dict(one))) for one in (arguments, given))
    return returned, {n.lstrip("."): after[n] for n in before if n in after and differ(before[n], after[n])}


def run_alone(module: nn.Module, arguments: Mapping[str, Any], *, are_copies: bool = False) -> Any:
    """Return what a forward returns, without gradients; the module remembers nothing of it, and writes to copies."""
    with torch.no_grad(), applied_state(module, None):
        return module(**(arguments if are_copies else own_copies(arguments)))


def states_before(module: nn.Module, steps: Sequence[Mapping[str, Any]]) -> list[ModuleState]:
    """Return what a module remembers before each of several steps that follow each other; itself it is left as it is.

    Raises:
        Exception: Any error of its forward.
    """
    states = [ModuleState.of(module)]
    with applied_state(module, states[0]), torch.no_grad():
        for step in steps[:-1]:
            module(**own_copies(step))
            states.append(ModuleState.of(module))
    return states


def changes_state(module: nn.Module, step: Mapping[str, Any]) -> bool:
    """Whether a forward changes what a module holds.

    Raises:
        Exception: Any error of its forward.
    """
    before = ModuleState.of(module)
    with applied_state(module, before), torch.no_grad():
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


def _state_attributes(part: nn.Module) -> dict[str, Any]:
    """Return the attributes of one module that may be state."""
    if isinstance(part, torch.jit.ScriptModule):
        return {}
    return {name: value for name, value in vars(part).items() if name not in _OF_TORCH and is_state(value)}


Key = tuple[bool, Any]
"""Whether it is an attribute, and its name; or the key of an item."""
Keys = tuple[Key, ...]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, tuple, deque)
_CODE = (type, FunctionType, BuiltinFunctionType, ModuleType)
_DEEPEST, _MOST = 40, 200_000
"""Objects that are further away from the module, or more than these, stay as they are."""


def is_state(value: Any) -> bool:
    """Whether a forward may leave something in it: code, parameters and what belongs to torch are none."""
    if isinstance(value, (nn.Parameter, *_CODE)):
        return False
    return isinstance(value, (torch.Tensor, np.ndarray, *PLAIN)) or _is_opened(value)


def copies(value: Any, kept: Iterable[nn.Module], tensor: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """Return a value with copies of all that it holds; what it holds twice, the copy holds twice.

    Args:
        value: Any object.
        kept: Modules that stay themselves.
        tensor: Makes the copy of a tensor; None clones it, where it is no view of another that the value holds.
    """
    memo: dict[int, Any] = {id(module): module for module in kept}
    bases = {id(found) for _, found in tensors_of(value, kept)} if tensor is None else set()

    def copied(item: Any, depth: int) -> Any:
        if id(item) in memo:
            return memo[id(item)]
        if isinstance(item, torch.Tensor):
            memo[id(item)] = item if isinstance(item, nn.Parameter) else (tensor or cloned)(item)
            return memo[id(item)]
        if isinstance(item, np.ndarray):
            return memo.setdefault(id(item), item.copy())
        if depth == _DEEPEST or len(memo) > _MOST or not _is_opened(item):
            return item
        if isinstance(item, MethodType):
            owner = copied(item.__self__, depth + 1)
            return item if owner is item.__self__ else MethodType(item.__func__, owner)
        if isinstance(item, tuple):
            items = [copied(each, depth + 1) for each in tuple.__iter__(item)]
            return memo.setdefault(id(item), _tuple(type(item), items))
        new = memo[id(item)] = _shallow(item)
        if new is not item:
            for key, each in _held(item):
                _set(new, key, copied(each, depth + 1))
        return new

    def cloned(item: torch.Tensor) -> torch.Tensor:
        base = item._base
        if base is None or id(base) not in bases:
            return item.detach().clone()
        offset = item.storage_offset() - base.storage_offset()
        shared: torch.Tensor = copied(base, 0).as_strided(item.size(), item.stride(), offset)
        return shared

    return copied(value, 0)


def tensors_of(value: Any, kept: Iterable[nn.Module]) -> Iterator[tuple[Keys, torch.Tensor]]:
    """Yield the tensors that a value holds, each with the way to it; one that it holds twice, twice."""
    seen = {id(module) for module in kept}
    left: deque[tuple[Keys, Any]] = deque([((), value)])
    while left:
        keys, item = left.popleft()
        if isinstance(item, torch.Tensor) and not isinstance(item, nn.Parameter):
            yield keys, item
        elif id(item) not in seen and len(keys) < _DEEPEST and len(seen) <= _MOST and _is_opened(item):
            seen.add(id(item))
            left.extend(((*keys, key), each) for key, each in _held(item))


def put(holder: Any, keys: Keys, value: Any) -> Any:
    """Return `holder` with a value at the end of a way; itself, but where that ends in a tuple."""
    if not keys:
        return value
    (key, *others), before = keys, _get(holder, keys[0])
    after = put(before, tuple(others), value)
    if after is before:
        return holder
    if isinstance(holder, tuple) and not key[0]:
        return _tuple(type(holder), [*holder[: key[1]], after, *holder[key[1] + 1 :]])
    _set(holder, key, after)
    return holder


def name_of(keys: Iterable[Key]) -> str:
    """Return the name of a tensor by the way to it: "cache_layers_0_keys"."""
    joined = "_".join(str(key) for _, key in keys if key != "_buffers")
    return "".join(letter if letter.isalnum() else "_" for letter in joined)


def differ(one: Any, other: Any) -> bool:
    """Whether two objects hold different values: one, and a copy of it, of which a forward used either."""
    seen: set[tuple[int, int]] = set()

    def different(one: Any, other: Any) -> bool:
        if one is other or (id(one), id(other)) in seen:
            return False
        if type(one) is not type(other):
            return True
        if isinstance(one, torch.Tensor):
            return one.shape != other.shape or one.dtype is not other.dtype or not bool(agree(one, other).all())
        if isinstance(one, np.ndarray):
            return bool(one.shape != other.shape or one.dtype != other.dtype or one.tobytes() != other.tobytes())
        if isinstance(one, (*PLAIN, set)) or not _is_opened(one):
            return bool(one != other)
        seen.add((id(one), id(other)))
        left, right = dict(_held(one)), dict(_held(other))
        return left.keys() != right.keys() or any(different(left[key], right[key]) for key in left)

    return different(one, other)


def _tuple(kind: type, items: list[Any]) -> Any:
    """Return a tuple of a class, without code of that; sizes and results of torch's ops are made by their own."""
    try:
        return tuple.__new__(kind, items)
    except TypeError:  # of a class that is written in C
        return kind(items)


def _is_opened(value: Any) -> bool:
    if isinstance(value, (nn.Module, MethodType, set, *_CONTAINERS)):
        return True
    kind = type(value)
    if isinstance(value, (*PLAIN, *_CODE)) or kind.__module__.partition(".")[0] == "torch":
        return False  # code, graphs, streams, groups of processes
    return type(getattr(value, "__dict__", None)) is dict or bool(_slots(kind))


def _slots(kind: type) -> list[str]:
    """Return the names of slots, as the interpreter knows them."""
    owners = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [name for owner in owners for name, value in owner.items() if isinstance(value, MemberDescriptorType)]


def _held(value: Any) -> Iterator[tuple[Key, Any]]:
    """Yield what an object that is opened holds: its items, then its attributes."""
    if isinstance(value, MethodType):
        yield (True, "__self__"), value.__self__
        return
    if isinstance(value, dict):
        yield from [((False, key), item) for key, item in dict.items(value)]
    base = next((kind for kind in _CONTAINERS[1:] if isinstance(value, kind)), None)
    if base is not None:
        yield from [((False, place), item) for place, item in enumerate(base.__iter__(value))]
    own = getattr(value, "__dict__", None)
    if type(own) is dict:
        yield from [((True, name), item) for name, item in own.items()]
    for name in _slots(type(value)):
        with contextlib.suppress(AttributeError):
            yield (True, name), object.__getattribute__(value, name)


def _shallow(item: Any) -> Any:
    if isinstance(item, nn.Module):
        new = object.__new__(type(item))
        vars(new).update(vars(item))
        return new
    with contextlib.suppress(Exception):  # what cannot be copied (locks, files), or as another kind alone, is shared
        new = copy.copy(item)
        return new if type(new) is type(item) else item
    return item


def _get(holder: Any, key: Key) -> Any:
    if not key[0]:
        return next(kind for kind in _CONTAINERS if isinstance(holder, kind)).__getitem__(holder, key[1])
    own = getattr(holder, "__dict__", {})
    return own[key[1]] if key[1] in own else object.__getattribute__(holder, key[1])


def _set(holder: Any, key: Key, value: Any) -> None:
    if not key[0]:
        base: Any = next(kind for kind in _CONTAINERS if isinstance(holder, kind))
        base.__setitem__(holder, key[1], value)
    elif key[1] in getattr(holder, "__dict__", {}):
        vars(holder)[key[1]] = value
    else:
        object.__setattr__(holder, key[1], value)
