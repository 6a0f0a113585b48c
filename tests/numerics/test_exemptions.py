"""What is left out of a verdict is counted, by reason."""

from __future__ import annotations

import torch

from glassengine.numerics.exemptions import CASTS, PADDING, TIES, Ledger, together
from glassengine.results import Exemption


def test_an_element_counts_for_its_first_reason() -> None:
    ledger = Ledger()
    rows = torch.tensor([[True], [False]])
    both = torch.tensor([[True, False, False], [True, False, False]])
    ledger.add("a", 6, {PADDING: rows, CASTS: both})
    ledger.add("b", 6, {}, whole=TIES)
    ledger.add("b", 6, {PADDING: rows})
    assert ledger.exemptions() == (
        Exemption("padding", 6, 6 / 18, 2, "a"),
        Exemption("ties", 6, 6 / 18, 1, "b"),
        Exemption("undefined casts", 1, 1 / 18, 1, "a"),
    )


def test_two_programs_are_counted_together() -> None:
    encoder = (Exemption("padding", 6, 0.5, 1, "a"),)
    decoder = (Exemption("ties", 30, 0.5, 2, "c"), Exemption("padding", 9, 0.15, 1, "b"))
    assert together((encoder, 12), (decoder, 60)) == (
        Exemption("ties", 30, 30 / 72, 2, "c"),
        Exemption("padding", 15, 15 / 72, 2, "b"),
    )
    assert together(((), 0), ((), 0)) == ()
