"""Lists what differs between the environments of two sides, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
