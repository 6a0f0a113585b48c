"""Another run's tokens, to make a run on: what follows a different token differs for good reasons.

A recording keeps the tokens that each row was given, without padding: prompts, and what was generated but for the last
token. Several prompts that were run one after the other follow each other in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassengine.errors import IncomparableError, UsageError
from glassengine.recording.read.source import TensorSource, open_source

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
            at = _behind(rows, at)
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


def _behind(prompts: Rows, at: Sequence[int]) -> list[int]:
    rows = [place + len(tokens) for place, tokens in zip(at, prompts, strict=False)]
    return [*rows, *at[len(rows) :]]
