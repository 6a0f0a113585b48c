"""Says what a comparison has found in one sentence: the proven mistake, and where it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from glassengine.sites import parts_of_line

_LONGEST_NAME = 60
_OF_OPS = frozenset({"results differ", "differs inside"})
"""Where a wrong op is why a comparison is not ok."""
_SIDES = re.compile(
    r"(?:(?P<what>[^:;]+): (?P<ours>[^:;]+) in the baseline, (?P<theirs>[^;]+?)"
    r"|(?P<one>\w+(?: \(\w+\))?) in the baseline, (?P<other>(?!not )\w+(?: \(\w+\))?))"
    r" in the candidate(?P<origin> \([^)]*\))?(?=;|$)"
)
"""How a hint says what both sides have."""


def named_mistake(result: Any) -> str | None:
    """Return the proven mistake that is why a `Comparison` is not ok, in a sentence.

    Of a backward there is none: which gradients are wrong says more than what an op of autograd lacks.
    """
    found = result.first_divergence
    is_asked = found is not None and found.level != "backward" and result.standing in _OF_OPS
    return mistake(found) if is_asked else None


def sides(hint: Any) -> tuple[str, str] | None:
    """Return what baseline and candidate have, where a proven hint says both."""
    found = _SIDES.match(hint.text) if hint.proven and hint.text.count(" in the baseline") == 1 else None
    if found is None:
        return None
    what = f"{found['what']} " if found["what"] else ""
    return f"{what}{found['ours'] or found['one']}", f"{what}{found['theirs'] or found['other']}"


def mistake(found: Any) -> str | None:
    """Return the mistake of an op in a sentence, with the candidate's line; None where none is proven.

    "scale of attention in layers.2 is 0.19, should be 0.18 (proven): port.py:41"
    """
    if not found.hints or not found.hints[0].proven:
        return None
    text: str = found.hints[0].text
    module = found.site.rpartition("/")[0].removesuffix(":backward")
    place = "" if module in ("", ".") else f" in {module}"
    sides = _SIDES.match(text)
    if sides is None or text.count(" in the baseline") > 1:
        text += f",{place}" if place else ""
    elif sides["what"]:
        text = f"{sides['what']}{place} is {sides['theirs']}{sides['origin'] or ''}, should be {sides['ours']}"
    else:
        text = f"{sides['other']} in place of {sides['one']}{place}"
    own = found.candidate_source if found.candidate_source != found.source else None
    return f"{text} (proven)" + (f": {place_of(own)}" if own else "")


def short(name: str) -> str:
    """Return the end of a long path, which tells two of them apart; `--json` has all of it."""
    return name if len(name) <= _LONGEST_NAME else f"...{name[-_LONGEST_NAME + 3 :]}"


def parts_of_source(source: str) -> tuple[str, str]:
    """Return (place, code) of "file:line: code"; what names no line is a place."""
    found = parts_of_line(source)
    return (source, "") if found is None else (f"{found[0]}:{found[1]}", found[2])


def place_of(source: str) -> str:
    """Return "file:line" of "file:line: code": below the working directory, or the end of a long path."""
    path, here = Path(parts_of_source(source)[0]), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else short(str(path))
