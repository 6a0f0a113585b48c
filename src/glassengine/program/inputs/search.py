"""Finds inputs that a model accepts: it tries sizes and values on it."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from glassengine.errors import UsageError
from glassengine.program.inputs.observe import Use, uses_of
from glassengine.program.inputs.values import Made, WantedInput, has_masks, make, plainest
from glassengine.program.kinds.example_inputs import MadeUp
from glassengine.program.representation.outputs import size_of
from glassengine.program.representation.program import Port
from glassengine.program.user_code.calls import described

BUDGET = 20.0
"""Seconds after which no other sizes are tried; the first few are always tried."""
_FEWEST = 4
_PLAIN = (0, 1)
"""Whole numbers that are tried first: below the size of any table, and no divisor that is 0."""

Values = dict[str, torch.Tensor]


@dataclass
class Target:
    """What inputs are made for.

    Attributes:
        name: On screen.
        ports: Its inputs: names, dtypes, sizes.
        run: Runs it on inputs by name, which it may change, and returns its results.
        uses: Returns what it does with inputs; None watches a run.
        limits: Least and largest of dynamic sizes.
        known: Dynamic sizes that are known to be taken.
        plain: Inputs of these sizes that are taken.
    """

    name: str
    ports: tuple[Port, ...]
    run: Callable[[Values], Any]
    uses: Callable[[Values], dict[str, Use]] | None = None
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    known: Mapping[str, int] = field(default_factory=dict)
    plain: Values | None = None


def made_up(target: Target) -> MadeUp:
    """Return steps of inputs by name: of two sizes where sizes are dynamic, with and without padding.

    Raises:
        UsageError: Nothing that was tried is taken.
    """
    return _Search(target).steps()


class _Search:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._sizes = Sizes(target.ports, target.limits)
        self._failure: Exception | None = None
        self._ends = time.monotonic() + BUDGET

    def steps(self) -> MadeUp:
        plan, plain = self._first()
        try:
            own, watched = _copies(plain), self._target.uses
            uses = watched(own) if watched is not None else uses_of(lambda: self._target.run(own), own)
        except Exception:  # of ops that only their own runtime knows
            uses = {}
        uses = {port.name: uses.get(port.name, Use()) for port in self._target.ports}
        made = [self._telling(plan, uses, 0, plain)]
        for other in self._sizes.other_sizes(plan):
            if not self._is_late and (found := self._plain_inputs(other)) is not None:
                made.append(self._telling(other, uses, 1, found))
                break
        seen = [(self._spec(port, plan), uses[port.name]) for port in self._target.ports]
        if len(made) == 1 and any(has_masks(spec, use) or (spec.numel == 1 and use.constants) for spec, use in seen):
            made.append(self._telling(plan, uses, 1, plain))
        recipes = {name: "; then ".join(dict.fromkeys(step[name].recipe for step in made)) for name in made[0]}
        return MadeUp(({name: one.value for name, one in step.items()} for step in made), recipes=recipes)

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self._ends

    def _spec(self, port: Port, plan: Mapping[str, int]) -> WantedInput:
        return WantedInput(getattr(torch, port.dtype), self._sizes.shape(port, plan))

    def _first(self) -> tuple[dict[str, int], Values]:
        """Return sizes that are taken, and the plain inputs of these sizes."""
        if self._target.plain is not None and self._is_taken(self._target.plain):
            return dict(self._target.known), self._target.plain
        for tried, plan in enumerate(self._sizes.plans()):
            if self._is_late and tried >= _FEWEST:
                break
            found = self._plain_inputs(plan)
            if found is not None:
                return plan, found
        raise no_inputs(self._target.name, self._target.ports, self._failure)

    def _plain_inputs(self, plan: Mapping[str, int]) -> Values | None:
        specs = {port.name: self._spec(port, plan) for port in self._target.ports}
        numbers = _PLAIN if any(spec.is_whole for spec in specs.values()) else _PLAIN[:1]
        for number in numbers:
            generator = torch.Generator().manual_seed(0)
            values = {name: plainest(spec, number, generator).value for name, spec in specs.items()}
            if self._is_taken(values):
                return values
        return None

    def _telling(self, plan: Mapping[str, int], uses: Mapping[str, Use], step: int, plain: Values) -> dict[str, Made]:
        """Return the values that the recipes say; where they are refused, of each input the most telling ones."""
        specs = {port.name: self._spec(port, plan) for port in self._target.ports}
        generator = torch.Generator().manual_seed(step)
        wanted = {name: make(spec, uses[name], step, generator) for name, spec in specs.items()}
        if self._is_taken({name: one.value for name, one in wanted.items()}):
            return wanted
        chosen = {name: Made(value, "plain numbers: the model accepts no other value") for name, value in plain.items()}
        for name, spec in specs.items():
            for one in (wanted[name], *_weaker(spec, step, generator)):
                if self._is_taken({key: made.value for key, made in {**chosen, name: one}.items()}):
                    chosen[name] = one
                    break
        return chosen

    def _is_taken(self, values: Values) -> bool:
        try:
            results = self._target.run(_copies(values))
        except Exception as error:  # a runtime, or the model's own code, may raise anything
            self._failure = error
            return False
        leaves = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        return any(leaf.numel() for leaf in leaves)


def _copies(values: Values) -> Values:
    return {name: value.clone() for name, value in values.items()}


def _weaker(spec: WantedInput, step: int, generator: torch.Generator) -> Iterator[Made]:
    """Yield values of one input with fewer and fewer different numbers."""
    if spec.is_whole and spec.dtype is not torch.bool:
        for bound in (64, 8, 2):
            yield make(spec, Use(bound=bound), step, generator)
        yield Made(torch.ones(spec.shape, dtype=spec.dtype), "all 1: the model takes no other numbers")


def no_inputs(name: str, ports: Sequence[Port], failure: Exception | None) -> UsageError:
    """Return what to say where nothing can be made up: what is missing, and how to give it."""
    listed = "; ".join(f"{port.name}: {port.dtype} {_written(port)}" for port in ports)
    return UsageError(
        f"give inputs with --inputs: {name} takes none of those that were made up",
        got="nothing was run" if failure is None else described(failure),
        expected=listed or "its keyword arguments",
        hint=f"--inputs file.py:inputs, where file.py is\n{stub(ports)}",
    )


def stub(ports: Sequence[Port]) -> str:
    """Return the text of a factory of inputs, to be filled in."""
    lines = ["import torch", "", "", "def inputs():", "    return {"]
    for port in ports:
        sizes = [size if isinstance(size, int) and size > 0 else 2 for size in port.shape]
        dtype = getattr(torch, port.dtype)
        shape = f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"
        if dtype.is_floating_point or dtype.is_complex:
            made = f"torch.randn({shape}, dtype=torch.{port.dtype})"
        else:
            made = f"torch.randint(0, 2, {shape}).to(torch.{port.dtype})"
        lines.append(f"        {port.name!r}: {made},  # {_written(port)}")
    return "\n".join([*lines, "    }"])


def _written(port: Port) -> str:
    return f"[{', '.join('?' if size in ('', 0, -1) else str(size) for size in port.shape)}]"


_TERM = re.compile(r"[+\-*]|[^\s+\-*]+")
_OPERATORS = ("+", "-", "*", "/", "//")
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

    def other_sizes(self, plan: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """Yield sizes that differ from `plan`, as much of it as possible first."""
        names = list(self.symbols)
        later = [name for name in names if self.symbols[name][1] > 0]
        batch = [name for name in names if self.symbols[name][1] == 0]
        for group, by in ((names, 1.5), (names, 2), (later, 1.5), (later, 2), (batch, 1.5), *(([n], 2) for n in names)):
            changed = {**plan, **{name: self._within(name, self._grown(name, plan[name], by)) for name in group}}
            if changed != plan:
                yield changed

    def shape(self, port: Port, plan: Mapping[str, int]) -> tuple[int, ...]:
        """Return the sizes of an input."""
        found = []
        for axis, size in enumerate(port.shape):
            names = self._names(port, axis, size)
            if isinstance(size, int) or size in _UNKNOWN:
                found.append(plan[names[0]] if names else int(size))
            else:
                # A file may call its sizes anything.
                text = _TERM.sub(lambda term: str(plan.get(term[0], term[0])), size)
                found.append(max(0, size_of(text, {})))
        return tuple(found)

    def _names(self, port: Port, axis: int, size: int | str) -> list[str]:
        """Return the free sizes that a size is made of."""
        if isinstance(size, int):
            return [] if size > 0 else [f"{port.name}[{axis}]"]
        if size in _UNKNOWN:
            return [f"{port.name}[{axis}]"]
        return [term for term in _TERM.findall(size) if not term.isdigit() and term not in _OPERATORS]

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
