"""`glass.testing.assert_samples_match`: a sampler beside the distribution that it should draw from."""

from __future__ import annotations

import torch
from torch import Tensor

from glassengine.errors import UsageError

_LEAST = 5.0
"""Draws that a value should have to be counted by itself; rarer ones are counted together."""
_CHANCE = 1e-6
"""Of a right sampler to be refused."""


def assert_samples_match(samples: Tensor, probabilities: Tensor) -> float:
    """Raise an AssertionError unless samples may be drawn from a distribution, by the chi-square test.

    Args:
        samples: Integers, of any shape: independent draws.
        probabilities: [values], need not add to 1; 0 for what must never be drawn.

    Returns:
        The chance of a right sampler to be as far off.

    Raises:
        AssertionError: A value was drawn that is impossible, or the counts are too far off.
        UsageError: There are too few samples to judge by, or a probability is negative or not finite, or all are 0.
    """
    p = probabilities.double().flatten()
    if not bool(p.isfinite().all()) or bool((p < 0).any()) or not bool(p.any()):
        raise UsageError("not a distribution", got=str(p.tolist()[:6]), expected="numbers from 0 on, some above 0")
    drawn = samples.flatten().long().cpu()
    if bool((drawn < 0).any()) or bool((drawn >= len(p)).any()):
        raise AssertionError(f"a sample is outside of 0 to {len(p) - 1}: {int(drawn.min())} to {int(drawn.max())}")
    counts = torch.bincount(drawn, minlength=len(p)).double()
    impossible = ((p == 0) & (counts > 0)).nonzero().flatten().tolist()
    if impossible:
        raise AssertionError(f"value {impossible[0]} was drawn {int(counts[impossible[0]])} times and has no chance")
    expected = p / p.sum() * drawn.numel()
    often = expected >= _LEAST
    groups = [(counts[often], expected[often])]
    if float(expected[~often].sum()) > 0:
        groups.append((counts[~often].sum()[None], expected[~often].sum()[None]))
    seen, wanted = (torch.cat(part) for part in zip(*groups, strict=True))
    if len(seen) < 2:
        raise UsageError("too few samples", got=str(drawn.numel()), hint="draw at least ten times the number of values")
    statistic = ((seen - wanted).square() / wanted).sum()
    chance = float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2).double(), statistic / 2))
    if chance < _CHANCE:
        worst = int(((seen - wanted).square() / wanted).argmax())
        value = int(often.nonzero().flatten()[worst]) if worst < int(often.sum()) else "the rare ones"
        text = f"drawn {int(seen[worst])} times, expected {float(wanted[worst]):.0f}"
        raise AssertionError(f"not this distribution (chance {chance:.1g}): value {value} is {text}")
    return chance
