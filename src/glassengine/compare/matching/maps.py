"""The file of `--map`: which tensors of the baseline correspond to which of the candidate, and in which layout.

    {"schema_version": 1, "rules": [
      {"baseline": "layers.*.mlp", "candidate": "h.*.ffn"},
      {"baseline": "layers.*.q_proj", "candidate": "h.*.qkv",
       "candidate_ops": [{"op": "split", "dim": -1, "parts": 3, "index": 0}]},
      {"baseline": "layers.*.gate_up_proj", "candidate": ["h.*.gate", "h.*.up"], "concat_dim": -1}]}

`baseline` is a pattern of `glassengine.sites.matches`: a glob of the whole name or of a suffix that starts after a dot,
or `re:` and a regular expression. The wildcards of `candidate` take what its wildcards (or groups) stood for, in order;
`{2}` takes the second. The operations are those of `compare.matching.layouts`; those of the candidate come before
it is concatenated, or (`"sum": true`) added: of a residual stream that is kept as a pair.

What an engine keeps at another place: `"layer_offset": 1` takes the tensor of the next layer (the first wildcard that
is a number), `"step_offset": 1` that of the next step, `"accumulate": 1` all steps up to this one, concatenated along
that dimension (a cache of which each step keeps its own tokens). A rule that is `"optional"` may name nothing: one
table holds for several versions of an engine.

The file of `glass build --add-output @FILE` (and the text of TRTLLM_ADD_OUTPUT), `{"pattern": "alias"}`, is a map too:
either side may have the pattern's names and the other the aliases, numbered `alias_0`, `alias_1`, ... as a build
numbers them.
"""

from __future__ import annotations

import fnmatch
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassengine.compare.matching.layouts import LayoutOperation, parse_operation
from glassengine.errors import GlassError, UsageError, nearest
from glassengine.reading.documents import read_document

SCHEMA_VERSION = 1

_MAX_BYTES = 1 << 24
_KEYS = (
    "baseline",
    "candidate",
    "baseline_ops",
    "candidate_ops",
    "concat_dim",
    "sum",
    "layer_offset",
    "step_offset",
    "accumulate",
    "optional",
    "rank",
)


@dataclass(frozen=True)
class MapRule:
    """One rule of a map.

    Attributes:
        baseline: Pattern of names of the baseline.
        candidates: What each is called in the candidate; several are concatenated.
        baseline_ops: Done to the tensor of the baseline.
        candidate_ops: Done to each tensor of the candidate.
        concat_dim: Where several candidates are put together.
        is_alias: Whether it comes from an alias file.
        rank: The only process whose tensors it names; None for all.
        is_sum: Whether several candidates are added.
        layer_offset: Added to the first wildcard that is a number.
        step_offset: Step of the candidate's tensor less that of the baseline's.
        accumulate: Where the tensors of all steps up to this one are put together; None for this step alone.
        is_optional: Whether it may name nothing.
    """

    baseline: str
    candidates: tuple[str, ...]
    baseline_ops: tuple[LayoutOperation, ...] = ()
    candidate_ops: tuple[LayoutOperation, ...] = ()
    concat_dim: int | None = None
    is_alias: bool = False
    rank: int | None = None
    is_sum: bool = False
    layer_offset: int = 0
    step_offset: int = 0
    accumulate: int | None = None
    is_optional: bool = False

    def __str__(self) -> str:
        return f"{self.baseline!r} -> {', '.join(map(repr, self.candidates))}"


@dataclass(frozen=True)
class TensorMap:
    """Rules in the order of the file."""

    rules: tuple[MapRule, ...]


def load_map(source: str | Path | Mapping[str, Any] | TensorMap) -> TensorMap:
    """Return the map in a file, or in what such a file holds.

    Raises:
        UsageError: There is no such file, or it is not a map.
    """
    if isinstance(source, TensorMap):
        return source
    if isinstance(source, Mapping):
        return parse_map(dict(source), "the map")
    try:
        data = read_document(source, Any, most=_MAX_BYTES, unique=True, what="the map")
    except GlassError as error:
        raise UsageError("the map cannot be read", got=error.got, expected="a JSON file", hint="--map FILE") from error
    return parse_map(data, str(source))


