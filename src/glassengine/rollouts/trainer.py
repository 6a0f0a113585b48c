"""Runs the trainer's model on the tokens of a rollout, under the settings of a run."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from glassengine.errors import IncomparableError, UsageError, first_line
from glassengine.program.kinds.causal_lm import cache_argument
from glassengine.rollouts.formats import Sample
from glassengine.rollouts.settings import RolloutSettings

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_MOST_COPIES = 4
_CAPS = {
    "the soft cap of logits": "final_logit_softcapping",
    "the soft cap of attention": "attn_logit_softcapping",
}
"""Setting that an engine may leave out -> what configurations and modules call it."""
_NOT_QUANTIZED = ("embed", "wte", "wpe", "head", "router", "gate.weight")


class Trainer:
    """A causal language model of transformers.

    Args:
        module: The model; it is left as it is.
        other_weights: Name -> weights of other steps.

    Raises:
        UsageError: It is something else.
    """

    def __init__(self, module: Any, other_weights: Mapping[str, Callable[[], Mapping[str, Tensor]]]) -> None:
        config = getattr(module, "config", None)
        head = getattr(module, "get_output_embeddings", lambda: None)()
        if config is None or head is None or not hasattr(module, "set_attn_implementation"):
            raise UsageError(
                "a rollout is compared with a causal language model of transformers",
                got=type(module).__name__,
                expected="a directory or id of Hugging Face, or a function that returns such a model",
            )
        self.module, self.config, self.other_weights = module, config.get_text_config(decoder=True), other_weights
        self.vocab_size = int(self.config.vocab_size)
        self.dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        self.gates = _gates(module)
        self.num_runs = 0
        self._copies: dict[tuple[Any, ...], Any] = {}
        self._attention = config._attn_implementation

    @property
    def eos(self) -> list[int]:
        """Tokens that end a sequence."""
        found = getattr(self.module.generation_config, "eos_token_id", None) or self.config.eos_token_id
        return [] if found is None else list(found) if isinstance(found, (list, tuple)) else [int(found)]

    @property
    def pad(self) -> int:
        """Token that batches are padded with."""
        found = self.config.pad_token_id
        return 0 if found is None else int(found)

    @property
    def kernels(self) -> list[str]:
        """Attention kernels that the model has beside its own; none of a recurrence."""
        found = []
        for name in ("eager", "sdpa"):
            if name != self._attention:
                with contextlib.suppress(ValueError, ImportError):
                    self.module.set_attn_implementation(name)
                    found.append(name)
        self.module.set_attn_implementation(self._attention)
        return found

    @property
    def keeps_keys(self) -> bool:
        """Whether what it keeps for the next token are keys and values."""
        return cache_argument(self.module) == "past_key_values"

    def prompt(self, one: Sample, how: str) -> list[int]:
        """Return what an engine reads in place of the prompt."""
        tokens = one.prompt
        if how == "without its first token":
            return tokens[1:]
        if how == "with the begin token twice":
            begin = self.config.bos_token_id
            return [tokens[0] if begin is None else int(begin), *tokens]
        if how.startswith("without its last"):
            return tokens[: -int(how.split()[3])] if how[-1] == "s" else tokens[:-1]
        if how.startswith("its last"):
            return tokens[-int(how.split()[2]) :]
        return tokens

    def is_possible(self, samples: Sequence[Sample], how: str) -> bool:
        """Whether each changed prompt has a token, and one is another."""
        found = [self.prompt(one, how) for one in samples]
        return all(found) and any(a != one.prompt for a, one in zip(found, samples, strict=True))

    def logits(self, samples: Sequence[Sample], settings: RolloutSettings) -> Tensor:
        """Return the logits before each token of the responses.

        Raises:
            IncomparableError: The model cannot run on these tokens.
        """
        self.num_runs += 1
        parts = range(0, len(samples), settings.batch)
        with self._changed(settings) as module:
            return torch.cat([self._part(module, samples[at : at + settings.batch], settings) for at in parts])

    def _part(self, module: Any, samples: Sequence[Sample], settings: RolloutSettings) -> Tensor:
        rows = [self.prompt(one, settings.tokens) + one.response for one in samples]
        width = max(map(len, rows))
        largest = max(map(max, rows))
        if largest >= self.vocab_size:
            raise IncomparableError(
                "the rollout has tokens that the model does not have",
                got=f"token {largest}",
                expected=f"at most {self.vocab_size - 1}",
                hint="glass check-prompt compares tokenizers",
            )
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        options: dict[str, Any] = {"use_cache": False}
        if settings.cache is not None:
            options = {"use_cache": True, "past_key_values": _RoundedCache(DTYPES[settings.cache])}
        with self._routed(module, samples, width, settings):
            try:
                found = module(input_ids=ids, attention_mask=mask, **options).logits
            except (RuntimeError, IndexError, ValueError) as error:
                raise IncomparableError("the model cannot run on the tokens", got=first_line(error)) from error
        ends = [(len(row) - len(one.response), len(row)) for row, one in zip(rows, samples, strict=True)]
        return torch.cat([found[at, start - 1 : end - 1] for at, (start, end) in enumerate(ends)])

    @contextlib.contextmanager
    def _changed(self, settings: RolloutSettings) -> Iterator[Any]:
        """Yield the model with dtype, weights, configuration and head of the settings."""
        module = self._copy(settings)
        with contextlib.ExitStack() as undo:
            if settings.attention is not None:
                module.set_attn_implementation(settings.attention)
                undo.callback(module.set_attn_implementation, self._attention)
            if settings.config is not None:
                undo.enter_context(_configured(module, *settings.config))
            if settings.scale is not None:
                tensor = module.get_parameter(settings.scale[0]).data
                before = tensor.clone()
                tensor.mul_(settings.scale[1])
                undo.callback(tensor.copy_, before)
            if settings.head is not None:
                dtype = DTYPES[settings.head]
                head = module.get_output_embeddings()

                def rounded(layer: Any, given: Any, result: Tensor) -> Tensor:
                    bias = None if layer.bias is None else layer.bias.to(dtype)
                    found: Tensor = nn.functional.linear(given[0].to(dtype), layer.weight.to(dtype), bias).to(result)
                    return found

                undo.callback(head.register_forward_hook(rounded).remove)
            yield module

    def _copy(self, settings: RolloutSettings) -> Any:
        """Return the model with the weights and dtype of the settings, made when it is first asked for."""
        key = settings.weights, settings.quantized, settings.dtype or self.dtype
        if key == ("own", None, self.dtype):
            return self.module
        if key not in self._copies:
            while len(self._copies) >= _MOST_COPIES:
                del self._copies[next(iter(self._copies))]
            module = copy.deepcopy(self.module)
            if settings.weights != "own":
                module.load_state_dict(self.other_weights[settings.weights](), strict=False)
            if settings.quantized is not None:
                _quantize(module, settings.quantized)
            if settings.dtype == "float64" and self.gates and hasattr(module, "set_experts_implementation"):
                module.set_experts_implementation("eager")  # grouped products have no float64
            self._copies[key] = module.to(DTYPES[key[2]])
        return self._copies[key]

    @contextlib.contextmanager
    def _routed(self, module: Any, samples: Sequence[Sample], width: int, settings: RolloutSettings) -> Iterator[None]:
        """Force the experts of the file, where these are wanted: weights follow from the model's own logits."""
        with contextlib.ExitStack() as hooks:
            if settings.routes == "file":
                forced = [self.routes(one) for one in samples]
                skipped = [len(self.prompt(one, settings.tokens)) - len(one.prompt) for one in samples]
                for layer, gate in enumerate(_gates(module)):
                    known = [None if one is None else one[:, layer] for one in forced]
                    hooks.callback(gate.register_forward_hook(_forcing(known, width, skipped)).remove)
            yield

    def own_routes(self, samples: Sequence[Sample], settings: RolloutSettings) -> list[Tensor]:
        """Return the experts that the model itself takes, as [tokens - 1, layers, k] of each sample."""
        found: list[Tensor] = []
        with self._changed(settings) as module, contextlib.ExitStack() as hooks, torch.no_grad():
            layers: dict[int, Tensor] = {}
            for layer, gate in enumerate(_gates(module)):
                keep = lambda router, given, result, layer=layer: layers.update({layer: result[2]})  # noqa: E731
                hooks.callback(gate.register_forward_hook(keep).remove)
            for one in samples:
                self._part(module, [one], settings)
                found.append(torch.stack([layers[layer] for layer in sorted(layers)], 1)[:-1])
        return found

    def routes(self, one: Sample) -> Tensor | None:
        """Return the routes of a sample as [tokens - 1, layers, k]; -1 where the file has none.

        An engine that read another prompt has other numbers of them: they end at the same token.

        Raises:
            IncomparableError: They have other sizes.
        """
        if one.routes is None or not self.gates:
            return None
        size, k = len(one.prompt) + len(one.response) - 1, int(self.gates[0].top_k)
        each = len(self.gates) * k
        fits = one.routes.ndim == 1 or one.routes.shape[1:] == (len(self.gates), k)
        if not fits or not one.routes.numel() or one.routes.numel() % each:
            raise IncomparableError(
                "the experts of the file are not the model's",
                got=f"{list(one.routes.shape)}",
                expected=f"{[size, len(self.gates), k]}",
            )
        found = one.routes.reshape(-1, len(self.gates), k)[-size:]
        return torch.cat([found.new_full((size - len(found), len(self.gates), k), -1), found])


