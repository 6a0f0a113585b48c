"""`glass.testing.sweep`: a candidate beside its reference on inputs that show mistakes, and what the failures share.

Inputs that show what ordinary ones hide: sizes off the tile, values, and layouts in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from glassengine.errors import GlassError, UsageError, first_line
from glassengine.kernels.match import accumulation_of, called, explained, judged
from glassengine.kernels.prepared import Prepared, as_tensors, same
from glassengine.kernels.trace import copied, tensors_of
from glassengine.results.kernels import KernelMistake, MistakeKind, Sweep, SweepCase

Make = Callable[[Mapping[str, int], torch.dtype, torch.Generator], Sequence[Any]]
"""Sizes, dtype of floating inputs, source of numbers -> arguments."""

EDGES = (1, 2, 7, 16, 24, 31, 32, 33, 64, 65, 96, 100, 128, 129, 257)
BASE = {"B": 3, "H": 2, "N": 5}
_BASE_SIZE = 33
_GUARD = 64

VALUES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "ordinary": lambda x, g: x,
    "values of 100": lambda x, g: x * 100,
    "values of 1e-4": lambda x, g: x * 1e-4,
    "a mean of 100": lambda x, g: x + 100,
    "cancellation": lambda x, g: x.abs() * torch.where(_every(x, 2), 1000.0, -1000.0).to(x.dtype),
    "zeros": lambda x, g: x * 0,
    "negative zeros": lambda x, g: x.abs() * -0.0,
    "ones": lambda x, g: torch.ones_like(x),
    "ties": lambda x, g: x.round(),
    "equal rows": lambda x, g: x[..., :1].expand(x.shape).clone() if x.dim() else x,
    "ramp": lambda x, g: (torch.arange(x.numel()).reshape(x.shape) % 97 / 16 - 3).to(x.dtype),
    "one large element": lambda x, g: _with(x, 300.0),
    "subnormal numbers": lambda x, g: x * torch.finfo(x.dtype).tiny * 0.25,
    "NaN": lambda x, g: _with(x, math.nan),
    "infinity": lambda x, g: _with(x, math.inf),
    "masked by -inf": lambda x, g: x.masked_fill(_every(x, 3), -math.inf),
    "all masked": lambda x, g: _row(x, -math.inf)
}  # fmt: skip
"""Name -> what becomes of normal numbers."""


def _every(x: Tensor, number: int) -> Tensor:
    return (torch.arange(x.numel()).reshape(x.shape) % number == number - 1) if x.numel() else x.bool()


def _with(x: Tensor, value: float) -> Tensor:
    found = x.clone()
    if x.numel():
        found.view(-1)[x.numel() // 2] = value
    return found


def _row(x: Tensor, value: float) -> Tensor:
    found = x.clone()
    if x.numel() and x.dim() > 1:
        found[(0,) * (x.dim() - 1)] = value
    return found


def _strided(x: Tensor) -> Tensor:
    wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    wide[..., ::2] = x
    wide[..., 1::2] = 7
    return wide[..., ::2]


def guarded(x: Tensor) -> Tensor:
    """Return the same numbers with NaN before and after them in memory."""
    around = torch.full((x.numel() + 2 * _GUARD,), math.nan, dtype=x.dtype)
    inside = around[_GUARD : _GUARD + x.numel()].view(x.shape)
    return inside.copy_(x)


GUARDED = "NaN around the inputs"
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    GUARDED: guarded,
    "transposed in memory": lambda x: x.mT.contiguous().mT if x.dim() > 1 else _strided(x),
    "every second column of a wider tensor": lambda x: _strided(x) if x.dim() else x,
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() > 1 and len(x) else x,
    "not aligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}
"""Name -> the same numbers (but for what is expanded) in another place of memory."""
ALIASED = "one tensor as two arguments"


@dataclass(frozen=True)
class KernelCase:
    """One call."""

    sizes: Mapping[str, int]
    dtype: torch.dtype
    values: str = "ordinary"
    layout: str = "contiguous"

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} = {size}" for name, size in self.sizes.items())
        odd = [part for part in (self.values, self.layout) if part not in ("ordinary", "contiguous")]
        return ", ".join([str(self.dtype).removeprefix("torch."), *([sizes] if sizes else []), *odd])

    def inputs(self, make: Make, values: Mapping[str, Callable[..., Tensor]], seed: int) -> list[Any]:
        """Return the arguments."""
        generator = torch.Generator().manual_seed(seed)
        change = values[self.values]
        lay = LAYOUTS[self.layout if self.layout in LAYOUTS else "contiguous"]

        def changed(leaf: Any) -> Any:
            is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return lay(change(leaf, generator)) if is_float else leaf

        found = [changed(leaf) for leaf in make(self.sizes, self.dtype, generator)]
        if self.layout == ALIASED:
            for one, other in pairwise(range(len(found))):
                a, b = found[one], found[other]
                if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype):
                    found[other] = a
        return found


def maker(shapes: str | Sequence[Any] | Make) -> tuple[Make, list[str]]:
    """Return (what makes arguments, the symbols of sizes) of "B S, S", of shapes, or of a function.

    Raises:
        UsageError: It is none of these.
    """
    if callable(shapes):
        return shapes, []
    if isinstance(shapes, str):
        parts = [part.split() for part in shapes.split(",")]
    else:
        parts = [[str(size) for size in shape] for shape in shapes]
    wrong = [size for part in parts for size in part if not re.fullmatch(r"[A-Za-z_]\w*|\d+", size)]
    if wrong:
        raise UsageError("no size", got=wrong[0], expected='shapes="B S, S", or shapes=[(3, 64), (64,)]')

    def make(sizes: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        known = [[int(size) if size.isdigit() else sizes[size] for size in part] for part in parts]
        return [torch.randn(shape, generator=generator).to(dtype) for shape in known]

    names = dict.fromkeys(size for part in parts for size in part if not size.isdigit())
    return make, list(names)


def cases(
    names: Sequence[str],
    sizes: Mapping[str, Sequence[int]],
    dtypes: Sequence[torch.dtype],
    values: Sequence[str],
    layouts: Sequence[str],
) -> Iterator[KernelCase]:
    """Yield cases: each size by itself, then all values and layouts of one size, in each dtype."""
    base = {name: BASE.get(name, _BASE_SIZE) for name in names}
    base |= {name: next(iter(given)) for name, given in sizes.items() if base.get(name) not in given}
    for dtype in dtypes:
        yield KernelCase(base, dtype)
        for name in base:
            for size in sizes.get(name, EDGES[:4] if name in BASE else EDGES):
                if size != base[name]:
                    yield KernelCase({**base, name: size}, dtype)
        for value in values:
            if value != "ordinary":
                yield KernelCase(base, dtype, value)
        for layout in layouts:
            if layout != "contiguous":
                yield KernelCase(base, dtype, layout=layout)
        for name in base if not sizes else ():
            yield KernelCase({**base, name: 0}, dtype)


Function = Callable[..., Any]
_BLOCKS = (256, 128, 64, 32, 16, 8, 5, 4, 3, 2)


def sweep(
    candidate: Function,
    reference: Function,
    shapes: str | Sequence[Any] | Make,
    *,
    sizes: Mapping[str, Sequence[int]] | None = None,
    dtypes: Iterable[torch.dtype] = (torch.float32,),
    values: Iterable[str] | Mapping[str, Callable[..., Tensor]] | None = None,
    layouts: Iterable[str] | None = None,
    repeats: bool = False,
    batch_invariant: bool = False,
    accumulation: str | None = None,
    check_dtype: bool = True,
    seed: int = 0,
) -> Sweep:
    """Judge a candidate on sizes off the tile, adversarial values and layouts in memory.

    Args:
        candidate: The function under test.
        reference: Plain PyTorch.
        shapes: Those of the arguments, "B S, S" with a symbol for each size, or [(3, 64), (64,)]; or a function of
            (sizes, dtype, generator) that returns the arguments.
        sizes: Symbol -> sizes to try; by default those beside powers of two, and 0.
        dtypes: Of the floating arguments.
        values: Names of what the numbers are, or name -> function of (normal numbers, generator); by default all.
        layouts: Names of how the arguments lie in memory; by default all.
        repeats: Whether two calls on the same inputs must give the same bits, with another call between them.
        batch_invariant: Whether the first row must have the same bits alone as among others.
        accumulation: As in `matches`.
        check_dtype: As in `matches`.
        seed: Of the inputs.

    Raises:
        UsageError: A name is unknown, or the reference takes none of the inputs.
    """
    make, names = maker(shapes)
    known = dict(values) if isinstance(values, Mapping) else {name: VALUES[name] for name in _of(values, VALUES)}
    known.setdefault("ordinary", VALUES["ordinary"])
    chosen = _of(layouts, {**LAYOUTS, ALIASED: None})
    symbols = [*dict.fromkeys([*names, *(sizes or {})])]
    seen: list[tuple[KernelCase, SweepCase]] = []
    skipped: list[str] = []
    judge = _Judge(candidate, repeats, batch_invariant, accumulation or "", check_dtype)
    for case in cases(symbols, sizes or {}, tuple(dtypes), list(known), chosen):
        inputs = case.inputs(make, known, seed)
        try:
            prepared = Prepared(called(reference, inputs)[0], inputs, accumulation_of(accumulation), seed)
        except Exception as error:
            skipped.append(f"{case}: {type(error).__name__}: {first_line(error)}")
            continue
        seen.append((case, judge.on(case, inputs, prepared)))
    if not seen:
        raise UsageError("the reference takes none of the inputs", got=skipped[0] if skipped else "no case")
    return _concluded(seen, skipped)


def _of(given: Iterable[str] | None, known: Mapping[str, Any]) -> list[str]:
    names = list(known) if given is None else list(given)
    for name in names:
        if name not in known:
            raise UsageError(f"unknown name {name!r}", expected=list(known))
    return names


@dataclass(frozen=True)
class _Judge:
    candidate: Function
    repeats: bool
    batch_invariant: bool
    accumulation: str
    check_dtype: bool

    def on(self, case: KernelCase, inputs: list[Any], prepared: Prepared) -> SweepCase:
        """Judge one case."""
        shapes = tuple(tuple(t.shape) for t in tensors_of(inputs))
        dtype = str(case.dtype).removeprefix("torch.")
        try:
            match = judged(self.candidate, inputs, prepared, self.accumulation, self.check_dtype)
            error = self._unstable(inputs) if match.ok else None
        except GlassError:
            raise  # of the reference, or of how it is asked
        except Exception as raised:
            return SweepCase(str(case), shapes, dtype, False, None, f"{type(raised).__name__}: {first_line(raised)}")
        return SweepCase(str(case), shapes, dtype, match.ok and error is None, match, error)

    @torch.no_grad()
    def _unstable(self, inputs: list[Any]) -> str | None:
        if self.repeats:
            first = self._bits(inputs)
            self._bits([t * 0.5 if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs])
            if not _alike(first, self._bits(inputs)):
                return "not repeatable: the same inputs give other bits after another call"
        if self.batch_invariant and isinstance(inputs[0], Tensor) and inputs[0].dim() and len(inputs[0]) > 1:
            size = len(inputs[0])
            alone = [t[:1] if isinstance(t, Tensor) and t.dim() > 1 and len(t) == size else t for t in inputs]
            rows = [t[:1] if t.dim() and len(t) == size else t for t in self._bits(inputs)]
            if not _alike(rows, self._bits(alone)):
                return "not batch invariant: the first row has other bits alone"
        return None

    def _bits(self, inputs: list[Any]) -> list[Tensor]:
        return [t.clone() for t in tensors_of(as_tensors(self.candidate(*copied(inputs))))]


def _alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


def _concluded(seen: Sequence[tuple[KernelCase, SweepCase]], skipped: Sequence[str]) -> Sweep:
    failed = [(case, result) for case, result in seen if not result.ok]
    failed.sort(key=lambda pair: (not _is_plain(pair[0]), sum(math.prod(shape) for shape in pair[1].shapes)))
    if not failed:
        return Sweep(True, len(seen), skipped=tuple(skipped))
    failures, when = tuple(result for _, result in failed), _when(seen)
    return Sweep(False, len(seen), failures, failures[0], when, _mistakes(seen, failed, when), tuple(skipped))


def _is_plain(case: KernelCase) -> bool:
    return case.values == "ordinary" and case.layout == "contiguous" and 0 not in case.sizes.values()


def _when(seen: Sequence[tuple[KernelCase, SweepCase]]) -> str:
    """Return what the failures have in common, and no other case has."""
    plain = [(case, result.ok) for case, result in seen if _is_plain(case)]
    failing = [case for case, ok in plain if not ok]
    if failing and len(failing) == len(plain):
        return "always"
    if failing:
        dtypes = {case.dtype for case in failing}
        if all(ok == (case.dtype not in dtypes) for case, ok in plain):
            return f"in {', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))}"
        rules = [_rule(name, [(c.sizes[name], ok) for c, ok in plain]) for name in failing[0].sizes]
        return next((rule for rule in rules if rule), f"in {len(failing)} of {len(plain)} sizes: {failing[0]}")
    odd = [case for case, result in seen if not result.ok]
    parts = [c.values for c in odd if c.values != "ordinary"] + [c.layout for c in odd if c.layout != "contiguous"]
    parts += ["empty inputs" for case in odd if 0 in case.sizes.values()]
    return ", ".join(dict.fromkeys(parts))


def _rule(name: str, sizes: Sequence[tuple[int, bool]]) -> str | None:
    """Return for which sizes of a symbol the candidate fails, if this decides."""
    fails, rights = ({size for size, ok in sizes if ok is wanted} for wanted in (False, True))
    if fails & rights or not rights:
        return None
    for block in _BLOCKS:
        if all(size % block for size in fails) and not any(size % block for size in rights):
            return f"{name} % {block} != 0"
    if max(rights) < min(fails):
        return f"{name} > {max(rights)}"
    if min(rights) > max(fails):
        return f"{name} < {min(rights)}"
    for block in _BLOCKS:
        if all(size % block and size > block for size in fails) and all(s % block == 0 or s < block for s in rights):
            return f"{name} > {block} and {name} % {block} != 0"
    return f"{name} is one of {', '.join(map(str, sorted(fails)))}"


def _mistakes(
    seen: Sequence[tuple[KernelCase, SweepCase]], failed: Sequence[tuple[KernelCase, SweepCase]], when: str
) -> tuple[KernelMistake, ...]:
    """Return kinds of mistakes: by which cases fail, then by what the failing ones look like."""
    right = {(case.dtype, tuple(case.sizes.items())) for case, result in seen if result.ok and _is_plain(case)}
    votes: dict[str, list[KernelMistake]] = {}
    for case, result in failed:
        one: KernelMistake | None = None
        if result.error is not None:
            kind: MistakeKind = "raises" if result.match is None else "stale or unstable"
            one = KernelMistake(kind, f"{case}: {result.error}", True)
        elif case.layout != "contiguous" and (case.dtype, tuple(case.sizes.items())) in right:
            one = KernelMistake("layout", f"it is wrong for inputs that are {case.layout}", True)
            if case.layout == GUARDED:
                one = KernelMistake("out of bounds", "it reads beyond its inputs", True)
        elif result.match is not None and result.match.mistakes:
            one = result.match.mistakes[0]
        if one is not None:
            votes.setdefault(one.kind, []).append(one)
    # What most cases look like, the smallest case for all of a kind; a guess counts for less than a proof.
    weights = {
        kind: sum(1.0 if one.proven and kind != "raises" else 0.4 for one in ones) for kind, ones in votes.items()
    }
    ranked = sorted(votes, key=lambda kind: -weights[kind])
    found = [next((one for one in votes[kind] if one.proven), votes[kind][0]) for kind in ranked]
    if " % " in when and (not found or found[0].kind != "tail"):
        found.insert(0, KernelMistake("tail", f"the end of the last block is wrong: {when}"))
    return tuple(found[:5])


def assert_sweep(candidate: Function, reference: Function, shapes: str | Sequence[Any] | Make, **options: Any) -> Sweep:
    """Raise an AssertionError unless a candidate is right in all cases of a `sweep`, whose arguments these are.

    Raises:
        AssertionError: It is wrong in some. It has the smallest one, what they share, and the kind of mistake.
        UsageError: As `sweep` does.
    """
    found = sweep(candidate, reference, shapes, **options)
    if found.ok:
        return found
    when = "all of ordinary numbers" if found.when == "always" else found.when
    lines = [f"{len(found.failures)} of {found.num_cases} cases are wrong: {when}"]
    lines += [f"  looks like  {mistake.text}" for mistake in found.mistakes[:3]]
    if found.smallest is not None:
        match, error = found.smallest.match, found.smallest.error
        lines += [
            f"smallest case: {found.smallest.name}",
            f"  {error}" if match is None or match.ok else explained(match),
        ]
    raise AssertionError("\n".join(lines))


def kernel_inputs(
    shapes: str | Sequence[Any] | Make,
    *,
    sizes: Mapping[str, Sequence[int]] | None = None,
    dtypes: Iterable[torch.dtype] = (torch.float32,),
    values: Iterable[str] | None = None,
    layouts: Iterable[str] | None = None,
) -> Any:
    """Return a strategy of Hypothesis that draws lists of arguments as `sweep` makes them.

    The arguments are those of `sweep`.
    """
    from hypothesis import strategies

    make, names = maker(shapes)
    known = {name: VALUES[name] for name in _of(values, VALUES)}
    symbols = [*dict.fromkeys([*names, *(sizes or {})])]
    drawn = {name: strategies.sampled_from(list((sizes or {}).get(name, range(1, 130)))) for name in symbols}
    return strategies.builds(
        lambda case_sizes, dtype, value, layout, seed: KernelCase(case_sizes, dtype, value, layout).inputs(
            make, known, seed
        ),
        strategies.fixed_dictionaries(drawn),
        strategies.sampled_from(list(dtypes)),
        strategies.sampled_from(list(known)),
        strategies.sampled_from(_of(layouts, {**LAYOUTS, ALIASED: None})),
        strategies.integers(0, 2**16),
    )