def parse_map(data: object, where: str) -> TensorMap:
    """Return the map that `data` describes.

    Raises:
        UsageError: It is not a map; carries the nearest names.
    """
    if isinstance(data, dict) and isinstance(data.get("rules"), list):
        _require_keys(data, ("schema_version", "rules"), where)
        version = data.get("schema_version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            raise UsageError(f"{where} is written for another version", got=str(version), expected=str(SCHEMA_VERSION))
        rules = tuple(_rule(rule, f"{where}: rule {i}") for i, rule in enumerate(data["rules"]))
    elif isinstance(data, dict) and all(isinstance(alias, str) for alias in data.values()):
        rules = tuple(MapRule(pattern, (alias,), is_alias=True) for pattern, alias in data.items())
        for rule in rules:
            _require_captures(rule, where)
    else:
        raise UsageError(
            f"{where} is not a map",
            got=f"a JSON {type(data).__name__}",
            expected='{"rules": [{"baseline": PATTERN, "candidate": NAME, ...}, ...]} or {PATTERN: ALIAS, ...}',
        )
    if not rules:
        raise UsageError(f"{where} has no rule")
    return TensorMap(rules)


def _rule(data: object, where: str) -> MapRule:
    if not isinstance(data, dict):
        raise UsageError(f"{where} is not an object", got=repr(data)[:200])
    _require_keys(data, _KEYS, where)
    baseline, candidate = data.get("baseline"), data.get("candidate")
    names = [candidate] if isinstance(candidate, str) else candidate
    if not isinstance(baseline, str) or not baseline:
        raise UsageError(f"{where} needs 'baseline', a pattern", got=repr(baseline)[:200])
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"{where} needs 'candidate', a name or a list of names", got=repr(candidate)[:200])
    operations = {}
    for key in ("baseline_ops", "candidate_ops"):
        given = data.get(key, [])
        if not isinstance(given, list):
            raise UsageError(f"{where}: {key!r} is not a list", got=repr(given)[:200])
        operations[key] = tuple(parse_operation(item, f"{where}: {key}[{i}]") for i, item in enumerate(given))
    numbers = {key: data.get(key) for key in ("concat_dim", "layer_offset", "step_offset", "accumulate")}
    flags = {key: data.get(key, False) for key in ("sum", "optional")}
    for key, value in numbers.items():
        if value is not None and type(value) is not int:
            raise UsageError(f"{where}: {key!r} is not an integer", got=repr(value)[:200])
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {key!r} is not true or false", got=repr(value)[:200])
    if (len(names) > 1) != (numbers["concat_dim"] is not None or flags["sum"]):
        raise UsageError(f"{where}: 'concat_dim' goes with several candidates (or 'sum'), and only with them")
    rank = data.get("rank")
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 0):
        raise UsageError(f"{where}: 'rank' is not the number of a rank", got=repr(rank)[:200])
    rule = MapRule(
        baseline,
        tuple(names),
        operations["baseline_ops"],
        operations["candidate_ops"],
        numbers["concat_dim"],
        is_sum=flags["sum"],
        layer_offset=numbers["layer_offset"] or 0,
        step_offset=numbers["step_offset"] or 0,
        accumulate=numbers["accumulate"],
        is_optional=flags["optional"],
        rank=rank,
    )
    _require_captures(rule, where)
    return rule


def _require_keys(data: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in data:
        if key not in known:
            raise UsageError(f"{where} has an unknown key {key!r}", expected=[*nearest(key, known), *known][:6])


def _require_captures(rule: MapRule, where: str) -> None:
    pattern = rule.baseline
    there = _regex(pattern).groups if pattern.startswith("re:") else _parsed(pattern).num_groups
    for name in rule.candidates:
        needed = wildcards(name)
        if needed > there:
            raise UsageError(
                f"{where}: {name!r} has more wildcards than {rule.baseline!r}", got=str(needed), expected=str(there)
            )


def steps_of(rule: MapRule, step: int) -> range:
    """Return the steps of the candidate whose tensors stand for one step of the baseline."""
    last = step + rule.step_offset
    return range(last if rule.accumulate is None else 0, last + 1)


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
