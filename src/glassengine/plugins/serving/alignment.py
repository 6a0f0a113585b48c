"""Aligns the tensors of a serving engine with those of the program: tables, in the format of `--map`.

A table is a file `tables/<layout>/<name>.json`:

    {"schema_version": 1,
     "architectures": ["llama"],                                what the engine calls the kinds of model it is for
     "includes": ["common"],                                    other tables ("vllm/decoder"), whose rules come first
     "weights": [{"baseline": "*.q_proj.weight", ...}],         parameters of the checkpoint -> the engine's tensors
     "rules": [{"baseline": "model.layers.*.mlp/mul.0", ...}],  sites of the program -> tensors of a recording
     "rounded": {"model.layers.*.mlp/mul.0": "float16"},        what the engine's kernel rounds to inside of an op
     "cannot_show": {"model.layers.*.mlp.experts": "why"},
     "deployed": "float16",                                     what its kernels round to as deployed; none by default
     "choices": ["K and V are cast to float16"],                what is otherwise as deployed
     "ranks": {"*.qkv_proj/out.0": "qkv"}}                      what ranks have parts of, and how they are joined

In rules a text "$heads" stands for a number of the checkpoint's configuration (`numbers_of`), and "${layers}" in a name
for its digits. Rules of tables are optional: engines differ from version to version.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from glassengine.compare.matching.maps import MapRule, TensorMap, parse_map
from glassengine.errors import UnknownNameError, UsageError
from glassengine.reading.documents import read_document

_TABLES = Path(__file__).parent / "tables"
_MOST_BYTES = 1 << 20
_IN_NAME = re.compile(r"\$\{(\w+)\}")


class TableFile(msgspec.Struct, forbid_unknown_fields=True):
    """A table as it is written."""

    schema_version: int
    architectures: list[str] = []
    includes: list[str] = []
    weights: list[dict[str, Any]] = []
    rules: list[dict[str, Any]] = []
    rounded: dict[str, str] = {}
    cannot_show: dict[str, str] = {}
    deployed: str | None = None
    choices: list[str] = []
    ranks: dict[str, str] = {}


@dataclass
class AlignmentTable:
    """What is known of one engine and kind of model, with the numbers of a checkpoint filled in."""

    weights: tuple[MapRule, ...] = ()
    rules: TensorMap | None = None
    rounded: Mapping[str, str] = field(default_factory=dict)
    cannot_show: Mapping[str, str] = field(default_factory=dict)
    deployed: str | None = None
    choices: Sequence[str] = ()
    ranks: Mapping[str, str] = field(default_factory=dict)


EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
"""What configurations call the epsilon of their norms."""


def table_of(layout: str, architecture: str, numbers: Mapping[str, int | None]) -> AlignmentTable:
    """Return the table of an engine's layout for a kind of model.

    Args:
        layout: Of the recording: "ggml".
        architecture: As the engine calls it.
        numbers: What `$name` stands for.

    Raises:
        UnknownNameError: There is no table.
    """
    folder = require_layout(layout)
    files = {path.stem: read_document(path, TableFile, most=_MOST_BYTES) for path in sorted(folder.glob("*.json"))}
    name = next((name for name, one in files.items() if architecture in one.architectures), None)
    if name is None:
        known = [known for one in files.values() for known in one.architectures]
        hint = "glass record CANDIDATE -o REC, and name its tensors: --candidate REC --map FILE"
        raise UnknownNameError(f"architecture of {layout}", architecture, sorted(known), hint=hint)
    chain = [_included(files, other) for other in files[name].includes] + [files[name]]
    place = f"the table {layout}/{name}"
    weights = [rule for one in chain for rule in _rules(one.weights, numbers, place)]
    rules = [rule for one in chain for rule in _rules(one.rules, numbers, place)]
    return AlignmentTable(
        weights=tuple(weights),
        rules=TensorMap(tuple(rules)) if rules else None,
        rounded={key: value for one in chain for key, value in one.rounded.items()},
        cannot_show={key: value for one in chain for key, value in one.cannot_show.items()},
        deployed=next((one.deployed for one in reversed(chain) if one.deployed is not None), None),
        choices=[choice for one in chain for choice in one.choices],
        ranks={key: value for one in chain for key, value in one.ranks.items()},
    )


def _included(files: Mapping[str, TableFile], name: str) -> TableFile:
    layout, _, own = name.rpartition("/")
    return files[own] if not layout else read_document(_TABLES / layout / f"{own}.json", TableFile, most=_MOST_BYTES)


def require_layout(layout: str) -> Path:
    """Return the folder of the tables of a layout.

    Raises:
        UnknownNameError: There are none.
    """
    if layout not in layouts():
        raise UnknownNameError("layout", layout, layouts(), hint="--layout, or names of your own: --map FILE")
    return _TABLES / layout


def layouts() -> list[str]:
    """Return the layouts that there are tables of."""
    return sorted(path.name for path in _TABLES.iterdir())


def _rules(rules: Sequence[Mapping[str, Any]], numbers: Mapping[str, int | None], place: str) -> tuple[MapRule, ...]:
    if not rules:
        return ()
    filled = [_filled({"optional": True, **rule}, numbers) for rule in rules]
    known = [rule for rule in filled if rule is not None]
    return parse_map({"rules": known}, place).rules if known else ()


class _NotKnown(Exception):
    """A number that the checkpoint does not have: the rule is for others."""


def _filled(rule: dict[str, Any], numbers: Mapping[str, int | None]) -> dict[str, Any] | None:
    def number(name: str) -> int:
        found = numbers.get(name)
        if found is None:
            raise _NotKnown(name)
        return found

    def fill(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("$") and not value.startswith("${"):
            return number(value[1:])
        if isinstance(value, str):
            return _IN_NAME.sub(lambda found: str(number(found[1])), value)
        if isinstance(value, list):
            return [fill(item) for item in value]
        return {key: fill(item) for key, item in value.items()} if isinstance(value, dict) else value

    try:
        filled: dict[str, Any] = fill(rule)
    except _NotKnown:
        return None
    return filled


def numbers_of(config: Any) -> dict[str, int | None]:
    """Return the numbers of a checkpoint's configuration that tables name.

    heads, kv_heads, head_dim, rotated (of a head), q_width, kv_width (of all heads), hidden, inner, experts, layers,
    last (the number of the last layer).

    Raises:
        UsageError: It has no number of heads.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def first(*names: str) -> int | None:
        found = (getattr(text, name, None) for name in names)
        return next((int(value) for value in found if isinstance(value, int) and not isinstance(value, bool)), None)

    heads, hidden = first("num_attention_heads", "n_head"), first("hidden_size", "n_embd")
    if heads is None or hidden is None:
        raise UsageError("the checkpoint's configuration names no heads", got=type(config).__name__)
    kv_heads = first("num_key_value_heads") or heads
    head_dim = first("head_dim") or hidden // heads
    rope = getattr(text, "rope_parameters", None)
    share = rope.get("partial_rotary_factor", 1.0) if isinstance(rope, dict) else 1.0
    inner = first("intermediate_size", "n_inner") or 4 * hidden
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotated": math.floor(head_dim * share) if isinstance(share, (int, float)) else head_dim,
        "q_width": heads * head_dim,
        "kv_width": kv_heads * head_dim,
        "hidden": hidden,
        "inner": inner,
        "experts": first("num_local_experts", "num_experts"),
        "expert_inner": first("moe_intermediate_size", "intermediate_size"),
        "last": (first("num_hidden_layers", "n_layer") or 0) - 1,
        "layers": first("num_hidden_layers", "n_layer"),
    }
