"""Loads a model, runs it on given inputs or on another run's tokens, and records it; or counts the bytes of that.

What follows a different token differs for good reasons. A recording keeps the tokens that each row was given, without
padding: prompts, and what was generated but for the last token. Prompts that were run one after the other follow each
other in a row.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from glassengine.accelerators import require_device
from glassengine.capture.intake import Intake, Writer
from glassengine.capture.module_hooks import ModuleHooks
from glassengine.capture.record import own_directory, record
from glassengine.errors import IncomparableError, UsageError, logger
from glassengine.program.generation import LoadedModel
from glassengine.program.inputs.modules import stored_inputs
from glassengine.program.inputs.user_inputs import load_inputs, steps_of
from glassengine.program.loading.load import load_model
from glassengine.program.user_code.calls import forward_errors
from glassengine.recording.layout.description import Facts
from glassengine.recording.layout.layout import LeftOut
from glassengine.recording.reader import Recording
from glassengine.recording.source import TensorSource, open_source
from glassengine.recording.write.policy import RecordingPolicy, WhenBehind
from glassengine.results.recorded import RecordedTarget
from glassengine.stores.places import place


def record_target(
    target: str | Path | torch.nn.Module,
    path: str | Path | None,
    *,
    inputs: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    max_new_tokens: int | None = None,
    tokens_of: str | Path | None = None,
    sites: Sequence[str] | None = None,
    values: bool | Sequence[str] = True,
    steps: Collection[int] | None = None,
    byte_budget: int | None = None,
    overwrite: bool = False,
    durable: bool = True,
    spool_bytes: int | None = None,
    when_behind: WhenBehind = "wait",
    dtype: str = "auto",
    device: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    adapter: str | Path | None = None,
    then: Callable[[Path, Callable[[Writer], None]], None] | None = None,
) -> RecordedTarget:
    """Run a model under `torch.no_grad()` and record it.

    Args:
        target: As for `build`: Hugging Face directory or id, `file.py:factory`, `package.module:factory`, or a module.
        path: Directory of the recording; None runs the model and counts bytes only.
        inputs: Keyword arguments, one dict per step: `file.py:factory`, a tensor file, or the dicts themselves; None
            for the prompts of `tokens_of`.
        max_new_tokens: Generate greedily from each of `inputs` instead of one forward each.
        tokens_of: A recording whose tokens are forced on the model: at most as many as it has.
        sites: As for `record`.
        values: As for `record`.
        steps: As for `record`.
        byte_budget: As for `record`.
        overwrite: Replace an existing recording.
        durable: As for `record`.
        spool_bytes: As for `record`.
        when_behind: As for `record`.
        dtype: As for `build`.
        device: Where the model runs, e.g. "cuda": it and its inputs are moved there; None leaves it where it is.
        attn_implementation: As in transformers.
        trust_remote_code: Allow code that comes with the checkpoint to run.
        revision: Of a hub id.
        adapter: As for `build`.
        then: Called with the finished recording and a function that runs the model again, on the same tokens, for
            another writer: `measure_noise_floor` of `glassengine.commands` keeps in the recording what rounding does to
            each tensor.

    Raises:
        UsageError: The target or its inputs cannot be loaded, or the recording cannot be written.
        IncomparableError: `tokens_of` was made from other prompts.
        UnknownNameError: No site matches the patterns.
        BackendError: The device cannot be used.
        GlassError: Not everything could be written.
    """
    loaded = load_model(
        target,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        revision=revision,
        adapter=adapter,
    )
    known = None if tokens_of is None else KnownTokens(tokens_of)
    batches = _batches(inputs, known, loaded)
    forced = None if known is None else known.following(batches)
    if device is not None:
        require_device(device, f"recording {loaded.spec} on {device!r}")
        loaded.module.to(device)
        batches = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), batches)
        forced = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), forced)

    def observe(writer: Writer, forced: Sequence[Tensor] | None = None) -> None:
        policy = RecordingPolicy(sites=sites, values=values, steps=steps, byte_budget=byte_budget)
        hooks = ModuleHooks(loaded.module, Intake(writer, policy, 0, keeps_every_step=True), policy)
        hooks.attach()
        try:
            _run(loaded, batches, max_new_tokens, forced)
        finally:
            hooks.detach()
        hooks.finish()

    if path is None:
        counter = _Counter()
        observe(counter, forced)
        return counter.result()
    path = own_directory(place(path))
    buffers = {name: buffer.clone() for name, buffer in loaded.module.named_buffers()} if then is not None else {}
    with record(
        loaded.module,
        path,
        sites=sites,
        values=values,
        steps=steps,
        byte_budget=byte_budget,
        overwrite=overwrite,
        durable=durable,
        spool_bytes=spool_bytes,
        when_behind=when_behind,
        metadata={**loaded.metadata, "model_fingerprint": loaded.metadata["fingerprint"]},
    ):
        made = _run(loaded, batches, max_new_tokens, forced)
    if then is not None:

        def run_again(writer: Writer) -> None:
            # A module may count its calls, or keep a state: every run begins as the recorded one did.
            for name, buffer in loaded.module.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])
            observe(writer, [tokens[:, :-1] for tokens in made])

        then(path, run_again)
    opened = Recording.open(path)
    total = sum(entry.nbytes for entry in opened.entries)
    return RecordedTarget(str(path), len(opened.steps), len(opened.entries), len(opened.left_out), total)


def _batches(
    inputs: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    known: KnownTokens | None,
    loaded: LoadedModel,
) -> Sequence[Mapping[str, Any]]:
    if inputs is None:
        if known is None and loaded.stored is not None:
            logger.warning("recorded on inputs that are made up, as glass check does; --inputs FILE gives others")
            return list(stored_inputs(loaded.module, loaded.stored))
        if known is None:
            raise UsageError("the model needs inputs", hint="--inputs file.py:factory, or a tensor file")
        return [known.prompts()]
    if isinstance(inputs, (str, Path)):
        return load_inputs(str(inputs), loaded.input_names)
    return steps_of(inputs, "inputs", loaded.input_names)


def _run(
    loaded: LoadedModel,
    batches: Sequence[Mapping[str, Any]],
    max_new_tokens: int | None,
    forced: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Run every batch, generating the tokens of `forced` [B, N]; return what was generated of each, [B, N].

    The token behind the last forced one is the model's own choice: nothing is made of it any more.
    """
    module: Any = loaded.module
    what = "the model raised on its inputs, in"
    generates = max_new_tokens is not None or (forced is not None and any(tokens.shape[1] for tokens in forced))
    if generates and not hasattr(module, "generate"):
        raise UsageError("only a model that generates can", got=loaded.spec, hint="leave out --max-new-tokens")
    made: list[Tensor] = []
    with torch.no_grad():
        for number, batch in enumerate(batches):
            if not generates:
                with forward_errors(module, what):
                    _call(module, batch)
                made.append(torch.empty((0, 0), dtype=torch.int64))
                continue
            options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
            config = getattr(module, "config", None)
            continues = "input_ids" in batch and not getattr(config, "is_encoder_decoder", False)
            size = torch.as_tensor(batch["input_ids"]).shape[1] if continues else 0
            if forced is not None:
                tokens = forced[number]
                num = tokens.shape[1] + 1
                # What ended one of the runs does not end the other: both make the same steps.
                options |= {"max_new_tokens": min(num, max_new_tokens or num), "eos_token_id": None}
                options["logits_processor"] = [_Forced(tokens, size)]
            with forward_errors(module, what):
                made.append(module.generate(**batch, **options)[:, size:])
    return made


