"""The tensors in what goes into a module and comes out of it, in a key/value cache, and in a lazy front end.

A front end that records operations and runs them later gives its tensors the two methods of `LazyTensorLike`. What
looks at tensors of a running model then need not make it run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any, Protocol, TypeGuard

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from glassengine.sites import port_key, unnamed_entries

NO_TENSOR = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types of what is passed to modules most often and holds no tensor."""

_MAX_DEPTH = 32

KV_AXES = {"batch": 0, "cache": 2}
"""Dimensions of a key or value cache, [batch, head, position, channel]."""


def tensors_in(port: str, tree: Any, depth: int = 0, caches: list[Any] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield what `sites.port_leaves` yields, many times faster where the containers are the usual ones.

    Mappings that torch does not know as containers are looked into as well, and of other objects the attributes that
    are tensors, as `.name`. Key/value caches are not: they are dealt with once a step, and added to `caches`.
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
                yield from tensors_in(f"{port}[{index}]", item, depth + 1, caches)
    elif isinstance(tree, Mapping):
        for key, item in tree.items():
            if type(item) not in NO_TENSOR:
                yield from tensors_in(f"{port}.{key}", item, depth + 1, caches)
    else:
        layers = _layers_of(tree)
        if layers is not None and caches is not None:
            caches.append(tree)
        if _are_of_cache(layers):
            return
        entries = _entries(tree)
        if entries is None:
            yield from _attributes(port, tree)
        else:
            for key, item in entries:
                yield from tensors_in(port + key, item, depth + 1, caches)


def _entries(tree: Any) -> list[tuple[str, Any]] | None:
    """Return the entries of another container, by what each adds to a port; None if it is none."""
    unnamed = unnamed_entries(tree)
    if isinstance(unnamed, list):
        return [(f"[{index}]", item) for index, item in enumerate(unnamed)]
    if unnamed is not None:
        return [(f".{key}", item) for key, item in unnamed.items()]
    if not pytree.tree_is_leaf(tree):
        found = pytree.tree_flatten_with_path(tree, is_leaf=lambda item: item is not tree)[0]
        return [("".join(map(port_key, path)), item) for path, item in found]
    return None


def _attributes(port: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that an object of a class of its own carries."""
    if isinstance(value, (nn.Module, type, ModuleType)):
        return
    for name, item in list(getattr(value, "__dict__", {}).items()):
        if isinstance(item, Tensor):
            yield f"{port}.{name}", item


class CacheSites:
    """Where the layers of a key/value cache belong in a model."""

    def __init__(self, root: nn.Module, paths: Mapping[nn.Module, str]) -> None:
        self._paths: dict[int, list[str]] = {}
        two_stacks = bool(getattr(getattr(root, "config", None), "is_encoder_decoder", False))
        for module, path in paths.items():
            if two_stacks and "encoder" in path.split("."):
                continue  # an encoder has no cache, and numbers its layers all the same
            index = getattr(module, "layer_idx", None)
            if isinstance(index, int):
                self._paths.setdefault(index, []).append(path)

    def tensors(self, cache: Any, where: Collection[str], *, whole: bool) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (path, port, tensor) of a cache; nothing of what is none.

        The tensors are live. A cache with layers of another kind than keys and values (states of a convolution, of a
        recurrence) gives these by their own names.

        Args:
            cache: What was passed around.
            where: Paths of the modules that got it: of several layers of a number, those are meant.
            whole: Also give what no layer is known to have got.
        """
        if not _are_of_cache(_layers_of(cache)):
            return
        crossed = getattr(cache, "cross_attention_cache", None)
        own = cache if crossed is None else cache.self_attention_cache
        yield from self._layers(own, where, whole, "", 0)
        if crossed is not None:
            yield from self._layers(crossed, where, whole, "cross_", 1)

    def _layers(
        self, cache: Any, where: Collection[str], whole: bool, prefix: str, which: int
    ) -> Iterator[tuple[str, str, Tensor]]:
        for index, layer in enumerate(cache.layers):
            # The innermost module of a layer that knows its number is the attention itself.
            numbered = self._paths.get(index, [])
            paths = [path for path in numbered if path in where]
            if not paths and not whole:
                continue
            paths = paths or numbered
            inner = [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]
            path = inner[min(which, len(inner) - 1)] if inner else f"past_key_values.{index}"
            for name, value in vars(layer).items():
                key = {"keys": "key", "values": "value"}.get(name, name)
                own = f":kv.{prefix}{key}"
                # A recurrent layer keeps its states in dicts, by number; a quantized one has scales beside its values.
                for port, tensor in tensors_in(own, value):
                    if tensor.dim() >= 2 or port != own:
                        yield path, port, tensor


def _layers_of(value: Any) -> list[Any] | None:
    """Return the layers of what may be a cache: one that is empty has none yet."""
    own = getattr(value, "self_attention_cache", None)
    layers = getattr(value if own is None else own, "layers", None)
    return layers if isinstance(layers, list) and not isinstance(value, nn.Module) else None


def _are_of_cache(layers: list[Any] | None) -> bool:
    return layers is not None and bool(layers) and type(layers[0]).__name__.endswith("Layer")


class Promise(Protocol):
    """The values that a tensor has now, some day."""

    @property
    def data(self) -> Tensor | None:
        """A plain tensor, which is never written to; None while it is not computed."""


class LazyTensorLike(Protocol):
    """A tensor whose values may not be computed yet."""

    def promised(self, site: str, on_run: Callable[[], None]) -> Promise:
        """Return the promise of its values under the name `site`; `on_run` is called when promises were kept."""

    def keep_promises(self, why: str) -> None:
        """Compute all promised values, now."""


def is_computed_later(tensor: Tensor) -> TypeGuard[LazyTensorLike]:
    """Return whether a tensor can promise its values."""
    return type(tensor) is not Tensor and hasattr(type(tensor), "promised")


def values_now(tensor: LazyTensorLike, why: str) -> Tensor | None:
    """Return the values of such a tensor; all promised values is computed for it where need be."""
    promise = tensor.promised("", lambda: None)
    if promise.data is None:
        tensor.keep_promises(why)
    return promise.data
