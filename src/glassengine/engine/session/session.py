"""A generation in progress: prefill, then decode steps, over a static cache.

Slots of the cache are filled from left to right; a shorter prompt of a batch is padded on its left. Everything whose
size is that of the cache is allocated once; a decode step writes one column of the mask and passes views.

Shape legend: B batch, S new tokens, T cache length, V vocabulary, H key/value heads, D head size.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from glassengine import spans
from glassengine.accelerators import require_device
from glassengine.engine.manifest import Manifest
from glassengine.engine.session.checks import (
    InputRow,
    constant_rows,
    mask_row,
    refuse,
    render_tensors,
    require_generating,
    size_rows,
    token_row,
)
from glassengine.engine.session.debug_buffers import DebugBuffers, PieceOutputs, select_names
from glassengine.engine.session.images import PromptImages
from glassengine.engine.session.loaded import LoadedEngine, Step
from glassengine.errors import UsageError, logger
from glassengine.program.kinds.image_text import INDEX
from glassengine.program.representation.kept_logits import KEPT


class Session:
    """One batch of sequences on an engine.

    Args:
        engine: A loaded engine of kind "causal_lm".
        batch_size: Number of sequences B.
        length: Cache slots T: tokens of the longest prompt and those to generate.
        debug: True keeps every input and output of each step in `debug_buffers`; names or patterns keep those alone;
            False costs nothing.
        keep_steps: How many of the last steps `debug_history` keeps.
        constants: Inputs that are the same in every step, of `engine.encode`; for an encoder-decoder, or with images.
            With images also `image_rows` [B, S], where their features are not those of the image tokens of the prompts
            in order; see `program.kinds.image_text`.

    Attributes:
        step: The last step that ran: 0 after the prefill, -1 before.
        one_token: Whether a step has one token, also those of a prompt: the engine is that of a recurrent model.
        position: Cache slots in use.
        debug_buffers: Of the last step, in the order of the documents: input_ids, logits, position_ids, attention_mask,
            cache_position, past_key_0 (before the step), past_value_0, present_key_0, present_value_0, ..., then the
            added outputs by alias or site; an end of a site that names one of them finds it, too. Copies, safe to keep.
        debug_history: (step, its debug buffers) of the last `keep_steps` steps, oldest first; older ones are dropped.

    Raises:
        UsageError: The engine was built for a smaller batch or shorter sequences, or has no cache; or steps are to be
            kept without saying which tensors.
        UnknownNameError: A pattern of `debug` names nothing that the engine returns.
    """

    def __init__(
        self,
        engine: LoadedEngine,
        batch_size: int,
        length: int,
        *,
        debug: bool | Sequence[str] = False,
        keep_steps: int = 0,
        constants: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        manifest = engine.manifest
        require_generating(manifest)
        self._images = PromptImages(manifest, constants) if engine.takes_images else None
        self._constants = dict(constants or {}) if self._images is None else self._images.constants
        rows = constant_rows(manifest, engine.constant_inputs, self._constants)
        refuse(manifest.name, [*size_rows(manifest, batch_size, length), *rows])
        if keep_steps < 0 or (keep_steps and debug is False):
            raise UsageError(
                "steps can be kept only of tensors that are observed",
                got=f"keep_steps={keep_steps}, debug={debug}",
                hint="debug=True, or names or patterns of tensors (--debug PATTERN)",
            )
        # Sizes of 1 were never traced: export assumes at least 2 slots.
        length = max(length, 2)
        self.engine = engine
        self.step = -1
        self.one_token = next(entry for entry in manifest.inputs if entry.name == "input_ids").shape[1] == 1
        self.position = 0
        self.debug_buffers = DebugBuffers({}, {})
        self.debug_history: deque[tuple[int, DebugBuffers]] = deque(maxlen=keep_steps)
        self._names: list[str] = []
        if debug is not False:
            self._names = engine.debug_names if debug is True else select_names(engine, debug)
        self._pasts = [name for name in manifest.caches if name in self._names]
        self._batch_size, self._length = batch_size, length
        self._cache = KVCache(manifest, batch_size, length)
        self._mask = torch.zeros((batch_size, length), dtype=torch.int64)
        self._positions = torch.zeros((batch_size, length), dtype=torch.int64)
        self._slots = torch.arange(length)
        self._last_alone = False
        self._inputs: dict[str, torch.Tensor] = {}
        self._outputs: Mapping[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._run = engine.runner(self, batch_size, length)

    def prefill(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        chunk: int | None = None,
        keep: bool = True,
        on_step: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Run the prompts: step 0, in however many pieces; or one step a token, where the engine takes no more.

        Args:
            input_ids: [B, S] int64; padding on the left.
            attention_mask: [B, S], 1 for tokens and 0 for padding; None means no padding.
            chunk: Most tokens of a piece; None runs the prompts in one.
            keep: Keep the outputs of the whole step for `read`, as `debug` does. Without, a prefill in pieces takes no
                more memory than one piece, and only the logits of the last token are computed.
            on_step: Called between the steps of prompts that run a token a step.

        Returns:
            Logits [B, S, V] in the engine's dtype, valid until the next step; of the last piece or token alone where
            the prompts ran in several. Without `keep` [B, 1, V] where `engine.makes_kept_logits`.

        Raises:
            UsageError: Wrong shape, dtype or device, tokens outside of the vocabulary, padding on the right, or a
                second prefill.
        """
        if chunk is not None and chunk < 1:
            raise UsageError("invalid --prefill-chunk", got=str(chunk), expected="at least 1 token")
        if chunk is not None and self.in_one_piece:
            raise UsageError(
                "tokens of an image see each other, and cannot run in pieces",
                got=f"pieces of {chunk} tokens",
                hint="leave out --prefill-chunk",
            )
        mask = self._begin(input_ids, attention_mask)
        keep = keep or bool(self._names)
        self._last_alone = not keep
        if not self.one_token and chunk is not None and chunk < input_ids.shape[1]:
            return self._prefill_pieces(input_ids, chunk, keep)
        steps = self._prompt_steps(input_ids, mask)
        logits = next(steps)
        for _ in range(1, input_ids.shape[1] if self.one_token else 1):
            if on_step is not None:
                on_step()
            logits = next(steps)
        return logits

    @property
    def in_one_piece(self) -> bool:
        """Whether the prompts must run in one piece: they have images whose tokens see each other."""
        return self._images is not None and self._images.in_one_piece

    def prefill_steps(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> Iterator[torch.Tensor]:
        """Run the prompts as `prefill` does, yielding logits after each step: one, or as many as there are tokens.

        Args:
            input_ids: As for `prefill`.
            attention_mask: As for `prefill`.

        Raises:
            UsageError: As `prefill`.
        """
        mask = self._begin(input_ids, attention_mask)
        return self._prompt_steps(input_ids, mask)

    def _begin(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Check the prompts; lay out mask and positions. Return the mask of the prompts, [B, S]."""
        if self.step >= 0:
            raise UsageError("the session is prefilled already", got=f"step {self.step}", hint="make a new session")
        rows = [self._token_row(input_ids, None)]
        if attention_mask is not None and not rows[0].problem:
            rows.append(mask_row(attention_mask, input_ids))
        if self._images is not None and not any(row.problem for row in rows):
            rows += self._images.begin(input_ids, attention_mask)
        refuse(self.engine.manifest.name, rows)
        new = input_ids.shape[1]
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(torch.int64)
        if not self.one_token:
            self._mask[:, :new] = mask
        real = (mask.cumsum(-1) - 1).clamp_(min=0)
        self._positions[:, :new] = real
        # From here on every slot holds a token.
        self._positions[:, new:] = real[:, -1:] + torch.arange(1, self._length - new + 1)
        return mask

    def _prompt_steps(self, input_ids: torch.Tensor, mask: torch.Tensor) -> Iterator[torch.Tensor]:
        """Run the prompts whole, or a token a step: padding as well, which leaves no trace in the states."""
        if not self.one_token:
            yield self._step(input_ids)
            return
        for tokens, holds_token in zip(torch.split(input_ids, 1, dim=1), mask.unbind(1), strict=True):
            # An empty slot holds no token.
            self._mask[:, self.position] = holds_token
            yield self._step(tokens)

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
            raise UsageError("call prefill() before decode()", hint="session.prefill(input_ids)")
        if isinstance(tokens, torch.Tensor) and tokens.dim() == 1:
            tokens = tokens.reshape(-1, 1)
        refuse(self.engine.manifest.name, [self._token_row(tokens, 1)])
        return self.advance(tokens)

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run [B, 1] tokens into the next slot, unchecked; `decode` checks."""
        self._mask[:, self.position] = 1
        return self._step(tokens)

    def _step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run [B, S] tokens into the next S slots, whose mask is set already."""
        with torch.inference_mode():
            self._keep_pasts()
            outputs = self._outputs = self._execute(tokens)
            self._complete_step()
        return outputs["logits"]

    def _prefill_pieces(self, input_ids: torch.Tensor, chunk: int, keep: bool) -> torch.Tensor:
        kept: list[Mapping[str, torch.Tensor]] = []
        with torch.inference_mode():
            self._keep_pasts()
            for piece in torch.split(input_ids, chunk, dim=1):
                outputs = self._execute(piece)
                if keep:
                    kept.append(outputs)
            # Observers see the inputs of the whole prompt.
            self._inputs = self._step_inputs(input_ids, 0)
            entries = {entry.name: entry.node for entry in self.engine.manifest.outputs}
            self._outputs = PieceOutputs(kept, self._batch_size, self.engine.sites, entries)
            self._complete_step()
        return outputs["logits"]

    def _step_inputs(self, tokens: torch.Tensor, start: int) -> dict[str, torch.Tensor]:
        stop = start + tokens.shape[1]
        return {
            "input_ids": tokens,
            "attention_mask": self._mask,
            "position_ids": self._positions[:, start:stop],
            "cache_position": self._slots[start:stop],
            **({KEPT: self._kept(stop - start)} if self.engine.makes_kept_logits else {}),
            **self._constants,
            **({} if self._images is None else {INDEX: self._images.index(start, stop, self._batch_size)}),
            **self._cache.tensors,
        }

    def _kept(self, new: int) -> torch.Tensor:
        return self._slots[new - 1 if self._last_alone else 0 : new]

    def _execute(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the executable once; the tokens' slots of the mask are set already."""
        inputs = self._inputs = self._step_inputs(tokens, self.position)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("inputs of step %d:\n%s", self.step + 1, render_tensors(inputs))
        outputs: dict[str, torch.Tensor] = self._run(inputs)
        self._cache.update(outputs)
        self.position += tokens.shape[1]
        return outputs

    def _keep_pasts(self) -> None:
        """A step overwrites the caches, so requested `past_*` are copied before it."""
        if self._pasts:
            self._before = {name: _copy(self._cache.tensors[name].cpu()) for name in self._pasts}

    def _complete_step(self) -> None:
        self.step += 1
        if self._names:
            self.debug_buffers = self._collect(self._names)
            self.debug_history.append((self.step, self.debug_buffers))
        spans.step_ended()

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return tensors of the last step by name, not copied: valid until the next step.

        `past_*` tensors are available only if `debug` names them: a step overwrites them.
        """
        values: dict[str, torch.Tensor] = {}
        added: list[str] = []
        for name in names:
            if name in self._before:
                values[name] = self._before[name]
            elif name in self._inputs and name not in self._cache.tensors:
                values[name] = self._inputs[name]
            elif name == "logits":
                values[name] = self._outputs[name]
            elif name in self.engine.past_of:
                values[name] = self._cache.tensors[self.engine.past_of[name]].cpu()
            else:
                added.append(name)
        return values | self.engine.debug_values(added, self._outputs, self._whole_step)

    def _whole_step(self) -> Step:
        outputs = self._outputs.joinable() if isinstance(self._outputs, PieceOutputs) else self._outputs
        caches = {name: tensor.cpu() for name, tensor in self._cache.tensors.items()}
        return {**self._inputs, **caches}, outputs

    def _collect(self, names: Iterable[str]) -> DebugBuffers:
        copies: dict[int, torch.Tensor] = {}
        collected = {}
        for name, value in self.read(names).items():
            own = name in self._before
            collected[name] = value if own else copies.setdefault(id(value), _copy(value))
        return DebugBuffers(collected, self.engine.added_outputs)

    def _token_row(self, tokens: torch.Tensor, new: int | None) -> InputRow:
        room = self._length - self.position
        name = "tokens" if new else "input_ids"
        return token_row(self.engine.manifest, tokens, batch_size=self._batch_size, room=room, new=new, name=name)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # A tensor made in inference mode could not be used in autograd or changed in place outside of it.
    with torch.inference_mode(False):
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        return copy.copy_(tensor)


class KVCache:
    """Cache tensors [B, H, T, D] by `past_*` name, allocated once.

    A back-end that mutates writes into them; a functional one returns new tensors, which then take their place.

    Attributes:
        tensors: What the next step reads.
    """

    def __init__(self, manifest: Manifest, batch_size: int, length: int) -> None:
        elsewhere = f"to run it here: glass build {manifest.model.get('spec')} --backend inductor --device cpu"
        require_device(manifest.device, f"the engine {manifest.name!r}", hint=elsewhere)
        self._presents = manifest.caches
        self._mutated = manifest.kv == "mutated"
        entries = {entry.name: entry for entry in manifest.inputs if entry.name in manifest.caches}
        sizes = {"batch": batch_size, "cache": length}
        self.tensors: dict[str, torch.Tensor] = {
            name: torch.zeros(
                [size if isinstance(size, int) else sizes[size] for size in entry.shape],
                dtype=getattr(torch, entry.dtype),
                device=manifest.device,
            )
            for name, entry in entries.items()
        }

    def update(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Take over the caches that a step returned."""
        if not self._mutated:
            for past, present in self._presents.items():
                self.tensors[past] = outputs[present]