def _call(module: torch.nn.Module, batch: Mapping[str, Any]) -> None:
    try:
        module(**batch)
    except TypeError as error:
        try:
            inspect.signature(module.forward).bind(**batch)
        except TypeError as wrong:
            got = f"{type(module).__name__}.forward {wrong}"
            expected = ", ".join(inspect.signature(module.forward).parameters)
            raise UsageError("the inputs are not the arguments of the model", got=got, expected=expected) from error
        raise


@dataclass(frozen=True)
class _Forced:
    """Makes `generate` choose tokens [B, N] behind prompts of `size` tokens."""

    tokens: Tensor
    size: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - self.size
        if place >= self.tokens.shape[1]:
            return scores
        return torch.full_like(scores, -torch.inf).scatter(1, self.tokens[:, place, None], 0.0)


class _Counter:
    """Takes the place of a writer and counts."""

    def __init__(self) -> None:
        self._num: Counter[str] = Counter()

    def take_repeat(self, site: str, step: int, tensor: Tensor, rank: int) -> bool:
        return False

    def write(self, site: str, step: int, tensor: Tensor, *, rank: int = 0, **facts: Unpack[Facts]) -> None:
        self._num["tensors"] += 1
        self._num["bytes"] += tensor.nbytes

    def measure(self, site: str, step: int, tensor: Tensor, *, rank: int, reason: str) -> bool:
        self._num["left_out"] += 1
        return True

    def leave_out(self, item: LeftOut) -> None:
        self._num["left_out"] += 1

    def hold(self, step: int, *, token_ids: Sequence[Sequence[int]] = ()) -> None:
        pass

    def commit(self, step: int, *, token_ids: Sequence[Sequence[int]] = (), stopped: str | None = None) -> None:
        self._num["steps"] += 1

    def result(self) -> RecordedTarget:
        num = self._num
        return RecordedTarget(None, num["steps"], num["tensors"], num["left_out"], num["bytes"])


