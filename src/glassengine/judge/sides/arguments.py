"""Turns the inputs of a baseline into the arguments of a candidate's forward, under any names.

Arguments of one name go together. What is left goes by position where there is one, and by what both forwards do with
it where there are several: the table that it indexes, the convolution that reads it, whether it is a mask. An input
that the candidate does not take may be left out if it has no effect.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from glassengine.errors import IncomparableError
from glassengine.program import LoadedModel
from glassengine.program.inputs.observe import Use, uses_of
from glassengine.program.kinds.causal_lm import is_pretrained
from glassengine.program.kinds.example_inputs import MadeUp
from glassengine.program.representation.signature import named_inputs
from glassengine.program.user_code.calls import described, forward_errors, source_of
from glassengine.program.user_code.forward import forward_parameters
from glassengine.program.user_code.module_state import run_alone

Step = Mapping[str, Any]

CACHE = "use_cache"
"""What tells a model of transformers to return a cache or none."""


@dataclass(frozen=True)
class Arguments:
    """Which argument of a forward each input of a step becomes.

    Attributes:
        names: Input -> argument.
        fixed: Arguments with a value of their own.
        own: Arguments that are made for this forward alone, as inputs of each step.
    """

    names: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = ()

    def of(self, step: Step) -> dict[str, Any]:
        """Return the keyword arguments for a step."""
        return {**{theirs: step[ours] for ours, theirs in self.names.items() if ours in step}, **self.fixed}

    def ours(self, port: str) -> str:
        """Return what the steps call an input of the candidate's program: "x" of "idx", "pair[0]" of "both[0]"."""
        for ours, theirs in self.names.items():
            if is_of(port, theirs):
                return ours + port[len(theirs) :]
        return port


def without_cache(module: nn.Module, step: Step) -> dict[str, Any]:
    """Return a step in which a model of transformers returns no cache: one forward is judged."""
    return {CACHE: False, **step} if CACHE in forward_parameters(module) else dict(step)


def is_of(port: str, name: str) -> bool:
    """Whether a tensor is an argument, or a part of it: "both[0]" of "both"."""
    return port == name or port.startswith((f"{name}[", f"{name}."))


_GUESS = 20
"""What speaks against giving an argument something for no reason."""


def likeness(pairs: Mapping[str, tuple[Use, Use]], optional: Collection[str]) -> int:
    """Return how much speaks for an assignment of inputs to arguments.

    Args:
        pairs: Argument -> what the candidate does with it, and the baseline with the input that it is given.
        optional: Arguments that the forward can do without: they are given only what both do the same with.
    """
    guesses = sum(1 if _is_evidence(*pairs[name]) else -_GUESS for name in pairs if name in optional)
    return guesses + sum(_alike(one, other) for one, other in pairs.values())


def _is_evidence(one: Use, other: Use) -> bool:
    """Whether both forwards do something telling with an input, and the same."""
    return any(a is not None and a == b for a, b in ((one.bound, other.bound), (one.convolved, other.convolved))) or (
        one.is_mask and other.is_mask
    )


def _alike(one: Use, other: Use) -> int:
    """Return how much speaks for two inputs being one: what reads them weighs most."""
    same = 0
    for a, b in ((one.bound, other.bound), (one.convolved, other.convolved)):
        same += 4 if a is not None and a == b else -4 if (a is None) != (b is None) else 0
    same += 2 if one.is_mask == other.is_mask else -2
    # What the candidate does not look at is not what the baseline reads.
    same -= 3 if other.is_read and not one.is_read else 0
    return same + (one.is_data == other.is_data) + (one.is_summed == other.is_summed)


