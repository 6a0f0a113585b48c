"""The one program of a causal language model: static cache, dynamic in batch, sequence and cache length.

The wrapper hands the unchanged user model a cache whose layers are plain tensors written in place at
`cache_position`; masks (causal, padding, sliding window) are made by the model's own code from the 2-D
`attention_mask` over cache slots, so the program contains nothing of ours but the two writes per layer.

A recurrent model keeps convolution and recurrent states instead of, or beside, keys and values. transformers reads a
state only where a step has one token, so the program of such a model takes one token a step.

Shape legend: B batch, S new tokens, T cache length, H key/value heads, D head size.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from glassengine.errors import UsageError
from glassengine.program.user_code.calls import described

USER_MODULE = "user"
"""Attribute of the wrapper that holds the user's model; stripped from every path."""


@dataclass(frozen=True)
class KVLayout:
    """Shapes of the cache.

    Attributes:
        layers: (heads, key size, value size) per layer, zeros for a layer that keeps no keys and values.
        states: Convolution and recurrent states, in the order of the layers.
    """

    layers: tuple[tuple[int, int, int], ...]
    states: tuple[State, ...] = ()

    @property
    def attention_layers(self) -> list[int]:
        """Indices of the layers that keep keys and values."""
        return [index for index, (heads, _, _) in enumerate(self.layers) if heads]

    @property
    def names(self) -> list[str]:
        """Names of the cache inputs: keys and values by layer, then the states."""
        keys_and_values = [f"past_{kind}_{index}" for index in self.attention_layers for kind in ("key", "value")]
        return [*keys_and_values, *(state.name for state in self.states)]

    def allocate(self, batch: int, length: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Return zeroed cache inputs `past_key_i` [B, H, T, Dk], `past_value_i` [B, H, T, Dv] and states [B, ...]."""
        tensors: dict[str, torch.Tensor] = {}
        for index in self.attention_layers:
            heads, key_size, value_size = self.layers[index]
            for name, size in (("key", key_size), ("value", value_size)):
                shape = (batch, heads, length, size)
                tensors[f"past_{name}_{index}"] = torch.zeros(shape, dtype=dtype, device=device)
        for state in self.states:
            own = getattr(torch, state.dtype)
            tensors[state.name] = torch.zeros((batch, *state.shape), dtype=own, device=device)
        return tensors


class CacheLayer(CacheLayerMixin):
    """One layer of the static cache: two tensors owned by the caller, written in place."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.positions = keys, values, positions
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the tensors exist from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [B, H, S, D] at the positions of this step; return the whole cache [B, H, T, D]."""
        self.keys.index_copy_(2, self.positions, key_states)
        self.values.index_copy_(2, self.positions, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (key length, offset) for the model's own mask code."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Any:
        """Return the slot of the first new token, a 0-d tensor so that it stays dynamic in the graph."""
        return self.positions[0]

    def get_max_length(self) -> int:
        """Return the cache length T."""
        return self.keys.shape[2]


class CausalLM(nn.Module):
    """Wrapper that is exported: (ids, mask, positions, slots, cache) -> logits, cache updated in place."""

    def __init__(self, model: nn.Module, layout: KVLayout) -> None:
        super().__init__()
        setattr(self, USER_MODULE, model)
        self._layout = layout

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        cache_position: torch.Tensor,
        cache: Sequence[torch.Tensor],
        **more: Any,
    ) -> torch.Tensor:
        """Return logits [B, S, V].

        Args:
            input_ids: [B, S] int64.
            attention_mask: [B, T] int64 over cache slots: 1 for slots that hold (or now receive) a real token.
            position_ids: [B, S] int64, position of each token in its own sequence.
            cache_position: [S] int64, the cache slots that this step writes.
            cache: The tensors of `KVLayout.names`: keys and values [B, H, T, D], states [B, ...]; written in place.
            **more: Further arguments of the user's model.
        """
        attention = self._layout.attention_layers
        keys_and_values, states = cache[: 2 * len(attention)], cache[2 * len(attention) :]
        layers: dict[int, CacheLayerMixin] = {
            index: CacheLayer(keys, values, cache_position)
            for index, keys, values in zip(attention, keys_and_values[::2], keys_and_values[1::2], strict=True)
        }
        if states:
            _forget_padding(states, attention_mask, cache_position)
            layers |= state_layers(self._layout.states, states)
        user: Any = getattr(self, USER_MODULE)
        arguments = {
            "input_ids": input_ids,
            # A recurrence has no mask of its own: its state has seen everything.
            "attention_mask": attention_mask if attention else None,
            "position_ids": position_ids,
            cache_argument(user): Cache(layers=[layers[index] for index in sorted(layers)]),
            "use_cache": True,
        }
        logits: torch.Tensor = user(**accepted(user, arguments), **more).logits
        return logits


def _forget_padding(states: Sequence[torch.Tensor], attention_mask: torch.Tensor, cache_position: torch.Tensor) -> None:
    """Set the states of rows to zero whose last token was padding, so that each prompt begins with none."""
    before = attention_mask.index_select(1, (cache_position - 1).clamp(min=0))  # [B, 1]
    for state in states:
        state.mul_(before.reshape(-1, *[1] * (state.dim() - 1)).to(state.dtype))


def cache_argument(model: nn.Module) -> str:
    """Return what the forward of a model calls its cache."""
    return "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"


def accepted(model: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those of `arguments` that the forward of `model` takes."""
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def input_names(layout: KVLayout) -> list[str]:
    """Return the names of the program's inputs in order, as the reference documents spell them."""
    return ["input_ids", "attention_mask", "position_ids", "cache_position", *layout.names]


def probe_layout(model: nn.Module, *, has_values: bool = True) -> KVLayout:
    """Find the cache layout by one forward of two tokens with transformers' own cache.

    Args:
        model: In evaluation mode.
        has_values: Whether its weights have been loaded; else nothing is computed, and no memory of theirs touched.

    Raises:
        UsageError: The model keeps something other than plain keys and values (recurrent state, say).
    """
    device = next(model.parameters()).device
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))  # type: ignore[operator, union-attr]
    shapes_only = contextlib.nullcontext() if has_values else FakeTensorMode(allow_non_fake_inputs=True)
    ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad(), exportable_experts(model), shapes_only:
        try:
            model(**arguments, **{cache_argument(model): cache}, use_cache=True)
        except Exception as error:
            model(**arguments, use_cache=False)  # what raises without a cache too is no matter of the cache
            raise _unknown_cache(described(error)) from error
    if odd := {type(layer).__name__ for layer in cache.layers if not _is_known(layer)}:
        raise _unknown_cache(", ".join(sorted(odd)))
    states = tuple(
        State(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))
        for name, tensor in state_tensors(cache.layers).items()
    )
    filled = {int(state.name.rsplit("_", 1)[1]) for state in states}
    filled |= {index for index, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None}
    empty = [str(index) for index in range(len(cache.layers)) if index not in filled]
    if empty or not cache.layers:
        # Values of its own, in the module or in another argument, would be lost between steps.
        raise _unknown_cache(
            f"{type(model).__name__} filled no cache" + (f" in layers {', '.join(empty)}" if empty else "")
        )
    return KVLayout(tuple(_sizes(layer) for layer in cache.layers), states)


