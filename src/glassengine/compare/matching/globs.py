"""Globs that remember what their wildcards stood for: `layers.*.mlp` -> `h.*.ffn`.

The patterns are those of `glassengine.sites.matches`: a glob of the whole name or of a suffix that starts after a dot,
or `re:` and a regular expression. The wildcards of the second pattern take what those (or the groups) of the first
stood for, in order; `{2}` takes the second.
"""

from __future__ import annotations

import fnmatch
import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence

from glassengine.errors import UsageError

_WILDCARD = re.compile(r"[*?]|\{([1-9]\d?)\}")
_SEPARATOR = re.compile(r"[./]")
_MOST_COMBINATIONS = 20_000
_MOST_CHARACTERS = 4096


def captures(pattern: str, name: str) -> Iterator[tuple[str, ...]]:
    """Yield what the wildcards of `pattern` may stand for in `name`, likeliest first; nothing if it does not match.

    A wildcard is first taken to stay within one component of the path, since `layers.*.mlp` means one layer.

    Raises:
        UsageError: The regular expression is not valid.
    """
    if pattern.startswith("re:"):
        found = _regex(pattern).search(name)
        if found is not None:
            yield tuple(group or "" for group in found.groups())
        return
    starts = [0, *(i + 1 for i, char in enumerate(name.split("/", 1)[0]) if char == ".")]
    for start in starts:
        for within in (True, False):
            groups = _parsed(pattern).groups(name[start:], within)
            if groups is not None:
                yield groups


def num_captures(pattern: str) -> int:
    """Return how many wildcards or groups `pattern` has."""
    return _regex(pattern).groups if pattern.startswith("re:") else _parsed(pattern).num_groups


def wildcards(template: str) -> int:
    """Return how many captures `template` needs."""
    taken = 0
    highest = 0
    for found in _WILDCARD.finditer(template):
        taken += found[1] is None
        highest = max(highest, int(found[1] or 0))
    return max(taken, highest)


def substitute(template: str, captured: Sequence[str]) -> str:
    """Return `template` with its wildcards replaced by `captured`."""
    rest = iter(captured)
    return _WILDCARD.sub(lambda found: captured[int(found[1]) - 1] if found[1] else next(rest), template)


class NameIndex:
    """Names that can be looked up whole or by a suffix that starts after a dot of the path."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(dict.fromkeys(names))
        self._whole = frozenset(self.names)
        self._suffixes: dict[str, list[str]] = {}
        for name in self.names:
            path = name.split("/", 1)[0]
            for i, char in enumerate(path):
                if char == ".":
                    self._suffixes.setdefault(name[i + 1 :], []).append(name)

    def __contains__(self, name: str) -> bool:
        return name in self._whole

    def with_suffix(self, suffix: str) -> list[str]:
        """Return the names that end in `suffix` after a dot."""
        return self._suffixes.get(suffix, [])


@functools.lru_cache(maxsize=256)
def _regex(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern[3:])
    except re.error as error:
        raise UsageError("the pattern is not a valid regular expression", got=f"{pattern!r}: {error}") from error


class _Glob:
    """A glob with a group for each wildcard.

    Args:
        parts: `*`, `?`, or an expression of one character.
    """

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = parts
        self._is_group = [part in ("*", "?") or part.startswith("(") for part in parts]
        self.num_groups = sum(self._is_group)
        self._num_stars = sum(part == "*" for part in parts)
        self._expressions = {
            within: re.compile("".join(_expression(part, within) for part in parts), re.DOTALL)
            for within in (True, False)
        }

    def groups(self, name: str, within: bool) -> tuple[str, ...] | None:
        """Return what the wildcards stand for, the first ones as much as they can; None if `name` does not match.

        Args:
            name: The whole of it.
            within: Whether `*` stays within a component.
        """
        # An expression tries the ends of its wildcards in all combinations.
        if math.comb(len(name) + self._num_stars, self._num_stars) > _MOST_COMBINATIONS:
            return self._walked(name, within)
        found = self._expressions[within].fullmatch(name)
        return None if found is None else found.groups()

    def _walked(self, name: str, within: bool) -> tuple[str, ...] | None:
        """Do what the expression does, in steps as many as parts and characters: bit j says that the rest fits at j."""
        fits = [1 << len(name)]
        breaks = [found.start() for found in _SEPARATOR.finditer(name)] if within else []
        pieces = list(zip([0, *(place + 1 for place in breaks)], [*breaks, len(name)], strict=True))
        at: dict[str, int] = {}
        for part in reversed(self._parts):
            after = fits[-1]
            if part != "*":
                if part not in at:
                    one = re.compile(_expression(part, within), re.DOTALL)
                    fitting = {char: "1" if one.fullmatch(char) else "0" for char in set(name)}
                    at[part] = int("0" + "".join(fitting[char] for char in reversed(name)), 2)
                fits.append((after >> 1) & at[part])
            else:
                # In each piece every place up to the last one from which the rest fits.
                lasts = ((start, _last(after, end)) for start, end in pieces)
                fits.append(sum((1 << (last + 1)) - (1 << start) for start, last in lasts if last >= start))
        fits.reverse()
        if not fits[0] & 1:
            return None
        place, groups = 0, []
        for part, is_group, after in zip(self._parts, self._is_group, fits[1:], strict=True):
            end = _last(after, _end(name, place) if within else len(name)) if part == "*" else place + 1
            if is_group:
                groups.append(name[place:end])
            place = end
        return tuple(groups)


def _expression(part: str, within: bool) -> str:
    any_of = "[^./]" if within else "."
    return {"*": f"({any_of}*)", "?": f"({any_of})"}.get(part, part)


def _end(name: str, place: int) -> int:
    """Return where the component of a path ends in which `place` is."""
    found = _SEPARATOR.search(name, place)
    return len(name) if found is None else found.start()


def _last(places: int, end: int) -> int:
    """Return the last of the places, which are bits, that is not after `end`; -1 if there is none."""
    return (places & ((1 << (end + 1)) - 1)).bit_length() - 1


@functools.lru_cache(maxsize=256)
def _parsed(pattern: str) -> _Glob:
    # As in `glassengine.sites`: the brackets of `[0]`, `[?]` and `[*]` are those of a port.
    pattern = re.sub(r"\[(\d+|[*?])\]", r"[[]\1]", pattern)
    if len(pattern) > _MOST_CHARACTERS:
        raise UsageError("a pattern is too long", got=f"{len(pattern):,} characters", expected=f"{_MOST_CHARACTERS:,}")
    parts: list[str] = []
    i = 0
    while i < len(pattern):
        # The first character of a class is never its end.
        end = pattern.find("]", i + (3 if pattern[i + 1 : i + 2] == "!" else 2)) if pattern[i] == "[" else -1
        if end > 0:
            parts.append(_class(pattern[i : end + 1]))
            i = end + 1
            continue
        parts.append({"*": "*", "?": "?"}.get(pattern[i], re.escape(pattern[i])))
        i += 1
    return _Glob(parts)


def _class(text: str) -> str:
    """Return the expression of `[seq]`: a wildcard, except `[[]`, which is one bracket."""
    if text == "[[]":
        return r"\["
    whole = fnmatch.translate(text)
    return f"({whole[whole.index(':') + 1 : whole.rindex(')')]})"