def without_inputs(steps: Sequence[Step], names: Sequence[str], baseline: LoadedModel, takes: str) -> Sequence[Step]:
    """Return steps in which inputs that the candidate does not take have no effect.

    Args:
        steps: Inputs of the baseline.
        names: Those that the candidate does not take.
        baseline: Whose inputs they are.
        takes: What the candidate takes, for the message.

    Raises:
        IncomparableError: They do.
    """
    module = baseline.module
    if isinstance(steps, MadeUp) and all(_is_mask(step[name]) for step in steps for name in names):
        silent = [step for step in steps if all(_is_all_ones(step[name]) for name in names)]
        steps = _like(steps, silent or [{**step, **{n: torch.ones_like(step[n]) for n in names}} for step in steps])
    fewer = _like(steps, [{name: value for name, value in step.items() if name not in names} for step in steps])
    if all(_says_nothing(module, step, less) for step, less in zip(steps, fewer, strict=True)):
        return fewer
    if isinstance(steps, MadeUp):
        if baseline.stored is not None and all(_is_all_ones(step[name]) for step in steps for name in names):
            return steps
        with contextlib.suppress(Exception):
            for step in fewer:
                run_alone(module, step)
            return fewer
    raise IncomparableError(
        "the candidate does not take all inputs of the baseline",
        got=takes,
        expected=f"an argument for {', '.join(names)}",
        hint="give inputs without it (--inputs), or make it an argument of the candidate's forward",
    )


def _says_nothing(module: nn.Module, step: Step, fewer: Step) -> bool:
    try:
        with_all, without = run_alone(module, step), run_alone(module, fewer)
    except Exception:  # of a forward that insists on them
        return False
    pairs = zip(_tensors(with_all), _tensors(without), strict=False)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs)


def _is_mask(value: Any) -> bool:
    is_whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return is_whole and bool(((value == 0) | (value == 1)).all())


def _is_all_ones(value: Any) -> bool:
    return _is_mask(value) and bool((value == 1).all())


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the floating-point results of a forward: another rounding of a kernel for masks is not another result."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _like(steps: Sequence[Step], changed: Sequence[Step]) -> Sequence[Step]:
    """Return other steps, made up where `steps` were."""
    if not isinstance(steps, MadeUp):
        return changed
    return MadeUp(map(dict, changed), recipes=steps.recipes, origin=steps.origin)


_MOST_TRIED = 48
_MADE: list[Any] = [0, "positions", None, False]
"""What an argument that has no input may be: a start, positions, or nothing."""
_SEVERAL = 4
"""Arguments that are tried in any order."""


@dataclass(frozen=True)
class _Parameter:
    name: str
    is_required: bool
    is_number: bool


def matched(baseline: LoadedModel, candidate: LoadedModel, steps: Sequence[Step]) -> tuple[Sequence[Step], Arguments]:
    """Return the steps that both can run, and what the candidate makes of them.

    Args:
        baseline: A plain module, or what is judged as one.
        candidate: Likewise.
        steps: Inputs of the baseline.

    Raises:
        IncomparableError: The candidate takes other inputs than there are.
    """
    return _Match(baseline, candidate, steps).resolved()


