"""Engines side by side, what they generated and returned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from glassengine.results.base import Result
from glassengine.results.figures import Figures

if TYPE_CHECKING:
    import torch


Agreement = Literal["bitwise", "within rounding", "beyond"]


AGREEMENTS: tuple[Agreement, ...] = ("bitwise", "within rounding", "beyond")


@dataclass(frozen=True)
class StepDifference(Result):
    """Logits of one step against those of the first engine, at the positions that hold a token.

    Attributes:
        step: 0 is the prefill.
        agreement: "bitwise" (every bit of every logit), "within rounding" or "beyond".
        judged_by: "noise floor" or "tolerance (uncalibrated)".
        noise_ratio: Difference over the noise floor; None where that was not measured.
        rounding_units: Largest difference, each in units of the coarser dtype's epsilon times the largest logit of its
            position.
        figures: All figures, element by element.
    """

    step: int
    agreement: Agreement
    judged_by: str
    noise_ratio: float | None
    rounding_units: float
    figures: Figures


@dataclass(frozen=True)
class TokenDifference(Result):
    """The first token that an engine would have chosen differently.

    Attributes:
        step: 0 is the prefill.
        row: Sequence of the batch.
        baseline: Token id of the first engine.
        candidate: Token id of this engine.
        baseline_margin: How far the first engine's logit of its token is above that of the other token; a margin within
            the difference of the logits is a tie that rounding decides.
        candidate_margin: The same of this engine, for its own token.
    """

    step: int
    row: int
    baseline: int
    candidate: int
    baseline_margin: float
    candidate_margin: float


@dataclass(frozen=True)
class EngineColumn(Result):
    """One engine. What compares it with the first engine is empty for the first engine itself.

    Attributes:
        engine: Its directory.
        model: What it was built from.
        backend: Its back-end.
        dtype: Floating dtype of its parameters.
        added_outputs: Names of its debug outputs.
        options: What else it was built with, where the engines differ.
        total_bytes: Size on disk.
        executable_bytes: Of the back-end's files, weights included where the back-end keeps them there.
        weights_bytes: Of the weights outside of the executable.
        prefill_ms: Median over the rounds.
        decode_ms: Median over all decode steps; None where there was none.
        steps: Difference of the logits, step by step.
        num_different_tokens: Tokens that this engine would have chosen differently, of those that the first chose.
        first_different_token: The first of them.
        agreement: The worst of `steps`; None for the first engine.
    """

    engine: str
    model: str
    backend: str
    dtype: str
    added_outputs: tuple[str, ...]
    options: Mapping[str, str]
    total_bytes: int
    executable_bytes: int
    weights_bytes: int
    prefill_ms: float
    decode_ms: float | None
    steps: tuple[StepDifference, ...] = ()
    num_different_tokens: int = 0
    first_different_token: TokenDifference | None = None
    agreement: Agreement | None = None


@dataclass(frozen=True)
class SideBySide(Result):
    """Engines of one model side by side.

    Attributes:
        columns: One per engine, in the order given.
        ok: Whether no engine is beyond rounding.
        agreement: The worst of all: "bitwise" (every bit of every logit), "within rounding" or "beyond".
        prompt_token_ids: Token ids of each prompt.
        token_ids: Tokens that the first engine chose (the likeliest each time) and all engines were given.
        rounds: Rounds behind each median; a warm-up apart.
        num_threads: Threads of torch.
        cpu: Processor.
        notes: What a reader must know.
    """

    columns: tuple[EngineColumn, ...]
    ok: bool
    agreement: Agreement
    prompt_token_ids: tuple[tuple[int, ...], ...]
    token_ids: tuple[tuple[int, ...], ...]
    rounds: int
    num_threads: int
    cpu: str
    notes: tuple[str, ...] = ()
    schema_version: int = 1


@dataclass(frozen=True)
class Forward(Result):
    """What one forward returned.

    Attributes:
        prompts: Texts; empty where tensors were given.
        prompt_token_ids: Token ids of each text, without padding.
        outputs: Results and added outputs by name, [B, S, ...] and the like; owned by the caller.
        seconds: Of the execution.
        recording: Directory of the recording, if one was made.
    """

    prompts: tuple[str, ...]
    prompt_token_ids: tuple[tuple[int, ...], ...]
    outputs: dict[str, torch.Tensor]
    seconds: float
    recording: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; a tensor becomes its dtype, shape and nested values."""
        described = {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "values": tensor.tolist(),
            }
            for name, tensor in self.outputs.items()
        }
        return Result.to_dict(replace(self, outputs=described))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Generation(Result):
    """What was generated; every field of several entries has one per sequence.

    Attributes:
        prompts: Prompts as text; empty where token ids were given.
        prompt_token_ids: Token ids of each prompt, without padding.
        token_ids: Generated token ids of each sequence, its end token included.
        texts: Generated text of each sequence without special tokens; None without a tokenizer.
        num_steps: Steps run, the prefill included.
        prefill_s: Seconds of the prefill.
        decode_s: Seconds of all decode steps.
        recording: Directory of the recording, if one was made.
        seed: Of the random numbers; None where decoding was greedy.
    """

    prompts: tuple[str, ...]
    prompt_token_ids: tuple[tuple[int, ...], ...]
    token_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...] | None
    num_steps: int
    prefill_s: float
    decode_s: float
    recording: str | None = None
    seed: int | None = None
