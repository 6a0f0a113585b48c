"""A comparison that is open: both sides, the rules of its map, and what its figures are judged by.

It knows the indices and no tensor: who plans and merges does without torch. `answering` measures.
"""

from __future__ import annotations

from dataclasses import dataclass

from glassengine.compare.flat import in_rows
from glassengine.compare.matching.maps import TensorMap
from glassengine.compare.matching.matching import Match
from glassengine.compare.precision import two_precisions
from glassengine.compare.ranks.findings import Findings
from glassengine.compare.ranks.sides import sides_of_one_rank
from glassengine.compare.requirements import printed_statistics
from glassengine.compare.ruling import Ruling
from glassengine.compare.units import Request, Unit
from glassengine.compare.wrapped import of_one_model
from glassengine.numerics.metrics.tolerance import is_inexact, tolerance
from glassengine.recording.layout.noise_floor import NoiseFloor, read_noise_floor
from glassengine.recording.read.ranks import RankRecordings
from glassengine.recording.read.reader import Recording
from glassengine.recording.read.source import TensorSource


@dataclass
class Bench:
    """A comparison that is open for judging.

    Attributes:
        judge: Of both sides; where one is of several ranks and the other of one, it is put together.
        rules: Of the map.
    """

    judge: Ruling
    rules: TensorMap | None

    @classmethod
    def of(cls, request: Request, left: TensorSource, right: TensorSource, rules: TensorMap | None) -> Bench:
        """Return what judges two sources that are open.

        Args:
            request: Its paths are not read.
            left: The baseline.
            right: The candidate.
            rules: What its map says.
        """
        left, right = printed_statistics(left, right) or (left, right)
        if rules is None:
            left, right = of_one_model(left, right)
        left, right = sides_of_one_rank(left, right)
        if rules is None and not request.transpose:
            left, right = in_rows(left, right)
        has_drift = two_precisions(left, right) is not None
        floor, _ = usable_floor(left, right)
        judge = Ruling(
            left,
            right,
            request.transpose,
            request.rtol,
            request.atol,
            request.device,
            floor,
            has_drift,
            has_drift and request.by_drift,
        )
        return cls(judge, rules)

    @property
    def is_put_together(self) -> bool:
        """Whether parts of several ranks are."""
        return isinstance(self.judge.left, Findings) or isinstance(self.judge.right, Findings)

    def match(self, unit: Unit) -> Match:
        """Return the match that a unit stands for."""
        rule = None if unit.rule is None or self.rules is None else self.rules.rules[unit.rule]
        theirs = tuple(self.judge.right.entries[place] for place in unit.candidates)
        return Match(self.judge.left.entries[unit.baseline], theirs, unit.method, rule)


def usable_floor(left: TensorSource, right: TensorSource) -> tuple[NoiseFloor | None, str | None]:
    """Return the noise floor of the baseline, or why it cannot be used."""
    floor = None
    if isinstance(left, Recording):
        floor = read_noise_floor(left.path)
    elif isinstance(left, RankRecordings):
        floor = left.noise_floor()
    if floor is None:
        return None, None
    ours, theirs = (str(side.metadata.get("dtype")) for side in (left, right))
    # A coarser model's tensors may have been recorded in a finer dtype: its float32 islands, logits that were cast.
    if (
        all(is_inexact(dtype) for dtype in (ours, theirs))
        and tolerance(theirs, theirs).rtol > tolerance(ours, ours).rtol
    ):
        return None, f"the floor of {left.path} is that of {ours}, too fine for {theirs}"
    return floor, None