class _Match:
    def __init__(self, baseline: LoadedModel, candidate: LoadedModel, steps: Sequence[Step]) -> None:
        self._baseline, self._candidate, self._steps = baseline, candidate, steps
        self._failure: Exception | None = None
        self._parameters, self._takes_any = _parameters(candidate)

    def resolved(self) -> tuple[Sequence[Step], Arguments]:
        known = {parameter.name for parameter in self._parameters}
        first = self._steps[0]
        named = [name for name in first if name in known]
        leaves = {name: pytree.tree_leaves(value) for name, value in first.items() if name not in known}
        free = [name for name, parts in leaves.items() if any(isinstance(part, torch.Tensor) for part in parts)]
        renamed: dict[str, str] = {}
        missing = [p for p in self._parameters if p.is_required and p.name not in first]
        numbers = [name for name, one in first.items() if isinstance(one, (int, float)) and not isinstance(one, bool)]
        for name in (name for name in numbers if name not in known):
            # A number goes to the first argument that is one, or else to the last that nothing is known of.
            places = [p for p in missing if p.is_number] or (missing[-1:] if len(missing) > len(free) else [])
            if places:
                missing.remove(places[0])
                renamed[name] = places[0].name
        fixed = {CACHE: False} if CACHE in known and CACHE not in first else {}
        base = Arguments({**{name: name for name in named}, **renamed}, fixed)
        if self._takes_any and not missing:
            return self._steps, self._of_any(Arguments({name: name for name in first}, fixed), base, free)
        if not missing and not free:
            return self._steps, base
        arguments = self._best(base, free, missing)
        left = [name for name in free if name not in arguments.names]
        try:
            steps = without_inputs(self._steps, left, self._baseline, self._takes()) if left else self._steps
        except IncomparableError:
            # Where the baseline cannot do without it, it is some argument of a forward that can.
            arguments = self._in_stages(base, free, missing, is_left=False)
            if any(name not in arguments.names for name in left):
                raise
            steps = self._steps
        return _with_own(steps, arguments), arguments

    def _optional(self) -> list[_Parameter]:
        return [p for p in self._parameters if not p.is_required and p.name not in self._steps[0]]

    def _of_any(self, plain: Arguments, base: Arguments, free: Sequence[str]) -> Arguments:
        """Return the arguments of a forward that takes any: an input that no op reads has another name there.

        Args:
            plain: Every input by its own name.
            base: Those that are arguments by name.
            free: The others.
        """
        optional = [p for p in self._parameters if p.name not in self._steps[0]]
        if not free or not optional:
            return plain
        used = self._uses(self._candidate.module, plain.of(self._steps[0]))
        ports = [] if used is None else [name for name, use in used.items() if use.is_read]
        unread = [name for name in free if not any(is_of(port, name) for port in ports)]
        if not unread:
            return plain
        read = {name: name for name in free if name not in unread}
        try:
            found = self._best(replace(base, names={**base.names, **read}), unread, [])
        except IncomparableError:
            return plain
        return found if all(name in found.names for name in unread) else plain

    def _best(self, base: Arguments, free: Sequence[str], missing: Sequence[_Parameter]) -> Arguments:
        """Return the assignment of free inputs to arguments that runs, and of several the one that is used alike."""
        attempts = list(itertools.islice(self._assignments(base, free, missing, self._optional()), _MOST_TRIED + 1))
        if len(attempts) > _MOST_TRIED:
            # What has a default may be needed all the same: then all are given at once.
            with contextlib.suppress(IncomparableError):
                return self._in_stages(base, free, missing)
        running: list[Arguments] = []
        for attempt in attempts[:_MOST_TRIED]:
            if self._runs(attempt):
                running.append(attempt)
                if len(free) == 1 and missing and len(attempt.names) == len(base.names) + 1:
                    break
        if not running:
            raise self._no_way()
        return self._most_alike(running)

    def _in_stages(
        self, base: Arguments, free: Sequence[str], missing: Sequence[_Parameter], *, is_left: bool = True
    ) -> Arguments:
        """Return what a forward of very many arguments is given: what it needs, then one by one what it uses alike.

        Without `is_left` what is used otherwise is given, too.
        """
        running = [one for one in self._assignments(base, free, missing, ()) if self._runs(one)]
        if not running:
            raise self._no_way()
        found = self._most_alike(running)
        for name in free:
            if name in found.names:
                continue
            taken = {*found.names.values(), *found.fixed}
            left = [p.name for p in self._optional() if p.name not in taken]
            more = [replace(found, names={**found.names, name: other}) for other in left]
            fitting = [one for one in more if self._runs(one)]
            found = self._most_alike([found, *fitting] if is_left or not fitting else fitting)
        return found

    def _most_alike(self, running: Sequence[Arguments]) -> Arguments:
        ours = self._uses(self._baseline.module, self._steps[0]) if len(running) > 1 else None
        if ours is None:
            return running[0]
        # Of equal ones the first, which keeps the order.
        return max(running, key=lambda one: self._likeness(one, ours))

    def _assignments(
        self, base: Arguments, free: Sequence[str], missing: Sequence[_Parameter], optional: Sequence[_Parameter]
    ) -> Iterator[Arguments]:
        numbers = [p for p in missing if p.is_number]
        wanted = [p for p in missing if not p.is_number]
        counts = range(min(len(free), len(wanted) + len(optional)), -1, -1) if free else (0,)
        for count in counts:
            orders: Any = itertools.permutations(free, count) if len(free) <= _SEVERAL else [tuple(free[:count])]
            for order in orders:
                for places in itertools.combinations([*wanted, *optional], count):
                    rest = [p for p in wanted if p not in places]
                    names = {**base.names, **{name: p.name for name, p in zip(order, places, strict=True)}}
                    makers = [[0] if p in numbers else _MADE for p in (*numbers, *rest)]
                    for values in itertools.product(*makers):
                        given = dict(zip((p.name for p in (*numbers, *rest)), values, strict=True))
                        own = tuple(name for name, value in given.items() if isinstance(value, str))
                        fixed = {name: value for name, value in given.items() if name not in own}
                        yield Arguments({**names, **{name: name for name in own}}, {**base.fixed, **fixed}, own)

    def _runs(self, arguments: Arguments) -> bool:
        try:
            run_alone(self._candidate.module, self._given(arguments))
        except Exception as error:  # the model's own code may raise anything
            self._failure = self._failure or error
            return False
        return True

    def _given(self, arguments: Arguments) -> dict[str, Any]:
        return arguments.of(_with_own(self._steps[:1], arguments)[0])

    def _uses(self, module: nn.Module, given: Step) -> dict[str, Use] | None:
        copied = pytree.tree_map_only(torch.Tensor, torch.clone, given)
        try:
            return uses_of(lambda: run_alone(module, copied, are_copies=True), named_inputs(copied))
        except Exception:
            return None

    def _likeness(self, arguments: Arguments, ours: Mapping[str, Use]) -> int:
        theirs = self._uses(self._candidate.module, self._given(arguments))
        if theirs is None:
            return -1
        pairs = {name: (use, ours.get(arguments.ours(name), Use())) for name, use in theirs.items()}
        return likeness(pairs, {p.name for p in self._optional()}.difference(arguments.own))

    def _takes(self) -> str:
        return f"a forward of {', '.join(p.name for p in self._parameters) or 'no arguments'}"

    def _no_way(self) -> IncomparableError:
        first = self._steps[0]
        shapes = ", ".join(f"{name} {list(leaf.shape)}" for name, leaf in named_inputs(first).items())
        if not is_pretrained(self._baseline.module):  # whose inputs may be tokens in another form
            with forward_errors(self._baseline.module, "the inputs fit neither side: the baseline's forward raised in"):
                run_alone(self._baseline.module, first)
        what = "the inputs of the candidate do not match those of the baseline"
        if self._failure is not None and source_of(self._failure, installed=False) is not None:
            what = "the candidate's forward raised on the inputs of the baseline"
        return IncomparableError(
            what,
            got=self._takes() + (f"; {described(self._failure)}" if self._failure is not None else ""),
            expected=f"arguments for {shapes}",
            hint="name the arguments of its forward as those of the baseline's",
        )


