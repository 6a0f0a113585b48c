"""Puts the verdicts on collectives beside those on ops: a sum of terms that are right may itself be wrong."""

from __future__ import annotations

from glassengine.judge.cases import Case
from glassengine.judge.verdict.score import Score
from glassengine.results import Divergence, Pair, Verdict


def judge_collectives(score: Score, case: Case, step: int) -> None:
    """Add a pair for each collective of a step, and a divergence for the first of a node that is beyond its bound."""
    for one in score.side.collectives():
        ratios = one.bound_ratios()
        worst, site = max(ratios), score.program.sites.by_node[one.node][0]
        verdict: Verdict = "identical" if worst == 0 else "rounding" if worst <= 1 else "wrong"
        name, rung = f"{site.name}:all_reduce", score.side.rung
        score.pairs.append(
            Pair(
                step=step,
                site=name,
                candidate_site=one.name,
                method="name",
                confidence=1.0,
                verdict=verdict,
                judged_by="bound of a sum",
                figures=None,
                noise_ratio=None,
                bound_ratio=worst,
                rung=rung,
                case=case.name,
                dtype=str(one.terms[0].dtype).removeprefix("torch."),
                shape=tuple(one.terms[0].shape),
            )
        )
        if verdict == "wrong":
            wrong = [rank for rank, ratio in enumerate(ratios, one.first_rank) if ratio > 1]
            found = Divergence(
                rung=rung,
                step=step,
                site=name,
                node=one.node,
                candidate_site=one.name,
                source=site.source,
                verdict=verdict,
                noise_ratio=None,
                bound_ratio=worst,
                introduced=None,
                inherited=None,
                rank=wrong[0] if len(wrong) == 1 and len(ratios) > 1 else None,
            )
            score.divergences.setdefault(name, found)
