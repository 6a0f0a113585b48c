"""Cache layers of recurrent models: convolution and recurrent states, owned by the caller and written in place.

transformers reads a state only where a step has one token, so the program of such a model takes one token a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

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


def states_of(layers: Iterable[Any]) -> tuple[State, ...]:
    """Return the states that the layers of a filled cache of transformers hold."""
    return tuple(
        State(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))
        for name, tensor in state_tensors(layers).items()
    )


def state_tensors(layers: Iterable[Any]) -> dict[str, torch.Tensor]:
    """Return the states in the layers of a filled cache of transformers, [B, ...] by the names of `State`."""
    found = {}
    for index, layer in enumerate(layers):
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        for word, attribute in KINDS.items():
            for number, tensor in getattr(layer, attribute).items():
                if tensor is not None:
                    found[f"past_{word}{number or ''}_{index}"] = tensor
    return found


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
