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
from glassengine.program.inputs.observe import Use
from glassengine.program.inputs.values import Made, Spec, has_masks, make, plainest
from glassengine.program.kinds.example_inputs import MadeUp
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
        run: Runs it on inputs by name and returns its results.
        uses: Runs it on inputs by name and returns what it does with them.
        limits: Least and largest of dynamic sizes.
        known: Dynamic sizes that are known to be taken.
        plain: Inputs of these sizes that are taken.
    """

    name: str
    ports: tuple[Port, ...]
    run: Callable[[Values], Any]
    uses: Callable[[Values], dict[str, Use]]
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
            uses = self._target.uses(plain)
        except Exception:  # of ops that only their own runtime knows
            uses = {}
        uses = {port.name: uses.get(port.name, Use()) for port in self._target.ports}
        made = [self._telling(plan, uses, 0, plain)]
        plans = [plan]
        for other in self._sizes.others(plan) if self._sizes.is_dynamic else ():
            if self._is_late or (found := self._plain_inputs(other)) is None:
                continue
            plans.append(other)
            made.append(self._telling(other, uses, 1, found))
            break
        masks = any(has_masks(self._spec(port, plan), uses[port.name]) for port in self._target.ports)
        choices = any(self._spec(port, plan).numel == 1 and uses[port.name].constants for port in self._target.ports)
        if len(made) == 1 and (masks or choices):
            made.append(self._telling(plan, uses, 1, plain))
        steps = MadeUp({name: one.value for name, one in step.items()} for step in made)
        steps.recipes = {
            name: "; then ".join(dict.fromkeys(step[name].recipe for step in made)) for name in made[0] if made
        }
        return steps

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self._ends

    def _spec(self, port: Port, plan: Mapping[str, int]) -> Spec:
        return Spec(getattr(torch, port.dtype), self._sizes.shape(port, plan))

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
        if any(size < 0 for spec in specs.values() for size in spec.shape):
            return None
        numbers = _PLAIN if any(spec.is_whole for spec in specs.values()) else _PLAIN[:1]
        for number in numbers:
            generator = torch.Generator().manual_seed(0)
            values = {name: plainest(spec, number, generator).value for name, spec in specs.items()}
            if self._is_taken(values):
                return values
        return None

    def _telling(self, plan: Mapping[str, int], uses: Mapping[str, Use], step: int, plain: Values) -> dict[str, Made]:
        """Return the values that the recipes say; those that are refused are replaced, one input at a time."""
        specs = {port.name: self._spec(port, plan) for port in self._target.ports}
        generator = torch.Generator().manual_seed(step)
        wanted = {name: make(spec, uses[name], step, generator) for name, spec in specs.items()}
        if self._is_taken({name: one.value for name, one in wanted.items()}):
            return wanted
        for attempt in self._weaker(specs, wanted, uses, step, plain):
            if self._is_taken({name: one.value for name, one in attempt.items()}):
                return attempt
        return {name: Made(value, "plain numbers: the model accepts no other value") for name, value in plain.items()}

    def _weaker(
        self,
        specs: Mapping[str, Spec],
        wanted: Mapping[str, Made],
        uses: Mapping[str, Use],
        step: int,
        plain: Values,
    ) -> Iterator[dict[str, Made]]:
        """Yield inputs that ask less: fewer different numbers in one of them, then in all."""
        generator = torch.Generator().manual_seed(step)
        fallbacks: dict[str, list[Made]] = {}
        for name, spec in specs.items():
            fallbacks[name] = []
            if spec.is_whole and spec.dtype is not torch.bool:
                for bound in (64, 8, 2):
                    fallbacks[name].append(make(spec, Use(bound=bound), step, generator))
                ones = torch.ones(spec.shape, dtype=spec.dtype)
                fallbacks[name].append(Made(ones, "all 1: the model takes no other numbers"))
            kept = "plain numbers: the model takes no others"
            fallbacks[name].append(Made(plain[name], kept))
        for name, others in fallbacks.items():
            for one in others:
                yield {**wanted, name: one}
        for level in range(5):
            yield {name: others[min(level, len(others) - 1)] for name, others in fallbacks.items()}
        # As many as possible as they should be.
        chosen = {name: others[-1] for name, others in fallbacks.items()}
        for name in specs:
            for one in (wanted[name], *fallbacks[name]):
                if self._is_taken({key: made.value for key, made in {**chosen, name: one}.items()}):
                    chosen[name] = one
                    break
        yield chosen

    def _is_taken(self, values: Values) -> bool:
        try:
            results = self._target.run({name: value.clone() for name, value in values.items()})
        except Exception as error:  # a runtime, or the model's own code, may raise anything
            self._failure = error
            return False
        leaves = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        return any(leaf.numel() for leaf in leaves)


def no_inputs(name: str, ports: Sequence[Port], failure: Exception | None) -> UsageError:
    """Return what to say where nothing can be made up: what is missing, and how to give it.

    Args:
        name: Of the model.
        ports: What it takes.
        failure: What the last try ended with.
    """
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