def _unknown_cache(got: str) -> UsageError:
    return UsageError(
        "this model has a cache of an unknown kind",
        got=got,
        expected="decoder-only models whose layers keep keys and values, or convolution and recurrent states",
        hint="build it as a plain module: glass build MODEL --inputs FILE",
    )


def _is_known(layer: Any) -> bool:
    """Whether a layer keeps keys and values, or states, and nothing else."""
    kinds = isinstance(layer, DynamicLayer) + isinstance(layer, LinearAttentionLayer)
    return kinds == 1 and not isinstance(layer, DynamicIndexedLayer)


def _sizes(layer: Any) -> tuple[int, int, int]:
    """Return (heads, key size, value size) of one filled layer."""
    if not isinstance(layer, DynamicLayer):
        return 0, 0, 0
    return int(layer.keys.shape[1]), int(layer.keys.shape[3]), int(layer.values.shape[3])


def example_inputs(layout: KVLayout, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return example inputs and their dynamic dimensions; all at least 2, or export specializes them."""
    batch, new, length = 2, 1 if layout.states else 5, 12
    dynamic = torch.export.Dim.DYNAMIC

    def ids(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    cache = layout.allocate(batch, length, dtype, str(device))
    sequence = {} if layout.states else {1: dynamic}
    inputs = {
        "input_ids": ids(batch, new),
        "attention_mask": ids(batch, length) + 1,
        "position_ids": ids(batch, new) + torch.arange(new, device=device),
        "cache_position": torch.arange(new, device=device),
        "cache": list(cache.values()),
    }
    shapes = {
        "input_ids": {0: dynamic, **sequence},
        "attention_mask": {0: dynamic, 1: dynamic},
        "position_ids": {0: dynamic, **sequence},
        "cache_position": {} if layout.states else {0: dynamic},
        "cache": [
            {0: dynamic, 2: dynamic} if name.startswith(("past_key", "past_value")) else {0: dynamic} for name in cache
        ],
    }
    return inputs, shapes


@contextlib.contextmanager
def exportable_experts(model: nn.Module) -> Iterator[None]:
    """Trace mixture-of-experts layers with `batched_mm`: the default uses ops that no converter knows."""
    config: Any = getattr(model, "config", None)
    before = getattr(config, "_experts_implementation", None)
    if before is None or not hasattr(model, "set_experts_implementation"):
        yield
        return
    model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_experts_implementation(before)  # type: ignore[operator]


def expert_modules(model: nn.Module) -> list[str]:
    """Return the paths of modules that `exportable_experts` traces with another algorithm than the model may use.

    Their results are the same, but their inner values come in another order.
    """
    # Set by transformers' decorator for experts, and by nothing else.
    return [name for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")]


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a model of transformers."""
    # The import takes two seconds. Without it there is no such model.
    return isinstance(module, getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ()))


