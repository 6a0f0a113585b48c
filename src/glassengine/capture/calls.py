"""Reads a call of a module: its tensors, caches and token ids, and whether it counts as a step.

Entry points are modules that are called by themselves: ahead of a forward (an encoder), or with what came out of one. A
serving engine computes logits after the model's own forward, of some rows of its result. Whether a module does that is
decided once, by what it gets. Calls within a backward have activations back that were not kept (checkpointing): values
are recorded once, by the first call; where that ran without a graph, only the second one sees gradients.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from glassengine.capture.module_names import KnownModule, OpenCalls
from glassengine.capture.observed_call import is_interruption
from glassengine.prompt import settings
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


def first_argument(root: nn.Module) -> str | None:
    """Return the name of the first argument of a model's forward, where it has one."""
    try:
        return next(iter(inspect.signature(root.forward).parameters), None)
    except (TypeError, ValueError):
        return None


def token_ids(args: Any, kwargs: Any, first: str | None) -> list[list[int]]:
    """Return what each row of the batch was given, without padding; nothing where the model reads no tokens.

    Serving engines pass the tokens of all rows concatenated: only a single row is then known.
    """
    ids = kwargs.get("input_ids")
    if ids is None and args and first == "input_ids":
        ids = args[0]
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        return []
    if is_computed_later(ids):
        promise = ids.promised("", lambda: None)
        if promise.data is None:
            ids.keep_promises("the token ids of a recording")
        ids = promise.data
    if type(ids) is not Tensor:
        return []
    if ids.dim() == 1 and _is_one_row(ids, kwargs.get("positions", args[1] if len(args) > 1 else None)):
        return [ids.tolist()]
    if ids.dim() != 2:
        return []
    rows: list[list[int]] = ids.tolist()
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= ids.shape[1] > 0:
        seen = mask[:, -ids.shape[1] :].tolist()
        rows = [[token for token, valid in zip(*pair, strict=True) if valid] for pair in zip(rows, seen, strict=True)]
    return rows


def _is_one_row(ids: Tensor, positions: Any) -> bool:
    """Whether the positions of `ids` follow one another."""
    if not isinstance(positions, Tensor) or positions.shape != ids.shape or positions.is_floating_point():
        return False
    return bool((torch.diff(positions) == 1).all())


_GENERATION, _PIPELINES = "transformers.generation.", "transformers.pipelines."
_MOST_FRAMES = 64
_MOST_CHARACTERS = 1 << 16


def generation_facts() -> dict[str, Any]:
    """Return "sampling" (settings in force) and "prompt" (its text), as far as the callers have them."""
    facts: dict[str, Any] = {}
    if f"{_GENERATION}utils" not in sys.modules:
        return facts
    for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(1)), _MOST_FRAMES):
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(_GENERATION) and "sampling" not in facts:
            config = frame.f_locals.get("generation_config")
            values = {name: getattr(config, name, None) for name in settings.NAMES}
            known = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, list))}
            if "max_new_tokens" in known:
                known.pop("max_length", None)  # follows from it and the prompt
            facts |= {"sampling": known} if known else {}
        if module.startswith(_PIPELINES) and isinstance(text := frame.f_locals.get("prompt_text"), str):
            facts["prompt"] = text[:_MOST_CHARACTERS]
    return facts


_MAX_ROWS = 64
"""Rows that are looked up in the result of a forward."""


