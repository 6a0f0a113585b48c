"""Drift: where a candidate of lower precision loses how much of the signal.

A table in order of execution. Of each tensor, over all cases and steps, with b of the baseline and c of the candidate:

    snr         |b|^2 / |c - b|^2, in dB
    cosine      b c / (|b| |c|)
    introduced  |P|^2 / |c - P|^2 in dB, P being what the baseline makes of the candidate's own inputs
    share       of the loss |c - P|^2 / |P|^2 that all rows introduce

If P is unknown (two recordings), a row introduces what the noise over signal grows by above all rows before it.
Sums of squares are all that is kept, so memory does not grow with what is compared.

Of a side of a check, rows are module outputs; of a program without modules (an ONNX file) the outputs of its nodes.
What the ops between two rows introduce is charged to the row that they flow into first. Results come last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from glassengine.results import DriftRow

if TYPE_CHECKING:
    from torch import Tensor

    from glassengine.numerics.verdict import Reference
    from glassengine.program.representation.program import Program

LOST = 0.5
"""Noise over signal from which on a tensor is not the baseline's any more: 3 dB."""

LITTLE_LEFT = 0.1
"""Noise over signal from which on little is left of it: 10 dB."""
SAME_DB = 40.0
"""Signal of a result of two right runs: above, it is the same."""

_HIDING = 1e4
"""Numbers from here on may be those by which a mask hides."""

_ENOUGH = 0.5
"""Share of the rows of the finest side that a side observed at modules must have, to make the table."""


@dataclass
class DriftSums:
    """Of one tensor."""

    num_tensors: int = 0
    signal: float = 0.0
    noise: float = 0.0
    power: float = 0.0
    dot: float = 0.0
    predicted: float = 0.0
    introduced: float = 0.0

    def add(
        self, baseline: Tensor, candidate: Tensor, valid: Tensor | None = None, predicted: Tensor | None = None
    ) -> None:
        """Add a tensor of one step; what is not a number, or not of one shape, is left out.

        Args:
            baseline: Floating.
            candidate: Floating.
            valid: Bool mask that broadcasts against them: elements that count.
            predicted: What the baseline makes of the candidate's own inputs.
        """
        from glassengine.numerics.mask_values import sentinel

        floats = baseline.is_floating_point() and candidate.is_floating_point()
        if not floats or baseline.shape != candidate.shape or not baseline.numel():
            return
        b = baseline.double()
        is_same = baseline.dtype is candidate.dtype and baseline.equal(candidate)
        c = b if is_same else candidate.double()
        p = predicted if predicted is not None and predicted.shape == b.shape else None
        counted = b.isfinite() & c.isfinite()
        # A number that hides a place of a mask has a size of its own in every dtype.
        limit = sentinel(baseline.dtype, candidate.dtype)
        counted &= (b.abs() < limit) & (c.abs() < limit)
        if valid is not None:
            counted &= valid
        self.num_tensors += 1
        b = b.where(counted, 0.0)
        c = b if is_same else c.where(counted, 0.0)
        signal = float(b.square().sum())
        self.signal += signal
        self.power += signal if is_same else float(c.square().sum())
        self.dot += signal if is_same else float((b * c).sum())
        self.noise += 0.0 if is_same else float((c - b).square_().sum())
        if p is not None:
            p = p.double().where(counted & p.isfinite(), 0.0)
            self.predicted += float(p.square().sum())
            self.introduced += float((c - p).where(counted, 0.0).square_().sum())

    def merge(self, other: DriftSums) -> None:
        """Add what another holds."""
        self.num_tensors += other.num_tensors
        self.signal += other.signal
        self.noise += other.noise
        self.power += other.power
        self.dot += other.dot
        self.predicted += other.predicted
        self.introduced += other.introduced

    @property
    def loss(self) -> float | None:
        """Noise over signal of what was introduced; None where that is not known."""
        return loss_of(self.introduced, self.predicted) if self.predicted else None

    def row(self, site: str, candidate_site: str, kind: str, loss: float | None = None) -> DriftRow:
        """Return the row of the table; `loss` is what it introduces, `share` is left for `shared`."""
        norms = math.sqrt(self.signal) * math.sqrt(self.power)
        cosine = 1.0 if not self.noise else max(-1.0, min(1.0, self.dot / norms)) if norms else 0.0
        snr = decibels(loss_of(self.noise, self.signal))
        introduced = None if loss is None else decibels(loss)
        return DriftRow(site, candidate_site, kind, self.num_tensors, snr, cosine, introduced)


def decibels(loss: float) -> float:
    """Return noise over signal as a signal-to-noise ratio in dB."""
    if loss == 0:
        return math.inf
    return -10 * math.log10(loss) if math.isfinite(loss) else -math.inf


def loss_of(noise: float, signal: float) -> float:
    """Return noise over signal; of nothing but noise, infinity."""
    if not noise:
        return 0.0
    return noise / signal if signal else math.inf


