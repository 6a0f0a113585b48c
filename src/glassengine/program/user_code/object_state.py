"""What objects hold, taken apart: containers by their items, others by their `__dict__` and their slots.

Caches of reference implementations are objects, of a class of the model or of a library, that a module or a list of
its own holds. Nothing of their code runs: what they hold is found, copied and replaced beside their methods.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from glassengine.blocks import agree

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
