"""Where a number of the reference is written: the value of its model's configuration that it is, or is made of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from glassengine.results import Comparison, Divergence, Hint

_OF_KIND = {
    "eps": ("eps",),
    "position": ("theta", "base"),
    "scale": ("scal", "multiplier", "factor", "head_dim", "softcap"),
    "activation": ("act", "activation"),
    "mask": ("window",),
}
"""Kind of a mistake -> what the names of its values in a configuration have in common."""
_ROOTS = ("head_dim", "query_pre_attn_scalar")
"""Values whose root turned over is the scale of the scores."""
_SAME = 1e-6
_MOST_DEPTH = 3


def with_configuration(result: Comparison, module: Any) -> Comparison:
    """Return a comparison whose hints name the value of the configuration that the baseline's number is.

    Args:
        result: Of a check.
        module: The reference; it may have no configuration.
    """
    values = dict(_values(getattr(module, "config", None)))
    if not values:
        return result

    def named(found: Divergence) -> Divergence:
        return dataclasses.replace(found, hints=tuple(_named(hint, values) for hint in found.hints))

    first, rungs = result.first_divergence, []
    for rung in result.rungs:
        own = rung.first_divergence
        rungs.append(rung if own is None else dataclasses.replace(rung, first_divergence=named(own)))
    return dataclasses.replace(
        result,
        first_divergence=None if first is None else named(first),
        origins=tuple(map(named, result.origins)),
        rungs=tuple(rungs),
    )


def _named(hint: Hint, values: Mapping[str, Any]) -> Hint:
    change = hint.change
    if change is None or change.argument is None or isinstance(change.baseline, (bool, list, type(None))):
        return hint
    name = value_named(change.baseline, hint.kind, values)
    if name is None:
        return hint
    shown = values[name]
    text = f"{hint.text}; the reference has config.{name} = {shown:.6g}" if isinstance(shown, float) else (
        f"{hint.text}; the reference has config.{name} = {shown}"
    )  # fmt: skip
    return dataclasses.replace(hint, text=text, change=dataclasses.replace(change, configured=name))


def value_named(number: Any, kind: str, values: Mapping[str, Any]) -> str | None:
    """Return the one name of a configuration whose value a literal is, for its kind; None where none or several are.

    Args:
        number: A number or a word of the baseline.
        kind: Of the mistake in it.
        values: Name -> value.
    """
    words = _OF_KIND.get(kind, ())
    found = [
        name
        for name, value in values.items()
        if any(word in name.rpartition(".")[2] for word in words) and _is(number, name, value)
    ]
    # One value may be written twice: for the layers and in the part that all of them share.
    return found[0] if len({name.rpartition(".")[2] for name in found}) == 1 else None


def _is(number: Any, name: str, value: Any) -> bool:
    if isinstance(number, str) or isinstance(value, str):
        return bool(number == value)
    # Of a root only the scale is made, and a width alone is none.
    made = value**-0.5 if name.rpartition(".")[2] in _ROOTS and value > 0 else value
    return bool(abs(float(number) - made) <= _SAME * abs(made))


def _values(config: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and words of a configuration, those of its parts by dotted names."""
    held = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
    if not isinstance(held, Mapping) or depth == _MOST_DEPTH:
        return
    for name, value in held.items():
        if not isinstance(name, str) or name.startswith("_"):
            continue
        if isinstance(value, str) or (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        ):
            yield f"{path}{name}", value
        elif isinstance(value, Mapping) or name.endswith("config"):
            yield from _values(value, f"{path}{name}.", depth + 1)
