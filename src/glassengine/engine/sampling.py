"""How the next token is chosen: greedily, with the penalties of generation_config.json, as transformers does.

Shape legend: B batch, S tokens so far, V vocabulary.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glassengine.errors import CorruptError

logger = logging.getLogger("glassengine")

FILE = "generation_config.json"

DEFAULT_MAX_NEW_TOKENS = 20
"""What transformers generates when nothing says how much."""

# Settings that change greedy decoding in transformers, with the value that means "off".
_PENALTIES = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
}
_UNSUPPORTED = {
    "num_beams": 1,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": None,
    "min_length": 0,
    "sequence_bias": None,
    "watermarking_config": None,
}


@dataclass(frozen=True)
class GenerationSettings:
    """What generation_config.json says.

    Attributes:
        eos_token_ids: Tokens that end a sequence.
        pad_token_id: What a finished sequence is fed.
        max_new_tokens: Where nothing else says how many.
        penalties: Settings of `transformers.GenerationConfig` that change greedy decoding.
    """

    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    max_new_tokens: int
    penalties: dict[str, Any]

    @classmethod
    def read(cls, directory: Path) -> GenerationSettings:
        """Read the file in an engine; all defaults where there is none.

        Raises:
            CorruptError: It is no JSON object.
        """
        path = directory / FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            eos = data.get("eos_token_id")
            ends = () if eos is None else tuple(int(e) for e in (eos if isinstance(eos, list) else [eos]))
            pad = data.get("pad_token_id")
            length = int(data.get("max_new_tokens") or DEFAULT_MAX_NEW_TOKENS)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CorruptError(f"{FILE} cannot be read", got=f"{type(error).__name__}: {error}") from error
        for key, off in _UNSUPPORTED.items():
            if data.get(key, off) not in (off, None):
                logger.warning("%s: %s = %s is not applied; decoding is greedy", FILE, key, data[key])
        penalties = {k: data[k] for k, off in _PENALTIES.items() if data.get(k) is not None and data[k] != off}
        return cls(ends, int(pad) if pad is not None else (ends[0] if ends else 0), length, penalties)


def make_chooser(
    settings: GenerationSettings, prompt_length: int
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function (token ids [B, S], logits [B, V]) -> next tokens [B].

    Args:
        settings: Of the engine.
        prompt_length: Tokens of the padded prompts.
    """
    processors = _processors(settings, prompt_length)

    def choose(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if processors:
            # As transformers does: scores in float32.
            logits = logits.to(torch.float32)
            for process in processors:
                logits = process(token_ids, logits)
        return logits.argmax(-1)

    return choose


def _processors(settings: GenerationSettings, prompt_length: int) -> list[Any]:
    wanted = settings.penalties
    if not wanted:
        return []
    from transformers.generation import logits_process as lp

    ends: Any = list(settings.eos_token_ids)
    made: list[Any] = []
    if "repetition_penalty" in wanted:
        made.append(lp.RepetitionPenaltyLogitsProcessor(penalty=wanted["repetition_penalty"]))
    if "no_repeat_ngram_size" in wanted:
        made.append(lp.NoRepeatNGramLogitsProcessor(wanted["no_repeat_ngram_size"]))
    if "bad_words_ids" in wanted:
        made.append(lp.NoBadWordsLogitsProcessor(wanted["bad_words_ids"], ends))
    if "min_new_tokens" in wanted and ends:
        made.append(lp.MinNewTokensLengthLogitsProcessor(prompt_length, wanted["min_new_tokens"], ends))
    if "suppress_tokens" in wanted:
        made.append(lp.SuppressTokensLogitsProcessor(wanted["suppress_tokens"]))
    if "begin_suppress_tokens" in wanted:
        made.append(lp.SuppressTokensAtBeginLogitsProcessor(wanted["begin_suppress_tokens"], prompt_length))
    return made
