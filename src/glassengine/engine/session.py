"""A generation in progress: prefill, then decode steps, over a static cache.

Slots of the cache are filled from left to right; a shorter prompt of a batch is padded on its left. Everything whose
size is that of the cache is allocated once; a decode step writes one column of the mask and passes views.

Shape legend: B batch, S new tokens, T cache length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from glassengine.engine.kv_cache import KVCache
from glassengine.errors import UnknownNameError, UsageError
from glassengine.program.outputs import PREFIX
from glassengine.sites import matches

if TYPE_CHECKING:
    from glassengine.engine.engine import Engine

STEP_INPUTS = ("input_ids", "attention_mask", "position_ids", "cache_position")


class Session:
    """One batch of sequences on an engine.

    Args:
        engine: A loaded engine of kind "causal_lm".
        batch_size: Number of sequences B.
        length: Cache slots T: tokens of the longest prompt and those to generate.
        debug: True keeps every input and output of each step in `debug_buffers`; names or patterns keep those alone;
            False costs nothing.

    Attributes:
        step: The last step that ran: 0 after the prefill, -1 before.
        position: Cache slots in use.
        debug_buffers: Of the last step, in the order of the documents: input_ids, logits, position_ids, attention_mask,
            cache_position, past_key_0 (before the step), past_value_0, present_key_0, present_value_0, ..., then the
            added outputs by alias or site. Copies, safe to keep.

    Raises:
        UsageError: The engine was built for a smaller batch or shorter sequences, or has no cache.
        UnknownNameError: A pattern of `debug` names nothing that the engine returns.
    """

    def __init__(self, engine: Engine, batch_size: int, length: int, *, debug: bool | Sequence[str] = False) -> None:
        manifest = engine.manifest
        if manifest.kind != "causal_lm" or manifest.max_batch_size is None or manifest.max_seq_len is None:
            raise UsageError(
                f"the engine {manifest.name!r} has no prefill and decode",
                got=f"kind {manifest.kind}",
                hint="call it: engine(**inputs)",
            )
        if batch_size < 1 or batch_size > manifest.max_batch_size:
            raise UsageError(
                "the batch does not fit the engine",
                got=f"{batch_size} sequences",
                expected=f"1 to {manifest.max_batch_size}",
                hint=f"build with --max-batch-size {batch_size}" if batch_size > 0 else "give at least one prompt",
            )
        if length > manifest.max_seq_len:
            raise UsageError(
                "prompt and new tokens are longer than the engine was built for",
                got=f"{length} tokens",
                expected=f"at most {manifest.max_seq_len}",
                hint=f"build with --max-seq-len {length}, shorten the prompt, or lower --max-new-tokens",
            )
        # Sizes of 1 were never traced: export assumes at least 2 slots.
        length = max(length, 2)
        self.engine = engine
        self.step = -1
        self.position = 0
        self.debug_buffers: dict[str, torch.Tensor] = {}
        self._names = self._selected(debug)
        self._pasts = [name for name in manifest.caches if name in self._names]
        self._batch_size, self._length, self._vocab_size = batch_size, length, manifest.vocab_size
        self._cache = KVCache(manifest, batch_size, length)
        self._mask = torch.zeros((batch_size, length), dtype=torch.int64)
        self._positions = torch.zeros((batch_size, length), dtype=torch.int64)
        self._slots = torch.arange(length)
        self._inputs: dict[str, torch.Tensor] = {}
        self._outputs: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._run = engine.executable.run

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Run the prompts.

        Args:
            input_ids: [B, S] int64; padding on the left.
            attention_mask: [B, S], 1 for tokens and 0 for padding; None means no padding.

        Returns:
            Logits [B, S, V] in the engine's dtype, valid until the next step.

        Raises:
            UsageError: Wrong shape, dtype or device, tokens outside of the vocabulary, padding on the right, or a
                second prefill.
        """
        if self.step >= 0:
            raise UsageError("a session is prefilled once", got=f"step {self.step}", hint="make a new session")
        self._check_tokens(input_ids, None)
        new = input_ids.shape[1]
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(torch.int64)
        if mask.shape != input_ids.shape or bool((mask[:, -1] == 0).any()):
            raise UsageError(
                "the attention mask does not fit",
                got=f"shape {tuple(mask.shape)}, padding on the right"
                if mask.shape == input_ids.shape
                else f"shape {tuple(mask.shape)}",
                expected=f"shape {tuple(input_ids.shape)}, padding on the left",
            )
        self._mask[:, :new] = mask
        real = (mask.cumsum(-1) - 1).clamp_(min=0)
        self._positions[:, :new] = real
        # From here on every slot holds a token.
        self._positions[:, new:] = real[:, -1:] + torch.arange(1, self._length - new + 1)
        return self.advance(input_ids)

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run one step with given tokens (those just chosen, or forced ones).

        Args:
            tokens: [B] or [B, 1] int64.

        Returns:
            Logits [B, 1, V], valid until the next step.

        Raises:
            UsageError: Before the prefill, wrong shape or vocabulary, or no slot is left.
        """
        if self.step < 0:
            raise UsageError("decode comes after prefill", hint="session.prefill(input_ids)")
        tokens = tokens.reshape(-1, 1) if tokens.dim() == 1 else tokens
        self._check_tokens(tokens, 1)
        self._mask[:, self.position] = 1
        return self.advance(tokens)

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run [B, S] tokens into the next S slots, unchecked; `prefill` and `decode` check."""
        start, stop = self.position, self.position + tokens.shape[1]
        with torch.inference_mode():
            if start:
                self._mask[:, start] = 1
            inputs = self._inputs = {
                "input_ids": tokens,
                "attention_mask": self._mask,
                "position_ids": self._positions[:, start:stop],
                "cache_position": self._slots[start:stop],
                **self._cache.tensors,
            }
            if self._pasts:
                self._before = {name: _copy(inputs[name]) for name in self._pasts}
            outputs = self._outputs = self._run(inputs)
            self._cache.update(outputs)
            self.position = stop
            self.step += 1
            if self._names:
                self.debug_buffers = self._collect(self._names)
        return outputs["logits"]

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return tensors of the last step by name, not copied: valid until the next step.

        `past_*` tensors are at hand only where `debug` asked for them: a step overwrites them.
        """
        entries = self.engine.added_outputs
        values: dict[str, torch.Tensor] = {}
        derived = None
        for name in names:
            if name in self._before:
                values[name] = self._before[name]
            elif name in self._inputs and name not in self._cache.tensors:
                values[name] = self._inputs[name]
            elif name == "logits":
                values[name] = self._outputs[name]
            elif name in self.engine.past_of:
                values[name] = self._cache.tensors[self.engine.past_of[name]]
            elif entries[name].derived is None:
                values[name] = self._outputs[PREFIX + entries[name].node]
            else:
                derived = derived or self.engine.derive({**self._inputs, **self._cache.tensors}, self._outputs)
                values[name] = derived[entries[name].node]
        return values

    def _collect(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        copies: dict[int, torch.Tensor] = {}
        collected = {}
        for name, value in self.read(names).items():
            own = name in self._before
            collected[name] = value if own else copies.setdefault(id(value), _copy(value))
        return collected

    def _selected(self, debug: bool | Sequence[str]) -> list[str]:
        names = self.engine.debug_names
        if isinstance(debug, bool):
            return names if debug else []
        return select_names(self.engine, debug)

    def _check_tokens(self, tokens: torch.Tensor, new: int | None) -> None:
        expected = f"int64 [{self._batch_size}, {new or 'tokens'}] on the CPU"
        if (
            tokens.dim() != 2
            or tokens.shape[0] != self._batch_size
            or tokens.shape[1] != (new or max(tokens.shape[1], 1))
            or tokens.dtype != torch.int64
            or tokens.device.type != "cpu"
        ):
            got = f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)} on {tokens.device}"
            raise UsageError("the token ids do not fit the session", got=got, expected=expected)
        if self.position + tokens.shape[1] > self._length:
            raise UsageError(
                "the cache of the session is full",
                got=f"{self.position} slots in use and {tokens.shape[1]} more tokens",
                expected=f"at most {self._length}",
                hint="make the session longer, or lower --max-new-tokens",
            )
        low, high = int(tokens.min()), int(tokens.max())
        if self._vocab_size is not None and not 0 <= low <= high < self._vocab_size:
            raise UsageError(
                "token ids outside of the model's vocabulary",
                got=f"ids from {low} to {high}",
                expected=f"0 to {self._vocab_size - 1}",
                hint="use the tokenizer that belongs to the model: --tokenizer DIRECTORY",
            )


def select_names(engine: Engine, patterns: Sequence[str]) -> list[str]:
    """Return what of an engine's inputs and outputs `patterns` name, in the engine's order.

    Raises:
        UsageError: A pattern names a site of the program that was not built as an output.
        UnknownNameError: It names nothing at all.
    """
    wanted: set[str] = set()
    for pattern in patterns:
        found = {name for name in engine.debug_names if name == pattern}
        found = found or {e.name for e in engine.manifest.added_outputs if pattern in (e.site, e.node)}
        found = found or {
            name
            for name in engine.debug_names
            if matches(pattern, name)
            or (name in engine.added_outputs and matches(pattern, engine.added_outputs[name].site))
        }
        if not found and engine.sites.match(pattern):
            raise UsageError(
                f"{pattern!r} is in the program, but was not built as an output of the engine {engine.manifest.name!r}",
                expected=[entry.name for entry in engine.manifest.added_outputs] or "no added outputs",
                hint=f"glass build {engine.manifest.model.get('spec', 'MODEL')} --add-output '{pattern}'",
            )
        if not found:
            names = [*engine.debug_names, *(site.name for site in engine.sites)]
            raise UnknownNameError("output", pattern, names, hint=f"glass sites {engine.directory}")
        wanted |= found
    return [name for name in engine.debug_names if name in wanted]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # A tensor made in inference mode could not be used in autograd or changed in place outside of it.
    with torch.inference_mode(False):
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        return copy.copy_(tensor)
