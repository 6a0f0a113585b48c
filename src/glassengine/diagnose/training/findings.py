"""What was found about a training run, and the answer that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from glassengine import environment
from glassengine.judge.sides.protocol import Guarantee
from glassengine.results import (
    FLAGGED,
    VERDICTS,
    Comparison,
    Divergence,
    Pair,
    Rung,
    Skipped,
    Standing,
    WrittenDifferently,
    counts_of,
    worst,
)

GUARANTEES = {
    "forward": Guarantee.EVERY_OP.text,
    "backward": Guarantee.EVERY_OP.text,
    "run": Guarantee.GRADIENTS.text,
    "update": "judged by the optimizer's step",
}
RUNGS = tuple(GUARANTEES)
"""In the order in which a step makes them: "run" is what the candidate's own forward and backward came to."""


@dataclass
class Found:
    """What was judged so far."""

    pairs: list[Pair] = field(default_factory=list)
    origins: list[Divergence] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    wanted: set[str] = field(default_factory=set)
    judged: set[str] = field(default_factory=set)
    written: dict[str, WrittenDifferently] = field(default_factory=dict)

    def conclude(self, baseline: str, candidate: str, *, fail_on: str, min_coverage: float) -> Comparison:
        """Return the comparison."""
        rungs = []
        for name, guarantee in GUARANTEES.items():
            own = [pair for pair in self.pairs if pair.rung == name]
            first = min((d for d in self.origins if d.rung == name), key=lambda d: d.step, default=None)
            verdict = worst(pair.verdict for pair in own)
            if own:
                rungs.append(Rung(name, "baseline", "candidate", verdict, guarantee, len(own), None, first))
        verdict = worst(pair.verdict for pair in self.pairs)
        coverage = len(self.judged) / len(self.wanted) if self.wanted else 1.0
        first = next((d for level in reversed(FLAGGED) for d in self.origins if d.verdict == level), None)
        standing: Standing = "ok"
        reason = None
        if VERDICTS.index(verdict) >= VERDICTS.index(fail_on):
            where = "" if first is None else f" in step {first.step}, {first.rung}: {first.site}"
            standing, reason = "differs inside", f"a tensor is {verdict}{where}"
        elif coverage < min_coverage:
            wanted = f"(--min-coverage {min_coverage:g})"
            standing = "too little judged"
            reason = f"only {coverage:.0%} of the float-valued ops were judged {wanted}"
        described = environment.describe()
        return Comparison(
            baseline=baseline,
            candidate=candidate,
            ok=standing == "ok",
            verdict=verdict,
            first_divergence=first,
            origins=tuple(self.origins),
            counts=counts_of(
                self.pairs,
                unmatched_baseline=sum(item.side == "baseline" for item in self.skipped),
                unmatched_candidate=sum(item.side == "candidate" for item in self.skipped),
                not_recorded=0,
            ),
            pairs=tuple(self.pairs),
            skipped=tuple(self.skipped),
            environment={"baseline": described, "candidate": described},
            coverage=coverage,
            rungs=tuple(rungs),
            not_ok_because=reason,
            written_differently=tuple(self.written.values()),
            too_little=standing == "too little judged",
            standing=standing,
        )
