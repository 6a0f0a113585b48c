"""Findings about a training run, and the result concluded from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from glassengine import environment
from glassengine.diagnose.training.gradient_graph import GRADIENT, LOSS
from glassengine.judge.sides.protocol import Guarantee
from glassengine.results import (
    FLAGGED,
    Comparison,
    Divergence,
    Findings,
    LevelResult,
    Pair,
    Policy,
    Skipped,
    WrittenDifferently,
    worst,
)
from glassengine.results.sentences import mistake

GUARANTEES = {
    "forward": Guarantee.EVERY_OP.text,
    "backward": Guarantee.EVERY_OP.text,
    "run": Guarantee.GRADIENTS.text,
    "update": "judged by the optimizer's step",
}
LEVELS = tuple(GUARANTEES)
"""In the order in which a step makes them: "run" is what the candidate's own forward and backward came to."""


@dataclass
class TrainingFindings:
    """What was judged so far."""

    pairs: list[Pair] = field(default_factory=list)
    origins: list[Divergence] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    wanted: set[str] = field(default_factory=set)
    judged: set[str] = field(default_factory=set)
    written: dict[str, WrittenDifferently] = field(default_factory=dict)

    def conclude(self, baseline: str, candidate: str, policy: Policy) -> Comparison:
        """Return the comparison."""
        levels = []
        for name, guarantee in GUARANTEES.items():
            own = [pair for pair in self.pairs if pair.level == name]
            first = min((d for d in self.origins if d.level == name), key=lambda d: d.step, default=None)
            verdict = worst(pair.verdict for pair in own)
            if own:
                levels.append(LevelResult(name, "baseline", "candidate", verdict, guarantee, len(own), None, first))
        verdict = worst(pair.verdict for pair in self.pairs)
        first = self._first()
        found = Findings(
            baseline=baseline,
            candidate=candidate,
            environment=environment.describe(),
            inside=verdict,
            inside_reason=f"a tensor is {verdict}" if first is None else self._reason(first),
            first_divergence=first,
            origins=self.origins,
            pairs=self.pairs,
            skipped=self.skipped,
            coverage=len(self.judged) / len(self.wanted) if self.wanted else 1.0,
            levels=levels,
            written_differently=list(self.written.values()),
        )
        return found.conclude(policy)

    def _first(self) -> Divergence | None:
        """Return the first of the worst origins; one of the forward only if the loss differs, or nothing else does."""
        worst_ones = next(
            (some for level in reversed(FLAGGED) if (some := [d for d in self.origins if d.verdict == level])), []
        )
        flagged = {
            pair.site: pair.step for pair in reversed(self.pairs) if pair.level == "run" and pair.verdict in FLAGGED
        }
        if flagged and LOSS not in flagged:
            return next((d for d in worst_ones if d.level != "forward"), None) or next(iter(worst_ones), None)
        return next(iter(worst_ones), None)

    def _reason(self, first: Divergence) -> str:
        """Return what is wrong: the loss, how many gradients, or an op alone."""
        run = [pair for pair in self.pairs if pair.level == "run" and pair.step == first.step]
        gradients = [pair for pair in run if pair.site.endswith(GRADIENT)]
        wrong = [pair for pair in gradients if pair.verdict in FLAGGED]
        op = f"the first {first.verdict} {first.noun} is {first.site} ({first.level}, step {first.step})"
        if not wrong:
            return op
        is_loss_wrong = any(pair.site == LOSS and pair.verdict in FLAGGED for pair in run)
        loss = "the loss differs" if is_loss_wrong else "the loss agrees"
        # In the order of the backward.
        name = wrong[0].site.removesuffix(GRADIENT)
        op = mistake(first) or op
        return f"{loss}, {len(wrong)} of {len(gradients)} gradients are wrong, first that of {name}; {op}"
