"""How much a disagreement matters to the user of the model: tokens and KL. Reported, never decisive by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glassengine.results import TokenAgreement

_TIE = 8.0
"""A changed token is a tie up to this many times the noise: a margin holds four independent errors of two sides, so its
standard deviation is twice that of one logit, and four of those leave one legitimate flip in 10 000 to be called
wrong."""


@dataclass
class Severity:
    """Agreement of the last position's logits of two sides over all steps, in nats for KL."""

    num_tokens: int = 0
    num_agreeing: int = 0
    num_ties: int = 0
    total_kl: float = 0.0
    max_kl: float = 0.0
    first_change: str | None = None
    num_bitwise: int = 0

    def add(self, baseline: torch.Tensor, candidate: torch.Tensor, noise: float, where: str) -> None:
        """Count one step.

        Args:
            baseline: Logits [B, V] of the last position.
            candidate: The same of the other side.
            noise: RMS of what rounding alone does to a logit.
            where: Case and step, for the message.
        """
        a, b = baseline.double(), candidate.double()
        log_a, log_b = torch.log_softmax(a, -1), torch.log_softmax(b, -1)
        kl = (log_a.exp() * (log_a - log_b)).sum(-1)
        self.total_kl += float(kl.sum())
        self.max_kl = max(self.max_kl, float(kl.max()))
        ours, theirs = a.argmax(-1), b.argmax(-1)
        for row in range(a.shape[0]):
            self.num_tokens += 1
            self.num_bitwise += bool(torch.equal(baseline[row], candidate[row]))
            if ours[row] == theirs[row]:
                self.num_agreeing += 1
                continue
            margin = float(a[row, ours[row]] - a[row, theirs[row]])
            if margin <= _TIE * noise:
                self.num_ties += 1
            elif self.first_change is None:
                self.first_change = (
                    f"{where}, row {row}: token {int(theirs[row])} for {int(ours[row])} (margin {margin:.3g})"
                )

    def merge(self, later: Severity) -> None:
        """Add later steps."""
        for name in ("num_tokens", "num_agreeing", "num_ties", "total_kl", "num_bitwise"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.max_kl = max(self.max_kl, later.max_kl)
        self.first_change = self.first_change or later.first_change

    def to_dict(self) -> TokenAgreement:
        """Return JSON-ready figures; `token_agreement` counts ties as agreement."""
        agreeing = self.num_agreeing + self.num_ties
        return {
            "num_tokens": self.num_tokens,
            "token_agreement": agreeing / self.num_tokens if self.num_tokens else None,
            "num_ties": self.num_ties,
            "mean_kl": self.total_kl / self.num_tokens if self.num_tokens else None,
            "max_kl": self.max_kl,
            "first_changed_token": self.first_change,
        }
