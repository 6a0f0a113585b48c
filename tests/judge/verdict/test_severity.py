"""Tokens and KL: a changed token counts, a tie within the noise does not."""

from __future__ import annotations

import torch

from glassengine.judge.verdict.severity import Severity


def test_agreement_and_kl() -> None:
    severity = Severity()
    logits = torch.randn(3, 50)
    severity.add(logits, logits.clone(), 1e-6, "case, step 0")
    found = severity.to_dict()
    assert (found["num_tokens"], found["token_agreement"], found["first_changed_token"]) == (3, 1.0, None)
    assert severity.num_bitwise == 3 and abs(found["mean_kl"]) < 1e-12
    severity.add(logits, logits * 1.3, 1e-6, "case, step 1")
    assert severity.max_kl > 1e-3


def test_a_changed_token_with_a_margin_is_named_and_a_tie_is_not() -> None:
    baseline = torch.tensor([[1.0, 0.9, 0.0]])
    changed = torch.tensor([[0.9, 1.0, 0.0]])
    severity = Severity()
    severity.add(baseline, changed, 0.05, "case, step 2")
    assert severity.num_ties == 1 and severity.first_change is None
    severity.add(baseline, changed, 0.005, "case, step 3")
    assert severity.first_change == "case, step 3, row 0: token 1 for 0 (margin 0.1)"
    assert severity.to_dict()["token_agreement"] == 0.5