def _gates(module: nn.Module) -> list[Any]:
    """Return the routers that give (logits, scores, experts), layer by layer."""
    named = [one for name, one in module.named_modules() if name.endswith((".gate", ".router"))]
    return [one for one in named if hasattr(one, "top_k")]


def _forcing(known: Sequence[Tensor | None], width: int, skipped: Sequence[int]) -> Callable[..., Any]:
    """Return a hook of a router that puts the file's experts in place of its own."""

    def forced(router: Any, given: Any, result: Any) -> Any:
        logits, scores, places = result
        places = places.clone()
        is_normed = bool(torch.allclose(scores.float().sum(-1), torch.ones(()), atol=0.02))
        for row, (routes, moved) in enumerate(zip(known, skipped, strict=True)):
            if routes is not None:
                there = routes[max(-moved, 0) :].to(places)
                own = places[(first := row * width + max(moved, 0)) : first + len(there)]
                own.copy_(torch.where(there < 0, own, there))
        found = logits.float().softmax(-1).gather(-1, places)
        found = found / found.sum(-1, keepdim=True) if is_normed else found
        return logits, torch.where((places == result[2]).all(-1, keepdim=True), scores, found.to(scores)), places

    return forced


class _RoundedCache(DynamicCache):  # type: ignore[misc]
    """Keys and values in fewer digits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._rounded = dtype

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **more: Any) -> Any:
        """Keep what fewer digits hold."""
        keys, values = (one.to(self._rounded).to(one.dtype) for one in (key_states, value_states))
        return super().update(keys, values, layer_idx, *rest, **more)


def _quantize(module: nn.Module, how: str) -> None:
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim < 2 or any(part in name for part in _NOT_QUANTIZED):
                continue
            if how == "fp8":
                weight.copy_(weight.to(torch.float8_e4m3fn).to(weight.dtype))
                continue
            top = 2 ** (int(how.removeprefix("int")) - 1) - 1
            step = (weight.abs().amax(-1, keepdim=True) / top).clamp(min=1e-12)
            weight.copy_((weight / step).round().clamp(-top, top) * step)


@contextlib.contextmanager
def _configured(module: Any, name: str, value: float) -> Iterator[None]:
    """Change a setting of all modules that have it, for a while."""
    before: list[tuple[Any, str, Any]] = []
    one: Any
    for one in (module.config.get_text_config(decoder=True), *module.modules()):
        if (cap := _CAPS.get(name)) is not None and isinstance(getattr(one, cap, None), float):
            before.append((one, cap, getattr(one, cap)))
            setattr(one, cap, None)
        elif name == "the theta of RoPE" and isinstance(getattr(one, "inv_freq", None), Tensor):
            size = len(one.inv_freq)
            before.append((one, "inv_freq", one.inv_freq))
            one.inv_freq = (value ** -(torch.arange(size, dtype=torch.float64) / size)).float()
        elif name == "the factor of RoPE's positions" and isinstance(getattr(one, "inv_freq", None), Tensor):
            before.append((one, "inv_freq", one.inv_freq))
            one.inv_freq = one.inv_freq / value
        elif name == "the epsilon of norms":
            key = next((key for key in ("variance_epsilon", "eps") if hasattr(one, key)), None)
            if key is not None:
                before.append((one, key, getattr(one, key)))
                setattr(one, key, value)
    try:
        yield
    finally:
        for one, key, old in before:
            setattr(one, key, old)


def configurations(module: Any) -> Iterator[tuple[str, float]]:
    """Yield settings of a model that engines often have otherwise."""
    parts = list(module.modules())
    if any(isinstance(getattr(one, "inv_freq", None), Tensor) for one in parts):
        yield from (("the theta of RoPE", value) for value in (1e4, 5e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7))
        yield from (("the factor of RoPE's positions", value) for value in (2.0, 4.0, 8.0, 32.0))
    config = module.config.get_text_config(decoder=True)
    yield from ((name, 0.0) for name, cap in _CAPS.items() if getattr(config, cap, None))
    yield from (("the epsilon of norms", value) for value in (1e-3, 1e-5, 1e-6, 1e-8))
