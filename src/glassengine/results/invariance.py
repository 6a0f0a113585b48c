"""Result of a model beside itself under changes that must not matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from glassengine.results.base import Result

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
        return "; ".join(one.in_words() for one in worst) or "nothing was compared"


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
