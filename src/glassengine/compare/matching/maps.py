"""The file of `--map`: which tensors of the baseline correspond to which of the candidate, and in which layout.

    {"schema_version": 1, "rules": [
      {"baseline": "layers.*.mlp", "candidate": "h.*.ffn"},
      {"baseline": "layers.*.q_proj", "candidate": "h.*.qkv",
       "candidate_ops": [{"op": "split", "dim": -1, "parts": 3, "index": 0}]},
      {"baseline": "layers.*.gate_up_proj", "candidate": ["h.*.gate", "h.*.up"], "concat_dim": -1}]}

`baseline` is a glob or `re:`; the wildcards of `candidate` take what its wildcards stood for
(`compare.matching.globs`). The operations are those of `compare.matching.layouts`; those of the candidate come before
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

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassengine.compare.matching.globs import num_captures, wildcards
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

    Args:
        data: What JSON says.
        where: Where that is, for messages.

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
    there = num_captures(rule.baseline)
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