Rows = list[list[int]]


class KnownTokens:
    """The tokens of a recording.

    Args:
        path: Of the recording, of a model or of an engine.
    """

    def __init__(self, path: str | Path) -> None:
        self._source = open_source(path)
        self._rows: Rows = self._source.metadata.get("token_ids") or []
        if not self._rows:
            raise UsageError("the recording has no tokens", got=str(path), expected="one of a language model")

    def prompts(self) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask` [B, S] int64 of the prompts, left-padded with 0."""
        lengths = prompt_lengths(self._source)
        if lengths is None or len(lengths) != len(self._rows):
            raise UsageError(
                "the recording does not say where its prompts end",
                got=str(self._source.path),
                hint="give what it was made from: --inputs FILE",
            )
        ids = torch.zeros((len(lengths), max(lengths)), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (tokens, length) in enumerate(zip(self._rows, lengths, strict=True)):
            ids[row, max(lengths) - length :] = torch.tensor(tokens[:length])
            mask[row, max(lengths) - length :] = 1
        return {"input_ids": ids, "attention_mask": mask}

    def following(self, batches: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Return what was generated from each batch of prompts, but for the last token: [B, N] int64, N from 0 on."""
        prompts = [_prompts(batch) for batch in batches]
        found = []
        at = [0] * len(self._rows)
        for number, rows in enumerate(prompts):
            if not self._have(rows, at):
                raise IncomparableError(
                    "the recording was made from other prompts",
                    got=f"{self._source.path}: not those of input {number}",
                    expected="the inputs that it was made from; padding has an attention_mask of 0",
                    hint="leave out --inputs: the recording has its prompts",
                )
            behind = [place + len(tokens) for place, tokens in zip(at, rows, strict=False)]
            at = [*behind, *at[len(behind) :]]
            num = self._num_until(prompts[number + 1] if number + 1 < len(prompts) else None, len(rows), at)
            made = [self._rows[row][at[row] : at[row] + num] for row in range(len(rows))]
            found.append(torch.tensor(made, dtype=torch.int64).view(len(rows), num))
            at = [place + num for place in at]
        return found

    def _have(self, prompts: Rows, at: Sequence[int]) -> bool:
        if len(prompts) > len(self._rows):
            return False
        return all(self._rows[row][at[row] : at[row] + len(tokens)] == tokens for row, tokens in enumerate(prompts))

    def _num_until(self, prompts: Rows | None, num_rows: int, at: Sequence[int]) -> int:
        """Return the number of tokens until the next prompts, or until the rows end."""
        left = min(len(self._rows[row]) - at[row] for row in range(num_rows))
        if prompts is None:
            return left
        return next((num for num in range(left) if self._have(prompts, [place + num for place in at])), left)


def prompt_lengths(source: TensorSource) -> list[int] | None:
    """Return the number of tokens of each prompt, as a recording says or as its first inputs show."""
    known: list[int] | None = source.metadata.get("prompt_lengths")
    if known:
        return known
    entries = {entry.site.removeprefix(".:in."): entry for entry in source.entries if entry.step == 0}
    ids, mask = entries.get("input_ids", entries.get(".:in[0]")), entries.get("attention_mask")
    if mask is not None and ids is not None and mask.shape == ids.shape:
        return [int(row) for row in source.tensor(mask).sum(-1)]
    if ids is not None and len(ids.shape) == 1 and len(source.metadata.get("token_ids") or ()) == 1:
        return [ids.shape[0]]
    return None if ids is None or len(ids.shape) != 2 else [ids.shape[1]] * ids.shape[0]


def _prompts(batch: Mapping[str, Any]) -> Rows:
    """Return the tokens of a batch without padding."""
    if "input_ids" not in batch:
        raise UsageError("the inputs have no tokens", got=", ".join(batch), expected="input_ids")
    ids = torch.as_tensor(batch["input_ids"])
    mask = torch.as_tensor(batch.get("attention_mask", torch.ones_like(ids))).bool()
    return [[int(token) for token in row[valid]] for row, valid in zip(ids, mask, strict=True)]