class EntryPoints:
    """Tells which modules continue a forward that has ended."""

    def __init__(self, known: Collection[KnownModule]) -> None:
        self._silent = [one for one in known if not one.is_root and can_be_called(one.module)]
        self._continues: dict[nn.Module, bool] = {}
        self._results: dict[int, list[weakref.ref[Tensor]]] = {}

    def may_follow(self) -> bool:
        """Return whether something may still be called that belongs to a forward which ends now."""
        if any(self._continues.values()):
            return True
        # One that is called in the forward itself has no reason to be called again.
        self._silent = [one for one in self._silent if not one.is_called and one.module not in self._continues]
        return bool(self._silent)

    def note_result(self, step: int, result: Any) -> None:
        """Remember what came out of the forward that is `step`; it is not kept alive."""
        try:
            self._results = {step: [weakref.ref(tensor) for _, tensor in tensors_in("", result)]}
        except Exception as error:
            if is_interruption(error):
                raise
            self._results = {}

    def continues(self, module: nn.Module, step: int | None, given: Any) -> bool:
        """Return whether a call of `module` on `given` belongs to `step`, which was the last one in this thread."""
        if module not in self._continues:
            results = [] if step is None else [ref() for ref in self._results.get(step, ())]
            try:
                self._continues[module] = any(
                    _holds_rows(result, tensor)
                    for _, tensor in tensors_in("", given)
                    for result in results
                    if result is not None
                )
            except Exception as error:
                if is_interruption(error):
                    raise
                self._continues[module] = False  # of tensors that cannot be looked into
        return step is not None and self._continues[module]


def _holds_rows(result: Tensor, given: Tensor) -> bool:
    """Return whether every row of `given` is one of `result`."""
    if given is result:
        return True
    if not given.dim() or result.shape[-1:] != given.shape[-1:] or result.dtype != given.dtype or given.shape[-1] < 2:
        return False
    rows = given.detach().reshape(-1, given.shape[-1])[:_MAX_ROWS]
    there = result.detach().reshape(-1, result.shape[-1])
    return 0 < len(rows) <= len(there) and all(bool((there == row).all(-1).any()) for row in rows)


def can_be_called(module: nn.Module) -> bool:
    """Return whether a module has a forward; containers have none."""
    return getattr(type(module), "forward", None) is not nn.Module.forward


Watch = Callable[[Tensor, str, OpenCalls], None]


class Recomputed:
    """Counts calls inside of backwards, and watches the gradients that only they see.

    Args:
        watch: Delivers the gradient of a tensor as a site of a step; None where gradients are not recorded.

    Attributes:
        num_calls: Path -> how many calls ran again.
    """

    def __init__(self, watch: Watch | None) -> None:
        self.num_calls: Counter[str] = Counter()
        self._watch = watch

    def before(self, known: KnownModule, forward: OpenCalls | None, args: Any, kwargs: Any) -> None:
        """Note that a call begins again, which `forward` made first."""
        self.num_calls[known.paths[0]] += 1
        self._look(known, forward, ":in", (args, kwargs))

    def after(self, known: KnownModule, forward: OpenCalls | None, result: Any) -> None:
        """Note its result."""
        self._look(known, forward, ":out", (result,))

    def _look(self, known: KnownModule, forward: OpenCalls | None, port: str, trees: tuple[Any, ...]) -> None:
        # Which of several calls runs again is unknown.
        path = known.paths[0]
        if self._watch is None or forward is None or len(known.paths) > 1 or forward.num_calls.get(path) != 1:
            return
        side = ":grad_in" if port == ":in" else ":grad_out"
        try:
            for tree in trees:
                for name, tensor in tensors_in(port, tree):
                    site = f"{path}{side}{name[len(port) :]}"
                    if tensor.requires_grad and site not in forward.watched_sites:
                        self._watch(tensor, site, forward)
        except Exception as error:
            if is_interruption(error):
                raise


_PIPELINING = "torch.distributed.pipelining"


def is_shape_inference_call(root: nn.Module, args: Any, kwargs: Any) -> bool:
    """Return whether a call of `root`, or of a part of it, is made for the shapes of its results alone.

    Such calls get tensors without values while the model has values, or uninitialized memory: the stages of a
    pipeline of torch tell each other shapes that way, ahead of the first microbatch.
    """
    try:
        given = [tensor for tree in (args, kwargs) for _, tensor in tensors_in("", tree)]
    except Exception as error:
        if is_interruption(error):
            raise
        return False
    if given and all(_has_no_values(tensor) for tensor in given):
        return not any(_has_no_values(parameter) for parameter in root.parameters())
    return _PIPELINING in sys.modules and any(
        "inference" in frame.f_code.co_name and frame.f_globals.get("__name__", "").startswith(_PIPELINING)
        for frame, _ in traceback.walk_stack(sys._getframe(1))
    )


def _has_no_values(tensor: Tensor) -> bool:
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"
