"""The flags of a watch over a script: `--watch`, `--trigger KEY=VALUE` and `--tracker NAME`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import glassengine as glass
from glassengine.errors import UnknownNameError, UsageError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SWITCHES = {"yes": True, "no": False, "true": True, "false": False, "1": True, "0": False}
_KINDS: dict[str, str] = {
    "nonfinite": "switch",
    "norm": "factor",
    "loss": "factor",
    "error": "switch",
    "every": "count",
    "file": "text",
    "signal": "text",
    "before": "count",
    "ring": "size",
    "most": "count",
}

Watching = Annotated[
    bool, typer.Option("--watch", help="Script: measure every step, and record values of those only that matter.")
]
Triggers = Annotated[
    list[str] | None,
    typer.Option(
        "--trigger",
        metavar="KEY=VALUE",
        help="With --watch: norm, loss, every, file, signal, nonfinite, error, before, ring, most. Repeatable.",
    ),
]
TrackerNames = Annotated[
    list[str] | None,
    typer.Option("--tracker", metavar="NAME", help="With --watch: tensorboard, wandb or mlflow. Repeatable."),
]


def watch_of(watch: bool, triggers: Sequence[str] | None, trackers: Sequence[str] | None) -> Any:
    """Return the watch that the flags ask for, or None.

    Raises:
        UsageError: A trigger has no value, or one that is not of its kind.
        UnknownNameError: There is no such trigger, signal or tracker.
    """
    if not (watch or triggers or trackers):
        return None
    found: dict[str, Any] = {}
    for text in triggers or ():
        key, equals, value = text.partition("=")
        if key not in _KINDS:
            raise UnknownNameError("trigger", key, _KINDS)
        if not equals or not value:
            raise UsageError("a trigger has no value", got=f"--trigger {text}", expected=f"--trigger {key}=VALUE")
        found["ring_bytes" if key == "ring" else key] = _value(text, _KINDS[key], value)
    return glass.Watch(**found, trackers=tuple(trackers or ()))


def size(flag: str, text: str | None) -> int | None:
    """Return a number of bytes.

    Raises:
        UsageError: It is none.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    if match is None:
        raise UsageError("invalid size", got=f"{flag} {text}", expected="bytes, or as in 500M, 2G")
    return int(float(match[1]) * _UNITS[match[2]])


def _value(text: str, kind: str, value: str) -> Any:
    if kind == "text":
        return value
    if kind == "size":
        return size("--trigger ring =", value)
    if kind == "switch":
        if value.lower() in _SWITCHES:
            return _SWITCHES[value.lower()]
        raise UsageError("invalid trigger", got=f"--trigger {text}", expected="yes or no")
    if value.lower() in ("none", "no"):
        return None
    try:
        return int(value) if kind == "count" else float(value)
    except ValueError:
        expected = "a whole number" if kind == "count" else "a number, or none"
        raise UsageError("invalid trigger", got=f"--trigger {text}", expected=expected) from None
