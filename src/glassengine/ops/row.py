"""A row of the table of ops, and the arguments of a node by the names that its schema gives them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node


class Rounding(Enum):
    """What rounding does to the result of an op; the bound of each class is in `numerics.bounds`."""

    UNKNOWN = "unknown"
    """No rounding bound is known: at most suspicious."""
    UNBOUNDED = "unbounded"
    """Known to have no rounding bound: at most suspicious, too."""
    EXACT = "exact"
    """Integers and bools: places, counts, comparisons, logic."""
    MOVES = "moves"
    """Moves or selects values, without arithmetic."""
    CASTS = "casts"
    POINTWISE = "pointwise"
    STEPS = "steps"
    """Jumps: an argument on the other side of a step is another number."""
    COUNTS = "counts"
    """A whole number, and exact, though its dtype is a floating one."""
    SUMS = "sums"
    PRODUCT = "product"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    COMPOSITE = "composite"
    """Several steps with a bound of their own: softmax, normalizations, norms."""


Kind = Literal[
    "", "activation", "comparison", "constant", "copy", "factor", "log_softmax", "logic", "matrix product", "norm",
    "reshape", "softmax", "sum", "term"
]  # fmt: skip
"""What people call an op. A term is added or subtracted, a factor multiplies or divides; a sum or a mean is a "sum"."""

Terms = Callable[[tuple[Any, ...], Tensor], int]
"""Arguments and result of an op -> number of terms of one of its sums."""


@dataclass(frozen=True)
class Choice:
    """How an op chooses elements by their size; its schema names the axis `dim`.

    Attributes:
        values: Whether it returns the chosen values.
        places: Whether it returns where they are.
        descending: Whether the largest come first.
        flag: Name of the argument that has it instead, if any.
        running: Whether it chooses among the elements so far.
    """

    values: bool
    places: bool
    descending: bool
    flag: str = ""
    running: bool = False


@dataclass(frozen=True)
class OpTraits:
    """What is known of an op.

    Attributes:
        rounding: What rounding does to its result.
        kind: What people call it.
        in_place: Whether each element of its result depends on the elements in its own place alone.
        is_random: Whether its result is random: never judged.
        is_unwritten: Whether its result is uninitialized memory: never judged, nor are elements of it that nothing
            has overwritten yet.
        reads_sizes: Whether it reads no more of a tensor than its shape.
        relative_to_argument: Whether errors inside of it are relative to the argument, not to the result: 1 + tanh and
            1 + erf cancel, and arguments of sines are reduced.
        is_periodic: Whether it is a wave of its argument, flat at its extremes to first order only.
        absolute_error: Whether runtimes are taken to compute it to an absolute error where their kernels were not
            measured: fitted polynomials, or as exp(x) - 1, log(1 + x) and the like, which is how ONNX has them.
            OpenVINO: up to 5e-7.
        several_steps: Whether it may be written out, with a result rounded on the way.
        correctly_rounded: Whether every implementation rounds it alike: IEEE 754 asks for that.
        keeps_whole: Whether it makes whole numbers of whole numbers, exactly while they stay small.
        domain: Arguments that it is defined for, where these are not all numbers: "positive" or "nonzero".
        commutes: Whether its two operands may be exchanged.
        addend: Position of what is added to a product, where there can be anything.
        terms: Counts the terms of one of its sums; None without sums.
        choice: How it chooses elements by their size; None where it does not.
        selects: "indices" where integers or bools among its arguments say what is left out or put elsewhere, "part"
            where its bounds do.
        reorders: Whether integers say where elements go, so that two of them may undo each other.
        table: Positions of what it reads by index and of the indices, and the axis where it is always the same.
        condition: Position of the bools that choose.
        holds: Whether its results hold elements of the tensors that it reads (of its table alone; of all but a first
            condition) as they are, if these are not negative, and else numbers that the program writes.
        hidden: What becomes of a number that hides a place from a softmax: "stays" where any operand hides, "moves"
            along with the values, "ignored" where something else is chosen or shared, "lost" otherwise.
    """

    rounding: Rounding = Rounding.UNKNOWN
    kind: Kind = ""
    in_place: bool | None = None
    is_random: bool | None = None
    is_unwritten: bool = False
    reads_sizes: bool = False
    relative_to_argument: bool = False
    is_periodic: bool = False
    absolute_error: bool = False
    several_steps: bool = False
    correctly_rounded: bool = False
    keeps_whole: bool = False
    domain: Literal["", "positive", "nonzero"] = ""
    commutes: bool = False
    addend: int | None = None
    terms: Terms | None = None
    choice: Choice | None = None
    selects: Literal["", "indices", "part"] = ""
    reorders: bool = False
    table: tuple[int, int, int | None] | None = None
    condition: int | None = None
    holds: bool = False
    hidden: Literal["stays", "moves", "ignored", "lost"] = "lost"

    @property
    def moves(self) -> bool:
        """Whether it moves or selects values without arithmetic."""
        return self.rounding is Rounding.MOVES

    @property
    def casts(self) -> bool:
        """Whether it changes the dtype and nothing else."""
        return self.rounding is Rounding.CASTS

    @property
    def multiplies(self) -> bool:
        """Whether it is linear in each of two factors: a product of matrices or a convolution."""
        return self.rounding in (Rounding.PRODUCT, Rounding.CONVOLUTION)

    @property
    def reads_memory(self) -> bool:
        """Whether its operands are usually read from memory, so that what was dumped is what was used."""
        return self.multiplies or self.rounding is Rounding.ATTENTION

    @property
    def is_arbitrary(self) -> bool:
        """Whether its values are arbitrary: drawn at random, or left in memory."""
        return bool(self.is_random) or self.is_unwritten


NOTHING = OpTraits()
"""Of an op that has no row."""


def argument(node: Node, name: str) -> Any:
    """Return an argument of what `node` calls, its default where it is left out; None without any."""
    if name in node.kwargs:
        return node.kwargs[name]
    position, default = _place(node.target, name)
    return node.args[position] if position is not None and position < len(node.args) else default


@functools.lru_cache(maxsize=4096)
def _place(target: Any, name: str) -> tuple[int | None, Any]:
    """Return (position, default) of an argument."""
    if isinstance(target, torch._ops.OpOverload):
        for position, described in enumerate(target._schema.arguments):
            if described.name == name:
                return None if described.kwarg_only else position, described.default_value
        return None, None
    try:  # what a node of a translated ONNX graph calls
        given = inspect.signature(getattr(target, "function", target)).parameters
    except (TypeError, ValueError):
        return None, None
    if name not in given:
        return None, None
    default = None if given[name].default is inspect.Parameter.empty else given[name].default
    return None if given[name].kind is inspect.Parameter.KEYWORD_ONLY else list(given).index(name), default
