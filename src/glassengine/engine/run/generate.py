"""Generate on an engine: tokenize, prefill, decode, stop; stream, observe and record on the way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from glassengine.engine.prompts import Request, pad_left
from glassengine.engine.run.forward import Encode, encoded, image_constants, read_request
from glassengine.engine.run.sampling import Sampler, read_settings
from glassengine.engine.session.checks import check_prompts, require_generating
from glassengine.engine.session.debug_buffers import automatic_chunk
from glassengine.engine.session.loaded import LoadedEngine
from glassengine.engine.session.session import Session
from glassengine.engine.tokenizing import TextCallback, TextStream, decode
from glassengine.errors import UsageError
from glassengine.results.engines import Generation

StepCallback = Callable[[Session], None]


Record = Callable[..., contextlib.AbstractContextManager[StepCallback]]
"""`Engine.recorder`."""


def generate(
    engine: LoadedEngine,
    request: Request,
    *,
    encoder: LoadedEngine | None,
    encode: Encode,
    recorder: Record,
    generation_config: Any,
    settings: Mapping[str, Any],
    seed: int | None,
    prefill_chunk: int | None,
    debug: bool | Sequence[str],
    keep_steps: int,
    on_step: StepCallback | None,
    on_text: TextCallback | None,
    record: str | Path | None,
    overwrite: bool,
) -> Generation:
    """Generate; `Engine.generate` describes the arguments.

    `encoder` and `encode` are those of the engine, if it has one; `recorder` makes what records each step.

    Raises:
        UsageError: Something does not fit the engine.
        UnknownNameError: No setting has this name.
    """
    manifest = engine.manifest
    require_generating(manifest)
    budget = settings.get("max_new_tokens")
    if isinstance(budget, int) and budget < 1:
        raise _nothing(f"--max-new-tokens {budget}")
    chosen = read_settings(
        engine.directory,
        generation_config,
        settings,
        max_length=manifest.max_seq_len or 1,
        vocab_size=manifest.vocab_size,
    )
    num_each = chosen.config.num_return_sequences or 1
    read = read_request(engine, request).repeated(num_each)
    rows, constants = read.rows, None
    if encoder is not None:
        rows, constants = encoded(manifest, encoder.manifest, encode, read, request.inputs, chosen.config)
    if on_text is not None and len(rows) != 1:
        raise UsageError(
            "text is streamed for a single sequence", got=f"{len(rows)} sequences", hint="leave on_text out"
        )
    ids, mask = pad_left(rows, chosen.pad_token_id)
    sampler = chosen.sampler(ids, mask, seed=seed, tokenizer=read.tokenizer)
    length = ids.shape[1] + max(sampler.max_new_tokens, 1)
    check_prompts(manifest, ids, mask, length=length)
    if sampler.max_new_tokens < 1:
        raise _nothing(f"a prompt of {ids.shape[1]} tokens and max_length={chosen.config.max_length}")
    if engine.takes_images:
        constants = image_constants(manifest, encode, ids, mask, read.pixel_values, num_each)
    session = Session(engine, len(rows), length, debug=debug, keep_steps=keep_steps, constants=constants)
    with contextlib.nullcontext() if record is None else recorder(record, session, rows, overwrite=overwrite) as own:
        stream = TextStream(read.tokenizer, on_text) if on_text is not None and read.tokenizer is not None else None
        observers = [observer for observer in (own, on_step) if observer is not None]
        made, prefill_s, decode_s = _loop(session, ids, mask, sampler, prefill_chunk, stream, observers)
    texts = None
    if read.tokenizer is not None:
        texts = tuple(decode(read.tokenizer, row) for row in made)
    return Generation(
        prompts=read.texts,
        prompt_token_ids=tuple(tuple(row) for row in read.rows),
        token_ids=made,
        texts=texts,
        num_steps=session.step + 1,
        prefill_s=prefill_s,
        decode_s=decode_s,
        recording=None if record is None else str(record),
        seed=sampler.seed,
    )


def _nothing(got: str) -> UsageError:
    return UsageError("nothing would be generated", got=got, expected="at least 1 new token", hint="--max-new-tokens N")


def _loop(
    session: Session,
    ids: torch.Tensor,
    mask: torch.Tensor,
    sampler: Sampler,
    chunk: int | None,
    stream: TextStream | None,
    observers: Sequence[Callable[[Session], None]],
) -> tuple[tuple[tuple[int, ...], ...], float, float]:
    """Return (generated tokens per sequence, seconds of the prefill, seconds of the decode steps)."""
    batch, prompt = ids.shape
    history = torch.cat([ids, torch.zeros((batch, sampler.max_new_tokens), dtype=torch.int64)], dim=1)
    stops = torch.full((batch,), prompt)
    open_rows = torch.ones(batch, dtype=torch.bool)
    itemsize = getattr(torch, session.engine.manifest.dtype).itemsize
    if chunk is None and not session.in_one_piece:
        chunk = automatic_chunk(batch, session.engine.manifest.vocab_size, itemsize)

    def observe() -> None:
        for observer in observers:
            observer(session)

    start = time.perf_counter()
    logits = session.prefill(ids, mask, chunk=chunk, keep=bool(observers), on_step=observe)
    prefilled = time.perf_counter()
    for stop in range(prompt + 1, history.shape[1] + 1):
        observe()
        with torch.inference_mode():
            tokens = sampler.choose(history[:, : stop - 1], logits[:, -1])
            history[:, stop - 1] = torch.where(open_rows, tokens, sampler.pad_token_id)
            stops += open_rows
            open_rows &= ~sampler.ended(history[:, :stop])
            going_on = bool(open_rows.any()) and stop < history.shape[1]
        if stream is not None:
            stream.put(history[0, prompt : stops[0]].tolist())
        if not going_on:
            break
        logits = session.advance(history[:, stop - 1 : stop])
    if stream is not None:
        stream.end(history[0, prompt : stops[0]].tolist())
    made = tuple(tuple(history[row, prompt:stop].tolist()) for row, stop in enumerate(stops.tolist()))
    return made, prefilled - start, time.perf_counter() - prefilled