def signal_of(baseline: Tensor, value: Tensor | None) -> float:
    """Return the signal-to-noise ratio in dB of two results; of whole numbers whether they are the same.

    NaN in one of them alone leaves no signal.
    """
    if value is None or value.shape != baseline.shape:
        return -math.inf
    if baseline.equal(value):
        return math.inf
    if not (baseline.is_floating_point() and value.is_floating_point()):
        return -math.inf
    if not baseline.isnan().equal(value.isnan()):
        return -math.inf
    b, c = baseline.detach().double(), value.detach().double()
    counted = (b.abs() < _HIDING) & (c.abs() < _HIDING)  # masks hide by any large number, or by infinity
    b, c = b[counted], c[counted]
    noise, signal = float((c - b).square().sum()), float(b.square().sum())
    return decibels(loss_of(noise, signal))


def shared(rows: Sequence[DriftRow]) -> tuple[DriftRow, ...]:
    """Return the rows, each with its share of what all of them introduce."""
    losses = [None if row.introduced_db is None else 10 ** (-row.introduced_db / 10) for row in rows]
    total = sum(loss for loss in losses if loss is not None and math.isfinite(loss))
    found = []
    for row, loss in zip(rows, losses, strict=True):
        share = None if loss is None or not total else min(loss / total, 1.0)
        found.append(replace(row, share=0.0 if share is None and loss == 0 else share))
    return tuple(found)


def by_growth(rows: Sequence[DriftRow]) -> tuple[DriftRow, ...]:
    """Return rows whose introduced error is unknown, each with what it adds to all before it."""
    so_far, found = 0.0, []
    for row in rows:
        loss = 10 ** (-row.snr_db / 10)
        found.append(replace(row, introduced_db=decibels(max(0.0, loss - so_far))))
        so_far = max(so_far, loss)
    return shared(found)


@dataclass
class Drift:
    """What one side loses: baseline node -> its own site for it, and the sums."""

    sums_by_node: dict[str, tuple[str, DriftSums]] = field(default_factory=dict)

    def add(self, node: str, site: str, reference: Reference, candidate: Tensor, predicted: Tensor | None) -> None:
        """Add the value of a node in one step; of several sites of one node the first counts."""
        own, sums = self.sums_by_node.setdefault(node, (site, DriftSums()))
        if own == site:
            sums.add(reference.native, candidate, reference.valid, predicted)

    def merge(self, later: Drift) -> None:
        """Add what was found over later cases of the same side."""
        for node, (site, sums) in later.sums_by_node.items():
            own, mine = self.sums_by_node.setdefault(node, (site, DriftSums()))
            if own == site:
                mine.merge(sums)


def drift_rows(program: Program, sides: Sequence[Drift]) -> tuple[DriftRow, ...]:
    """Return the rows of a candidate, in order of execution, without those of its results.

    Args:
        program: The baseline's.
        sides: The same candidate, observed in one way or another, the one that is closest to what users run last.
    """
    rows = [_rows(program, drift) for drift in sides]
    most = max((len(one) for one in rows), default=0)
    return shared(next((one for one in reversed(rows) if len(one) >= _ENOUGH * most), ()))


def _rows(program: Program, drift: Drift) -> list[DriftRow]:
    kinds = {
        site.node: site for site in reversed(list(program.sites)) if site.kind == "module" and ":" not in site.name
    }
    ends = {node.name for node in program.graph.output_node().all_input_nodes}
    inner = [node for node in drift.sums_by_node if node in kinds and node not in ends]
    kind = "module" if inner else "op"
    chosen = set(inner) if inner else drift.sums_by_node.keys() - ends
    losses = _charged(program, drift, chosen)
    found = []
    for node in program.graph.nodes:
        if node.name not in chosen:
            continue
        own, sums = drift.sums_by_node[node.name]
        site = kinds[node.name] if inner else program.sites.by_node[node.name][0]
        if sums.num_tensors:
            found.append(sums.row(site.name, own, kind, losses.get(node.name)))
    return found


def _charged(program: Program, drift: Drift, rows: set[str]) -> dict[str, float]:
    """Return row -> what it and all that flows into it first introduce, where anything is known of it."""
    owner: dict[str, str] = {}
    order = {node.name: index for index, node in enumerate(program.graph.nodes)}
    charged: dict[str, float] = {}
    for node in reversed(program.graph.nodes):
        below = [owner[user.name] for user in node.users if user.name in owner]
        if node.name in rows:
            owner[node.name] = node.name
        elif below:
            owner[node.name] = min(below, key=lambda name: order[name])
        loss = drift.sums_by_node[node.name][1].loss if node.name in drift.sums_by_node else None
        if loss is not None and node.name in owner:
            charged[owner[node.name]] = charged.get(owner[node.name], 0.0) + loss
    return charged