def _parameters(model: LoadedModel) -> tuple[list[_Parameter], bool]:
    """Return the arguments of a forward, and whether it takes any others too."""
    if model.stored is not None:
        fixed = model.stored.metadata.get("fixed_inputs", {})
        names = dict.fromkeys(port.name.split("[")[0].split(".")[0] for port in model.stored.inputs)
        if model.stored.onnx is not None:
            names = dict.fromkeys(port.name for port in model.stored.inputs)
        return [_Parameter(name, name not in fixed, False) for name in names], False
    found, takes_any = [], False
    for parameter in forward_parameters(model.module).values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            takes_any = takes_any or parameter.kind is parameter.VAR_KEYWORD
            continue
        is_number = parameter.annotation in (int, float, bool, "int", "float", "bool")
        found.append(_Parameter(parameter.name, parameter.default is parameter.empty, is_number))
    return found, takes_any


def _with_own(steps: Sequence[Step], arguments: Arguments) -> Sequence[Step]:
    """Return steps with what is made for the candidate alone: positions of the tokens of its first input."""
    if not arguments.own:
        return steps
    extended = []
    for step in steps:
        first = next(iter(named_inputs(step).values()))
        positions = torch.arange(first.shape[1] if first.dim() > 1 else first.shape[0])
        extended.append({**step, **dict.fromkeys(arguments.own, positions)})
    if isinstance(steps, MadeUp):
        recipes = {**steps.recipes, **dict.fromkeys(arguments.own, "positions, for the candidate alone: 0, 1, ...")}
        return MadeUp(extended, recipes=recipes, origin=steps.origin, num_in_file=steps.num_in_file)
    return extended
