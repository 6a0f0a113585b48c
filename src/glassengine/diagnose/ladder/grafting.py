"""`glass check --graft-until-clean`: lists all mistakes of a port, by grafting each that is found and judging again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from glassengine.diagnose.ladder.request import CheckRequest
from glassengine.errors import GlassError, UsageError, first_line
from glassengine.judge.sides.protocol import Place
from glassengine.results import FLAGGED, Comparison, Divergence, Policy, with_grafts

_MOST_ROUNDS = 20


def sites_of(grafts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the sites of `SITE=baseline`.

    Raises:
        UsageError: Another word is given.
    """
    for one in grafts:
        if not one.endswith("=baseline") or one == "=baseline":
            raise UsageError("invalid --graft", got=one, expected="SITE=baseline")
    return tuple(one.removesuffix("=baseline") for one in grafts)


def until_clean(request: CheckRequest, check: Callable[[CheckRequest], Comparison]) -> Comparison:
    """Judge, graft every origin, and judge again until no more is found; return the first answer with all mistakes.

    Args:
        request: With the grafts that the user wants.
        check: Judges a request.
    """
    first = result = check(request)
    sites = list(request.grafts)
    found: list[Divergence] = []
    rounds, why = 0, None
    while rounds < _MOST_ROUNDS:
        new = [one for one in result.origins if _is_mistake(one, request.policy) and one.site not in sites]
        if not new:
            break
        found += new
        sites += dict.fromkeys(one.site for one in new)
        rounds += 1
        try:
            result = check(replace(request, grafts=tuple(sites), reproduction=None))
        except GlassError as error:
            why = first_line(error)
            break
    # The module as it is shows fewer tensors: its origin may only pass on what the program shows once it is grafted.
    found = [one for one in found if one.level == Place.CANDIDATE] or found
    later = [one for one in found if one.site not in {origin.site for origin in first.origins}]
    return with_grafts(first, later, _summary(found, result, rounds, why))


def _is_mistake(one: Divergence, policy: Policy) -> bool:
    return one.level in (Place.CANDIDATE, Place.UNTOUCHED) and policy.fails(one.verdict)


def _summary(found: list[Divergence], last: Comparison, rounds: int, why: str | None) -> str:
    if not found:
        return "grafting: no op of the candidate's program is wrong, so that nothing was grafted"
    names = list(dict.fromkeys(one.site for one in found))
    many = f"{len(names)} mistake{'s' if len(names) > 1 else ''}"
    text = f"grafting lists {many} in {rounds} round{'s' if rounds > 1 else ''}: {', '.join(names)}"
    if why is not None:
        return f"{text}; then it ended: {why}"
    if last.verdict in FLAGGED:
        return f"{text}; with the baseline's tensors there something else is still {last.verdict}"
    return f"{text}; with the baseline's tensors there nothing else is wrong"
