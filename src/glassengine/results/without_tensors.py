"""Results without pairs of tensors: of prompts, of rollouts, and of a model beside itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from glassengine.results.base import Result

PromptPart = Literal["tokens", "template", "settings", "processor", "loading"]
_SAME = {
    "tokens": "tokens",
    "template": "templates",
    "settings": "settings",
    "processor": "processors",
    "loading": "parameters",
}
PromptLevel = Literal["wrong", "limit", "note"]
LEVEL = "prompt"
"""Name of the level of a check."""


@dataclass(frozen=True)
class PromptExample:
    """A text that the sides treat differently.

    Attributes:
        text: The text, or the conversation as JSON.
        baseline: Token ids of the baseline; empty for a template.
        candidate: Token ids of the candidate.
        baseline_shown: The pieces of these ids, or the rendered text around the first difference.
        candidate_shown: The same of the candidate.
    """

    text: str
    baseline: Sequence[int]
    candidate: Sequence[int]
    baseline_shown: Sequence[str]
    candidate_shown: Sequence[str]


@dataclass(frozen=True)
class PromptFinding:
    """One cause of differences.

    Attributes:
        part: What differs.
        cause: Class of the difference: "no BOS", "pre-tokenizer (digits)".
        level: "wrong"; "limit" if the engine cannot do otherwise, whatever file it reads; "note".
        detail: The cause in a sentence, with values.
        count: Probes that show it.
        of: Probes that were tried.
        example: The shortest of them; None where none is needed.
        deviates: The side that leaves its own tokenizer file; None if neither does, or it is unknown.
    """

    part: PromptPart
    cause: str
    level: PromptLevel
    detail: str
    count: int = 1
    of: int = 1
    example: PromptExample | None = None
    deviates: Literal["baseline", "candidate"] | None = None


@dataclass(frozen=True)
class PromptComparison(Result):
    """What `glass check-prompt` returns, and the level `prompt` of a check.

    Attributes:
        baseline: Spec of the baseline.
        candidate: Spec of the candidate.
        ok: Whether something was compared and nothing is wrong.
        findings: Wrong ones first, then by the number of probes that show them.
        compared: Part -> number of probes, conversations, samples or values that were compared; "files" -> number of
            files, where all of both sides are the same and nothing was tried.
        skipped: Part -> why it was not compared.
        engines: Names of the programs that tokenize: of the baseline, of the candidate.
    """

    baseline: str
    candidate: str
    ok: bool
    findings: Sequence[PromptFinding]
    compared: Mapping[str, int]
    skipped: Mapping[str, str]
    engines: tuple[str, str]
    schema_version: int = 1

    @property
    def wrong(self) -> list[PromptFinding]:
        """What makes it not ok."""
        return [one for one in self.findings if one.level == "wrong"]

    def in_words(self) -> str:
        """Return the answer in a line: the first cause, or what was the same."""
        if self.wrong:
            more = f", and {len(self.wrong) - 1} more" if len(self.wrong) > 1 else ""
            return f"{self.wrong[0].part}: {self.wrong[0].cause}{more}"
        if not self.ok:
            return "no tokens were compared"
        limits = ", ".join(dict.fromkeys(one.cause for one in self.findings if one.level == "limit"))
        if limits:
            return f"nothing differs but what the engine cannot do otherwise: {limits}"
        if "files" in self.compared:
            return "both sides have the same files of tokenizer, template and settings"
        parts = ", ".join(words for part, words in _SAME.items() if part in self.compared)
        return f"the same {parts}, as far as they were compared"


CauseKind = Literal["tokens", "semantics", "weights", "configuration", "precision", "routes", "kernel"]


@dataclass(frozen=True)
class RolloutCause(Result):
    """One cause of the gap between the log-probabilities of an engine and those of the checkpoint.

    Attributes:
        kind: "tokens", "semantics" (what is reported), "weights", "configuration", "precision", "routes", "kernel".
        setting: What differs: "temperature".
        value: Of the engine: "0.7".
        text: What the engine does, in words.
        share: Of the mean gap, by Shapley's rule; it may be negative where causes cancel.
        is_rounding: Whether it changes the last digits only, legally.
        alike: Other changes that explain the gap as well, in words.
    """

    kind: CauseKind
    setting: str
    value: str
    text: str
    share: float
    is_rounding: bool = False
    alike: tuple[str, ...] = ()


@dataclass(frozen=True)
class RolloutToken(Result):
    """A token with its two log-probabilities.

    Attributes:
        sample: Number of its sample in the file, from 0.
        place: In the response, from 0.
        token: Its id.
        text: The token; None without a tokenizer.
        engine: What the engine reported.
        trainer: What the checkpoint gives.
    """

    sample: int
    place: int
    token: int
    text: str | None
    engine: float
    trainer: float


@dataclass(frozen=True)
class RolloutComparison(Result):
    """Log-probabilities that an engine reported, beside those of the checkpoint.

    Attributes:
        format: Of the file.
        num_samples: How many responses.
        num_tokens: How many tokens were compared.
        num_searched: Of how many of them the causes were searched.
        num_runs: Runs of the model.
        dtype: Of the checkpoint's run.
        mean: Mean of the gap, engine minus trainer.
        rms: Root of its mean square.
        largest: Largest absolute value.
        k3: Mean of r - 1 - log r, r = exp(trainer - engine): estimates KL(engine, trainer) in nats.
        mean_error: exp of the mean absolute gap.
        outside: Share of tokens whose ratio of probabilities is outside of [0.9, 1.1].
        positive: Share of tokens that the engine calls likelier.
        slope: Of the engine's values over the trainer's; None where the trainer's are all the same.
        num_impossible: Tokens that have no finite value on one side.
        causes: The largest share first.
        rest: Share of the mean gap that the causes leave.
        rest_is: What the rest is, in words: "rounding in bfloat16".
        rounding: Dtype -> size of the rest over the size of rounding in it.
        found: Whether the gap is "none", "rounding", "mistake", "unexplained" or "unknown": undecided.
        worst: Tokens with the largest gaps.
        curve: Pairs of the two log-probabilities (trainer, engine) of at most 600 tokens, in order of the trainer's.
        versions: Versions of the weights that the file names.
    """

    format: str
    num_samples: int
    num_tokens: int
    num_searched: int
    num_runs: int
    dtype: str
    mean: float
    rms: float
    largest: float
    k3: float
    mean_error: float
    outside: float
    positive: float
    slope: float | None
    num_impossible: int
    causes: tuple[RolloutCause, ...]
    rest: float
    rest_is: str
    rounding: dict[str, float]
    found: Literal["none", "rounding", "mistake", "unexplained", "unknown"]
    worst: tuple[RolloutToken, ...]
    curve: tuple[tuple[float, float], ...] = ()
    versions: tuple[str, ...] = ()

    def in_words(self) -> str:
        """Return the answer in a sentence."""
        rest = f"the rest ({self.rest:.0%}) is {self.rest_is}"
        told = "; ".join(f"{one.text} ({one.share:.0%} of the gap)" for one in self.causes)
        told += "; they cancel in part" if any(one.share < 0 for one in self.causes) else ""
        if self.found == "none":
            return "engine and trainer report the same log-probabilities"
        if self.found == "rounding":
            return f"this gap is {self.rest_is}" if not told else f"this gap is rounding: {told}; {rest}"
        if self.found == "unknown":
            return f"undecided: the gap is {self.rest_is}"
        what = "this gap is a mistake"
        return f"{what}: {told}; {rest}" if told else f"{what}: {self.rest_is}"


What = Literal[
    "run", "batch", "padding", "length", "cache", "threads", "order", "compile", "attention", "world"
]  # fmt: skip
ChangeVerdict = Literal["bitwise", "within rounding", "undecided", "beyond rounding"]
CHANGE_VERDICTS: tuple[ChangeVerdict, ...] = ("bitwise", "within rounding", "undecided", "beyond rounding")


@dataclass(frozen=True)
class FirstOperation(Result):
    """The first operation whose results differ.

    Attributes:
        name: Of the operation: "addmm"; of a module where nothing inside it was seen.
        module: Path of the module that runs it.
        source: File and line that call it; None where that is not known.
        call: Number of the forward call, from 0.
        inputs_equal: Whether all its inputs are bitwise equal, so that the difference begins here; None where they
            were not seen.
        max_abs_diff: Largest difference of its results; None where they cannot be subtracted.
        detail: What else is known of it, in words.
    """

    name: str
    module: str
    source: str | None
    call: int
    inputs_equal: bool | None
    max_abs_diff: float | None
    detail: str | None = None

    def in_words(self) -> str:
        """Return the operation and where it is."""
        where = f" in {self.module}" if self.module else ""
        line = f" ({self.source})" if self.source else ""
        return f"{self.name}{where}{line}"


@dataclass(frozen=True)
class SwitchTried(Result):
    """A setting that was tried.

    Attributes:
        name: As one writes it.
        works: Whether both sides are then bitwise equal.
        scope: Whether the whole model or the first operation alone was run with it.
    """

    name: str
    works: bool
    scope: Literal["model", "operation"] = "model"


@dataclass(frozen=True)
class Variation(Result):
    """One change that must not matter.

    Attributes:
        what: The change.
        verdict: The worst of its variants.
        num_variants: Pairs of calls that were compared.
        num_different: How many of them differ in a bit.
        variant: The worst of them, in words; None where all are bitwise equal.
        num_tokens: Positions of logits that were compared in it; 0 of other results.
        num_changed_tokens: Positions whose likeliest token changes.
        max_abs_diff: Largest difference of the results; None where they cannot be subtracted.
        largest: Largest absolute value of the results.
        noise_ratio: Difference over the noise floor.
        reason: What decides, where it is not the size of the difference.
        first: The first operation that differs; None where all is bitwise equal or nothing inside was seen.
        cause: Why it differs, in words; None where no trial decided.
        switch: The setting that makes it bitwise equal; None where none of those tried does.
        tried: All settings that were tried.
        notes: What was not compared, and what one would not expect.
    """

    what: What
    verdict: ChangeVerdict
    num_variants: int
    num_different: int = 0
    variant: str | None = None
    num_tokens: int = 0
    num_changed_tokens: int = 0
    max_abs_diff: float | None = None
    largest: float | None = None
    noise_ratio: float | None = None
    reason: str | None = None
    first: FirstOperation | None = None
    cause: str | None = None
    switch: str | None = None
    tried: tuple[SwitchTried, ...] = ()
    notes: tuple[str, ...] = ()

    def in_words(self) -> str:
        """Return the verdict, where the difference begins, and why."""
        if self.verdict == "bitwise":
            return f"{self.what}: bitwise equal in {self.num_variants} variants"
        text = f"{self.what}: {self.verdict}"
        if self.first is not None:
            text += f", first in {self.first.in_words()}"
        return f"{text}: {self.cause}" if self.cause else text


@dataclass(frozen=True)
class Invariance(Result):
    """What `glass check MODEL --invariant WHAT` returns.

    Attributes:
        model: What was run.
        ok: Whether rounding explains every difference.
        changes: One for each change that was asked for.
        subsystem: What the pattern of the changes that differ points to, in words; None where none differs.
        environment: Processor, instruction set, threads and versions: bitwise equality holds for these alone.
    """

    model: str
    ok: bool
    changes: tuple[Variation, ...]
    subsystem: str | None
    environment: Mapping[str, Any]
    schema_version: int = 1

    @property
    def verdict(self) -> ChangeVerdict:
        """The worst of all changes."""
        return max((one.verdict for one in self.changes), key=CHANGE_VERDICTS.index, default="undecided")

    @property
    def too_little(self) -> bool:
        """Whether nothing is beyond rounding, and something was not decided."""
        return not self.ok and self.verdict == "undecided"

    def change(self, what: str) -> Variation:
        """Return the change of this name."""
        return next(one for one in self.changes if one.what == what)

    def in_words(self) -> str:
        """Return the answer in a line."""
        worst = [one for one in self.changes if one.verdict == self.verdict]
        if self.verdict == "bitwise":
            return f"bitwise equal under {', '.join(one.what for one in self.changes)}"
        if not worst:
            return "nothing was compared"
        others = "".join(f", {one.what}" for one in worst[1:])
        if self.ok and others:
            return f"rounding explains what {worst[0].what}{others} change"
        return worst[0].in_words() + (f"; likewise {others[2:]}" if others else "")


@dataclass(frozen=True)
class BatchProof(Result):
    """Rows of random batches beside the same rows alone.

    Attributes:
        ok: Whether every row is bitwise equal.
        num_batches: How many batches were run.
        num_rows: How many rows were compared and are equal.
        failure: The first row that is not, in words; None where all are.
    """

    ok: bool
    num_batches: int
    num_rows: int
    failure: str | None = None

    def in_words(self) -> str:
        """Return what was found, in a line."""
        if self.ok:
            return f"{self.num_rows} rows of {self.num_batches} random batches (of one length) are bitwise as alone"
        return f"{self.failure} is not bitwise as alone"


def concluded(model: str, changes: Sequence[Variation], environment: Mapping[str, Any]) -> Invariance:
    """Return the answer that follows from the changes: ok if every one was compared and rounding explains it."""
    ok = bool(changes) and all(
        one.num_variants > 0 and one.verdict in ("bitwise", "within rounding") for one in changes
    )
    return Invariance(model, ok, tuple(changes), subsystem_of(changes), environment)


def subsystem_of(changes: Sequence[Variation]) -> str | None:
    """Return what the pattern of the changes that differ points to."""
    asked = {one.what for one in changes}
    differ = {one.what for one in changes if one.verdict != "bitwise"}
    beyond = {one.what for one in changes if one.verdict == "beyond rounding"}
    if not differ:
        return None
    if "run" in differ:
        return "the model is not the same twice, so every other change shows that too"
    if differ == {"cache"} and len(asked) > 1:
        return "the cache: what an earlier request left is read"
    if beyond & {"batch", "order"}:
        return "rows of a batch are mixed"
    if beyond == {"padding"}:
        return "the mask: padding is read"
    if differ <= {"batch", "length", "padding", "order", "cache"}:
        return "kernels by shape: other kernels run for other sizes"
    if differ == {"threads"}:
        return "sums are split by threads"
    if differ == {"compile"}:
        return "the compiler"
    if differ == {"attention"}:
        return "the attention kernel"
    return None
