"""The tensors in what goes into a module and comes out of it, and in a key/value cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from glassengine.sites import port_leaves

NO_TENSOR = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types of what is passed to modules most often and holds no tensor."""

_MAX_DEPTH = 32

KV_AXES = {"batch": 0, "cache": 2}
"""Dimensions of a key or value cache, [batch, head, position, channel]."""


def tensors_in(port: str, tree: Any, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield what `sites.port_leaves` yields, many times faster where the containers are the usual ones.

    Mappings that torch does not know as containers are looked into as well, and of other objects the attributes that
    are tensors, as `.name`.
    """
    kind = type(tree)
    if kind in NO_TENSOR or depth > _MAX_DEPTH:
        return
    if isinstance(tree, Tensor):
        yield port, tree
    elif kind is tuple or kind is list:
        for index, item in enumerate(tree):
            if type(item) is Tensor:
                yield f"{port}[{index}]", item
            elif type(item) not in NO_TENSOR:
                yield from tensors_in(f"{port}[{index}]", item, depth + 1)
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            if type(item) not in NO_TENSOR:
                yield from tensors_in(f"{port}.{key}", item, depth + 1)
    else:
        is_container = False
        for item in port_leaves(port, tree):
            is_container = True
            yield item
        if not is_container:
            yield from _attributes(port, tree)


def _attributes(port: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that an object of a class of its own carries; a cache is dealt with once a step."""
    if isinstance(value, (nn.Module, type, ModuleType)) or type(value).__name__.endswith("Cache"):
        return
    for name, item in list(getattr(value, "__dict__", {}).items()):
        if isinstance(item, Tensor):
            yield f"{port}.{name}", item


class CacheSites:
    """Where the layers of a key/value cache belong in a model.

    Args:
        root: The model.
        paths: Module -> path, without wrapper names.
    """

    def __init__(self, root: nn.Module, paths: Mapping[nn.Module, str]) -> None:
        self._paths: dict[int, list[str]] = {}
        two_stacks = bool(getattr(getattr(root, "config", None), "is_encoder_decoder", False))
        for module, path in paths.items():
            if two_stacks and "encoder" in path.split("."):
                continue  # an encoder has no cache, and numbers its layers all the same
            index = getattr(module, "layer_idx", None)
            if isinstance(index, int):
                self._paths.setdefault(index, []).append(path)

    def tensors(self, *containers: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield (site, tensor) of every cache that is a value of one of `containers` (mappings or objects).

        The tensors are live. A cache with layers of another kind than keys and values (states of a convolution, of a
        recurrence) gives these by their own names.
        """
        seen: set[int] = set()
        for container in containers:
            values = container.values() if isinstance(container, Mapping) else [container]
            for cache in values:
                if id(cache) not in seen and _is_cache(cache):
                    seen.add(id(cache))
                    yield from self._of(cache)

    def _of(self, cache: Any) -> Iterator[tuple[str, Tensor]]:
        crossed = getattr(cache, "cross_attention_cache", None)
        if crossed is not None:
            yield from self._layers(cache.self_attention_cache, "", 0)
            yield from self._layers(crossed, "cross_", 1)
        else:
            yield from self._layers(cache, "", 0)

    def _layers(self, cache: Any, prefix: str, which: int) -> Iterator[tuple[str, Tensor]]:
        for index, layer in enumerate(cache.layers):
            # The innermost module of a layer that knows its number is the attention itself.
            paths = self._paths.get(index, [])
            inner = [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]
            path = inner[min(which, len(inner) - 1)] if inner else f"past_key_values.{index}"
            for name, value in vars(layer).items():
                key = {"keys": "key", "values": "value"}.get(name, name)
                # A recurrent layer keeps its states in dicts, by number.
                for port, tensor in tensors_in(f":kv.{prefix}{key}", value):
                    if tensor.dim() >= 2:
                        yield path + port, tensor


def _is_cache(value: Any) -> bool:
    layers = getattr(value, "layers", None)
    if isinstance(value, nn.Module):
        return False
    if getattr(value, "self_attention_cache", None) is not None:
        return _is_cache(value.self_attention_cache)
    return isinstance(layers, list) and bool(layers) and type(layers[0]).__name__.endswith("Layer")
