"""Generate text on an engine: tokenize, prefill, decode, stop; stream, observe and record on the way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from glassengine.engine.prompts import as_rows, choose_tokenizer, encode, pad_left, read_input_ids
from glassengine.engine.record import SessionRecorder
from glassengine.engine.sampling import GenerationSettings, make_chooser
from glassengine.errors import UsageError
from glassengine.results import Result

if TYPE_CHECKING:
    from glassengine.engine.engine import Engine
    from glassengine.engine.session import Session

StepCallback = Callable[["Session"], None]
TextCallback = Callable[[str], None]


@dataclass(frozen=True)
class Generation(Result):
    """What was generated.

    Attributes:
        prompts: Prompts as text; empty where token ids were given.
        prompt_token_ids: Token ids of each prompt, without padding.
        token_ids: Generated token ids of each sequence, its end token included.
        texts: Generated text of each sequence without special tokens; None without a tokenizer.
        num_steps: Steps run, the prefill included.
        prefill_s: Seconds of the prefill.
        decode_s: Seconds of all decode steps.
        recording: Directory of the recording, if one was made.
    """

    prompts: tuple[str, ...]
    prompt_token_ids: tuple[tuple[int, ...], ...]
    token_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...] | None
    num_steps: int
    prefill_s: float
    decode_s: float
    recording: str | None = None


def generate(
    engine: Engine,
    prompts: str | Sequence[str] | None,
    *,
    input_ids: str | Path | torch.Tensor | Sequence[Sequence[int]] | None,
    tokenizer: str | Path | None,
    max_new_tokens: int | None,
    debug: bool | Sequence[str],
    on_step: StepCallback | None,
    on_text: TextCallback | None,
    record: str | Path | None,
    overwrite: bool,
) -> Generation:
    """Generate greedily: the tokens of `transformers.generate(do_sample=False)`.

    Args:
        engine: The engine.
        prompts: One text or several; or None, and `input_ids`.
        input_ids: Token ids: a file (.json, .npz, .pt, .safetensors), a tensor, or one list per sequence, which may
            differ in length.
        tokenizer: Directory of a tokenizer; None takes the engine's own.
        max_new_tokens: Most tokens to generate; None takes generation_config.json, else 20.
        debug: As in `Session`.
        on_step: Called after each step with the session.
        on_text: Called with each new piece of text; for a single prompt.
        record: Directory in which to record every added output and the logits of every step.
        overwrite: Replace a recording that exists.

    Raises:
        UsageError: The prompt or tokenizer does not fit the engine, or the recording cannot be written.
    """
    if (prompts is None) == (input_ids is None):
        raise UsageError(
            "nothing to generate from" if prompts is None else "text and token ids were both given",
            hint="--input-text TEXT, or --input-ids FILE",
        )
    settings = GenerationSettings.read(engine.directory)
    texts = () if prompts is None else (prompts,) if isinstance(prompts, str) else tuple(prompts)
    decoder = None
    if texts or tokenizer is not None or engine.manifest.tokenizer:
        decoder = choose_tokenizer(engine, tokenizer)
    if texts:
        rows = encode(decoder, texts)
    else:
        is_file = isinstance(input_ids, (str, Path))
        rows = read_input_ids(Path(input_ids)) if is_file else as_rows(input_ids, "input_ids")  # type: ignore[arg-type]
    budget = settings.max_new_tokens if max_new_tokens is None else max_new_tokens
    if budget < 1:
        raise UsageError("nothing would be generated", got=f"--max-new-tokens {budget}", expected="at least 1")
    ids, mask = pad_left(rows, settings.pad_token_id)
    session = engine.session(len(rows), ids.shape[1] + budget, debug=debug)
    with _recorder(record, session, rows, overwrite) as recorder:
        stream = _TextStream(decoder, on_text) if on_text is not None and decoder is not None else None
        made, prefill_s, decode_s = _loop(session, ids, mask, budget, settings, stream, [recorder, on_step])
    return Generation(
        prompts=texts,
        prompt_token_ids=tuple(tuple(row) for row in rows),
        token_ids=made,
        texts=None
        if decoder is None
        else tuple(decoder.batch_decode([list(t) for t in made], skip_special_tokens=True)),
        num_steps=session.step + 1,
        prefill_s=prefill_s,
        decode_s=decode_s,
        recording=None if record is None else str(record),
    )


@contextlib.contextmanager
def _recorder(
    record: str | Path | None, session: Session, rows: Sequence[Sequence[int]], overwrite: bool
) -> Iterator[SessionRecorder | None]:
    if record is None:
        yield None
        return
    with SessionRecorder(record, session, rows, overwrite=overwrite) as recorder:
        yield recorder


def _loop(
    session: Session,
    ids: torch.Tensor,
    mask: torch.Tensor,
    budget: int,
    settings: GenerationSettings,
    stream: _TextStream | None,
    observers: Sequence[Callable[[Session], None] | None],
) -> tuple[tuple[tuple[int, ...], ...], float, float]:
    """Return (generated tokens per sequence, seconds of the prefill, seconds of the decode steps)."""
    watching = [observer for observer in observers if observer is not None]
    batch, prompt = ids.shape
    choose = make_chooser(settings, prompt)
    history = torch.cat([ids, torch.zeros((batch, budget), dtype=torch.int64)], dim=1)
    made: list[list[int]] = [[] for _ in range(batch)]
    open_rows = set(range(batch))
    ends = frozenset(settings.eos_token_ids)
    tokens = ids

    start = time.perf_counter()
    logits = session.prefill(ids, mask)
    prefilled = time.perf_counter()
    for index in range(budget):
        if index:
            logits = session.advance(tokens)
        for observe in watching:
            observe(session)
        with torch.inference_mode():
            tokens = choose(history[:, : prompt + index], logits[:, -1])
            chosen = tokens.tolist()
            for row, token in enumerate(chosen):
                if row in open_rows:
                    made[row].append(token)
                    if token in ends:
                        open_rows.discard(row)
                else:
                    tokens[row] = settings.pad_token_id
            tokens = tokens.reshape(-1, 1)
            history[:, prompt + index : prompt + index + 1] = tokens
        if stream is not None:
            stream.put(made[0])
        if not open_rows:
            break
    if stream is not None:
        stream.end(made[0])
    return tuple(tuple(row) for row in made), prefilled - start, time.perf_counter() - prefilled


class _TextStream:
    """Turns tokens into pieces of text that never have to be taken back."""

    def __init__(self, tokenizer: Any, on_text: TextCallback) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._sent = ""

    def put(self, tokens: list[int]) -> None:
        """Send what is certain: an unfinished character or trailing space may still change."""
        text = self._text(tokens)
        if not text.endswith("\ufffd"):
            self._send(text.rstrip(" "))

    def end(self, tokens: list[int]) -> None:
        """Send the rest."""
        self._send(self._text(tokens))

    def _text(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _send(self, text: str) -> None:
        if len(text) > len(self._sent) and text.startswith(self._sent):
            self._on_text(text[len(self._sent) :])
            self._sent = text
