"""Globs that remember what their wildcards stood for: `layers.*.mlp` -> `h.*.ffn`.

The patterns are those of `glassengine.sites.matches`: a glob of the whole name or of a suffix that starts after a dot,
or `re:` and a regular expression. The wildcards of the second pattern take what those (or the groups) of the first
stood for, in order; `{2}` takes the second.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable, Iterator, Sequence

from glassengine.errors import UsageError

_WILDCARD = re.compile(r"[*?]|\{([1-9]\d?)\}")


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
        for glob in _globs(pattern):
            found = glob.fullmatch(name, start)
            if found is not None:
                yield found.groups()


def num_captures(pattern: str) -> int:
    """Return how many wildcards or groups `pattern` has."""
    return (_regex(pattern) if pattern.startswith("re:") else _globs(pattern)[0]).groups


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


@functools.lru_cache(maxsize=256)
def _globs(pattern: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return two expressions with a group per wildcard: within a component of a path, and across components."""
    # As in `glassengine.sites`: the brackets of `[0]`, `[?]` and `[*]` are those of a port.
    pattern = re.sub(r"\[(\d+|[*?])\]", r"[[]\1]", pattern)
    tight, loose = "", ""
    i = 0
    while i < len(pattern):
        # The first character of a class is never its end.
        end = pattern.find("]", i + (3 if pattern[i + 1 : i + 2] == "!" else 2)) if pattern[i] == "[" else -1
        if end > 0:
            one = _class(pattern[i : end + 1])
            tight, loose = tight + one, loose + one
            i = end + 1
            continue
        tight += {"*": "([^./]*)", "?": "([^./])"}.get(pattern[i], re.escape(pattern[i]))
        loose += {"*": "(.*)", "?": "(.)"}.get(pattern[i], re.escape(pattern[i]))
        i += 1
    return re.compile(tight, re.DOTALL), re.compile(loose, re.DOTALL)


def _class(text: str) -> str:
    """Return the expression of `[seq]`: a wildcard, except `[[]`, which is one bracket."""
    if text == "[[]":
        return r"\["
    whole = fnmatch.translate(text)
    return f"({whole[whole.index(':') + 1 : whole.rindex(')')]})"
