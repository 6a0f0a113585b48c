"""Sentences about results: what a comparison has found, and how two environments differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from textwrap import shorten
from typing import Any

from glassengine.sites import parts_of_line

_LONGEST_NAME = 60
_LONGEST_CODE, _LONGEST_SAME = 80, 30
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


def codes_apart(found: Any) -> tuple[str, str] | None:
    """Return the code of the lines of both sides, in short; None where one is unknown, or they are the same."""
    codes = [parts_of_source(source or "")[1] for source in (found.source, found.candidate_source)]
    # A long line begins shortly before the two differ.
    same = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*codes, strict=False)))
    start = same - _LONGEST_SAME if max(map(len, codes)) > _LONGEST_CODE else 0
    ours, theirs = (
        shorten(f"...{code[start:]}" if start > 0 else code, _LONGEST_CODE, placeholder=" ...") for code in codes
    )
    return (ours, theirs) if ours and theirs and ours != theirs else None


def lines_of(found: Any) -> str:
    """Return ": the baseline has `x.mean(0)`, the candidate `x.sum(0)`", if the lines differ; of a proof nothing."""
    both = None if found.hints and found.hints[0].proven else codes_apart(found)
    return "" if both is None else f": the baseline has `{both[0]}`, the candidate `{both[1]}`"


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


_LEFT_OUT = {
    *("command_line", "complete", "flat", "renamed", "arrangements", "platform", "cxx_compiler", "num_cpus"),
    "cpu_flags",
}
"""What says how a run was started, or how it was read, rather than with what it computed."""


def differences(environment: Mapping[str, Any]) -> list[str]:
    """Return "torch 2.11.0 and 2.13.0" of all that both sides know and that is not the same; variables always.

    Args:
        environment: "baseline" and "candidate", as in a comparison.
    """
    return [
        f"{name} {_short(ours)} and {_short(theirs)}"
        for name, ours, theirs in _apart(environment.get("baseline") or {}, environment.get("candidate") or {})
    ]


def _apart(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], *, sparse: bool = False
) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(name), theirs.get(name)
        if name in _LEFT_OUT or one == other:
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _apart(one, other, sparse=name == "variables")
        elif sparse or (one is not None and other is not None):
            yield name, one, other


def _short(value: Any) -> str:
    return "unset" if value is None else str(value)[:60]
