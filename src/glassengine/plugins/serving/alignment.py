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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.func import functional_call

from glassengine.compare.loader import assembled
from glassengine.compare.matching.maps import MapRule, TensorMap, parse_map
from glassengine.errors import UnknownNameError, UsageError
from glassengine.reading.documents import read_document
from glassengine.serving.protocol import ServedWeight, ServingRun

_TABLES = Path(__file__).parent / "tables"
_MOST_BYTES = 1 << 20
_IN_NAME = re.compile(r"\$\{(\w+)\}")


def recorded(layout: str, target: str, run: ServingRun, architecture: str = "decoder", **more: Any) -> dict[str, Any]:
    """Return what the recording of an engine says of itself: `layout` names the table of its names."""
    own = {"kind": "model", "layout": layout, "target": target, "architecture": architecture, "dtype": "float32"}
    sizes = {"prompt_lengths": [len(run.prompt)], "as_deployed": run.as_deployed, "device": ["cpu"]}
    return {**own, **sizes, **more}


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


class Unread(Mapping[str, ServedWeight]):
    """What an engine has for each parameter, read whenever it is asked for: a large model is never held twice.

    Args:
        readers: Parameter -> what reads it.
    """

    def __init__(self, readers: Mapping[str, Callable[[], ServedWeight]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> ServedWeight:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


@torch.no_grad()
def adds_one(module: nn.Module, name: str) -> bool:
    """Whether a parameter is the gain of a norm less 1: of -1 its module makes zeros, of 0 it does not."""
    path, _, own = name.rpartition(".")
    norm = module.get_submodule(path)
    parameters = dict(norm.named_parameters())
    if own not in parameters or any(one.dim() != 1 for one in parameters.values()):
        return False
    zeros = {key: torch.zeros_like(one) for key, one in parameters.items()}
    given = torch.linspace(1.0, 2.0, parameters[own].numel(), dtype=parameters[own].dtype)[None]
    try:
        made = [functional_call(norm, zeros | {own: zeros[own] + gain}, (given,)) for gain in (-1, 0)]
    except Exception:  # it is no norm, and its own code may raise anything
        return False
    return all(isinstance(one, Tensor) for one in made) and not made[0].any() and bool(made[1].any())


def as_parameter(
    stored: tuple[str, ...],
    rule: MapRule | None,
    values: Sequence[Tensor],
    steps: Sequence[Tensor | None],
    types: tuple[str, ...],
    parameter: Tensor,
    *,
    tied: bool = False,
) -> ServedWeight:
    """Return what an engine has for a parameter, in its layout.

    Args:
        stored: Names of the engine's tensors.
        rule: Of the table; None for one tensor as it is.
        values: In float32.
        steps: Of each element of each tensor that is quantized.
        types: How they are stored.
        parameter: The checkpoint's.
        tied: Whether it is read from another parameter's tensor.
    """
    made = _made(rule, list(values))
    step = None
    if any(one is not None for one in steps):
        whole = [torch.zeros_like(v) if s is None else s for v, s in zip(values, steps, strict=True)]
        step = _made(_without_values(rule), whole)
    if (
        made.shape != parameter.shape
        and made.numel() == parameter.numel()
        and made.squeeze().shape == parameter.squeeze().shape
    ):
        made = made.reshape(parameter.shape)
        step = None if step is None else step.reshape(parameter.shape)
    adds = rule is not None and any(op.op == "add" for op in rule.candidate_ops)
    room = max(float(value.abs().max()) for value in values) * 2.0**-23 if adds else 0.0
    return ServedWeight(stored, made, step, types, tied=tied, room=room)


def _made(rule: MapRule | None, values: list[Tensor]) -> Tensor:
    if rule is None:
        return values[0]

    def lookup(name: str) -> Tensor:
        raise UsageError("rules of weights look nothing up", got=name)

    try:
        return assembled(rule, [(value, lookup) for value in values])
    except UsageError:
        return values[0]  # of another shape than the rule is for: that shows


def _without_values(rule: MapRule | None) -> MapRule | None:
    """Return the rule for steps: numbers that are added do not change them."""
    if rule is None:
        return None
    return replace(rule, candidate_ops=tuple(op for op in rule.candidate_ops if op.op != "add"))
