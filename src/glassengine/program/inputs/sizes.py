"""Sizes of dynamic dimensions: which a model takes is found by trying."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from glassengine.program.representation.program import Port

_TERM = re.compile(r"[+\-*]|[^\s+\-*]+")
_UNKNOWN = ("", "?")

_PLANS = (
    # batch, length, height, width: odd and unequal ones first, which show the most
    (2, 7, 64, 96),
    (2, 8, 64, 64),
    (1, 8, 64, 64),
    (2, 32, 128, 128),
    (1, 32, 96, 96),
    (2, 64, 224, 224),
    (1, 64, 224, 224),
    (2, 2, 32, 32),
    (1, 1, 32, 32),
    (1, 128, 256, 256),
    (1, 256, 320, 320),
    (1, 512, 480, 480),
    (1, 1024, 512, 512),
    (1, 1600, 640, 640),
    (1, 4096, 384, 384),
    (1, 16000, 299, 299),
)
_ALONE = (1, 2, 3, 4, 8, 16, 32, 64, 100, 128, 256, 512)
"""Sizes of one dimension that are tried while the others keep theirs."""
_MOST_TOGETHER = 2
"""Dimensions that are tried in every combination."""


@dataclass(frozen=True)
class Sizes:
    """The dynamic sizes of a program's inputs.

    Attributes:
        ports: The inputs.
        limits: Least and largest size of a name, where they are known.
        symbols: Name of each free size -> (number of dimensions of the first input that has it, axis there).
    """

    ports: tuple[Port, ...]
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    symbols: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for port in self.ports:
            for axis, size in enumerate(port.shape):
                for name in self._names(port, axis, size):
                    self.symbols.setdefault(name, (len(port.shape), axis))

    @property
    def is_dynamic(self) -> bool:
        """Whether there are any."""
        return bool(self.symbols)

    def plans(self) -> Iterator[dict[str, int]]:
        """Yield sizes to try, the most telling first."""
        seen: set[tuple[int, ...]] = set()
        for plan in itertools.chain(self._by_role(), self._each_alone()):
            bounded = {name: self._within(name, size) for name, size in plan.items()}
            if tuple(bounded.values()) not in seen:
                seen.add(tuple(bounded.values()))
                yield bounded
            if not bounded:
                return

    def others(self, plan: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """Yield sizes that differ from `plan`, as much of it as possible first."""

        def changed(names: Sequence[str], by: float) -> dict[str, int]:
            grown = {name: self._within(name, self._grown(name, plan[name], by)) for name in names}
            return {**plan, **grown}

        names = list(self.symbols)
        later = [name for name in names if self.symbols[name][1] > 0]
        batch = [name for name in names if self.symbols[name][1] == 0]
        for group, by in ((names, 1.5), (names, 2), (later, 1.5), (later, 2), (batch, 1.5), *(([n], 2) for n in names)):
            found = changed(group, by)
            if found != dict(plan):
                yield found

    def shape(self, port: Port, plan: Mapping[str, int]) -> tuple[int, ...]:
        """Return the sizes of an input."""
        found = []
        for axis, size in enumerate(port.shape):
            names = self._names(port, axis, size)
            found.append(size if isinstance(size, int) and not names else _evaluated(size, names, plan))
        return tuple(found)

    def _names(self, port: Port, axis: int, size: int | str) -> list[str]:
        """Return the free sizes that a size is made of."""
        if isinstance(size, int):
            return [] if size > 0 else [f"{port.name}[{axis}]"]
        if size in _UNKNOWN:
            return [f"{port.name}[{axis}]"]
        terms = _TERM.findall(size)
        return [term for term in terms if not term.isdigit() and term not in "+-*"]

    def _by_role(self) -> Iterator[dict[str, int]]:
        for batch, length, height, width in _PLANS:
            plan = {}
            for name, (rank, axis) in self.symbols.items():
                if axis == 0 and rank > 1:
                    plan[name] = batch
                elif rank == 4 and axis > 1:
                    plan[name] = height if axis == 2 else width
                else:
                    plan[name] = length
            yield plan

    def _each_alone(self) -> Iterator[dict[str, int]]:
        base = next(self._by_role())
        if len(self.symbols) <= _MOST_TOGETHER:
            for sizes in itertools.product(_ALONE, repeat=len(self.symbols)):
                yield dict(zip(self.symbols, sizes, strict=True))
        for name in self.symbols:
            for size in _ALONE:
                yield {**base, name: size}

    def _grown(self, name: str, size: int, by: float) -> int:
        rank, axis = self.symbols[name]
        if axis == 0 and rank > 1:
            return size + 1
        grown = max(size + 1, int(size * by))
        # Where a size had to be a multiple of something, so has the next one.
        for step in (32, 8, 2):
            if size % step == 0:
                return -(-grown // step) * step
        return grown

    def _within(self, name: str, size: int) -> int:
        low, high = self.limits.get(name, (1, 1 << 30))
        return min(max(size, low), high)


def _evaluated(size: int | str, names: Sequence[str], plan: Mapping[str, int]) -> int:
    """Return a size: a free one, or a sum or product of such and of numbers, from the left to the right."""
    if isinstance(size, int) or size in _UNKNOWN:
        return plan[names[0]]
    total, sign, product = 0, 1, None
    operator = "+"
    for term in _TERM.findall(size):
        if term in "+-*":
            operator = term
            continue
        value = int(term) if term.isdigit() else plan[term]
        if operator == "*" and product is not None:
            product *= value
            continue
        total += sign * (product or 0)
        sign, product = (-1 if operator == "-" else 1), value
    return max(0, total + sign * (product or 0))
