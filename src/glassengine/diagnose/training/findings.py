"""Findings about a training run, and the result concluded from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from glassengine import environment
from glassengine.judge.sides.protocol import Guarantee
from glassengine.results import (
    FLAGGED,
    Comparison,
    Divergence,
    Findings,
    Pair,
    Policy,
    Rung,
    Skipped,
    WrittenDifferently,
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

    def conclude(self, baseline: str, candidate: str, policy: Policy) -> Comparison:
        """Return the comparison."""
        rungs = []
        for name, guarantee in GUARANTEES.items():
            own = [pair for pair in self.pairs if pair.rung == name]
            first = min((d for d in self.origins if d.rung == name), key=lambda d: d.step, default=None)
            verdict = worst(pair.verdict for pair in own)
            if own:
                rungs.append(Rung(name, "baseline", "candidate", verdict, guarantee, len(own), None, first))
        verdict = worst(pair.verdict for pair in self.pairs)
        first = next((d for level in reversed(FLAGGED) for d in self.origins if d.verdict == level), None)
        where = "" if first is None else f" in step {first.step}, {first.rung}: {first.site}"
        found = Findings(
            baseline=baseline,
            candidate=candidate,
            environment=environment.describe(),
            inside=verdict,
            inside_reason=f"a tensor is {verdict}{where}",
            first_divergence=first,
            origins=self.origins,
            pairs=self.pairs,
            skipped=self.skipped,
            coverage=len(self.judged) / len(self.wanted) if self.wanted else 1.0,
            rungs=rungs,
            written_differently=list(self.written.values()),
        )
        return found.conclude(policy)