KINDS = {"conv": "conv_states", "recurrent": "recurrent_states"}
"""Word in the name of a state -> attribute of transformers' layer."""


class State(NamedTuple):
    """One state tensor of a cache: its name, torch dtype name, and shape without the batch."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def keeps_states(module: nn.Module) -> bool:
    """Whether layers of a model of transformers keep states; says its configuration, nothing is run."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "num_hidden_layers"):
        return False
    try:
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    except (AttributeError, KeyError, TypeError, ValueError):
        return False  # its layers are of kinds that no cache knows: blocks of a ResNet, or those of remote code
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def state_tensors(layers: Iterable[Any]) -> dict[str, torch.Tensor]:
    """Return the states in the layers of a filled cache of transformers, [B, ...] by the names of `State`."""
    states = {}
    for index, layer in enumerate(layers):
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        for word, attribute in KINDS.items():
            for number, tensor in getattr(layer, attribute).items():
                if tensor is not None:
                    states[f"past_{word}{number or ''}_{index}"] = tensor
    return states


def forget(cache: Any, rows: torch.Tensor) -> None:
    """Set the states of `rows` (a bool mask [B]) in a cache of transformers to zero, in place."""
    for state in state_tensors(cache.layers).values():
        state[rows] = 0


class StateLayer(LinearAttentionLayer):
    """The states of one layer; every step finds a previous state, which is zero before the first."""

    def __init__(self, number_of_states: int) -> None:
        super().__init__(number_of_states)
        self.has_previous_state = dict.fromkeys(range(number_of_states), True)

    def take(self, word: str, number: int, tensor: torch.Tensor) -> None:
        """Use `tensor` as a state from now on.

        Args:
            word: One of `KINDS`.
            number: Of the state among those of its kind in this layer.
            tensor: [B, ...]; is written in place.
        """
        getattr(self, KINDS[word])[number] = tensor
        if word == "conv":
            self.is_conv_states_initialized[number] = True
            self.conv_kernel_size[number] = tensor.shape[-1]
        else:
            self.is_recurrent_states_initialized[number] = True


def state_layers(states: Iterable[State], tensors: Iterable[torch.Tensor]) -> dict[int, StateLayer]:
    """Return layer index -> its states, for every layer that has any."""
    of_layers: dict[int, list[tuple[str, int, torch.Tensor]]] = {}
    for state, tensor in zip(states, tensors, strict=True):
        _, kind, index = state.name.split("_")
        word = kind.rstrip("0123456789")
        of_layers.setdefault(int(index), []).append((word, int(kind.removeprefix(word) or 0), tensor))
    layers = {}
    for place, own in of_layers.items():
        layers[place] = StateLayer(1 + max(number for _, number, _ in own))
        for word, number, tensor in own:
            layers[place].take(word, number, tensor)
    return layers


def cache_tensors(cache: Any) -> dict[str, torch.Tensor]:
    """Return keys, values and states of a cache of transformers by the names of the program's inputs."""
    found = state_tensors(cache.layers)
    for index, layer in enumerate(cache.layers):
        for kind, tensor in (("key", getattr(layer, "keys", None)), ("value", getattr(layer, "values", None))):
            if tensor is not None:
                found[f"past_{kind}_{index}"] = tensor
    return found
