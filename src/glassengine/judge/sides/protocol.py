"""Defines a side: an implementation that runs the steps of a case and reports what it observed.

A side says itself what it can. What judges a side reads `level`, `program`, `pairs` and `replay`, never its class: a
side without a program of its own has None, one whose tensors are not replayed has no `replay`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.judge.cases import Case, StepInputs
from glassengine.judge.end_to_end import results_of
from glassengine.judge.exclusions.perturbation import unread_nodes
from glassengine.judge.pieces import Piece, clone, cut
from glassengine.judge.replay.replay import Replay
from glassengine.judge.site_pairs import SitePair, ancestors
from glassengine.numerics.arrangements import Arrangement
from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.numerics.kernels import UNMEASURED, Kernels
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.outputs import weight_only_nodes
from glassengine.program.representation.program import Program
from glassengine.results import Hint


class Arranged:
    """Arranges what a candidate made as the baseline has it.

    Args:
        baseline: Its program, whose shapes say how long rows are in a step; None where all is as the baseline has it.
        pairs: Baseline node -> pair.
    """

    def __init__(self, baseline: Program | None = None, pairs: Mapping[str, SitePair] | None = None) -> None:
        self._sizes: dict[Any, int] = {}
        self._hows: dict[str, Arrangement] = {}
        self._given: list[tuple[str, Node]] = []
        if baseline is None or pairs is None:
            return
        self._hows = {node: pair.arrangement for node, pair in pairs.items() if pair.arrangement is not None}
        self._nodes = baseline.nodes
        self._given = [(port.name, baseline.node(port.node)) for port in baseline.inputs] if self._hows else []

    def begin_step(self, inputs: Mapping[str, Any]) -> None:
        """Take over the sizes of a step from its inputs, by name."""
        self._sizes = {}
        for name, node in self._given:
            value, fake = inputs.get(name), node.meta.get("val")
            if not isinstance(value, torch.Tensor) or not isinstance(fake, torch.Tensor) or value.dim() != fake.dim():
                continue
            for size, known in zip(fake.shape, value.shape, strict=True):
                if isinstance(size, torch.SymInt):
                    self._sizes[size.node.expr] = known

    def __call__(self, node: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the candidate's tensor for a node of the baseline, arranged."""
        how = self._hows.get(node)
        return tensor if how is None else how.apply(tensor, self._shape(self._nodes[node]))

    def is_arranged(self, node: str) -> bool:
        """Whether the candidate has the tensor of a node in other dimensions."""
        return node in self._hows

    def _shape(self, node: Node) -> list[int] | None:
        """Return the shape of a node in this step; None where the inputs do not say."""
        sizes = node.meta["val"].shape
        try:
            return [int(one.node.expr.xreplace(self._sizes)) if isinstance(one, torch.SymInt) else one for one in sizes]
        except TypeError:  # a size that is still a symbol
            return None


def float_nodes(program: Program, kinds: Sequence[str], *, without: tuple[str, ...] = ()) -> set[str]:
    """Return the nodes of floating dtype with a site of one of `kinds`.

    Module inputs are left out (they are outputs of something else), so are names that start with one of `without`,
    nodes that depend on weights alone (they are taken from the weights, see `program.representation.outputs`),
    random numbers, memory that nothing has written, and what no result reads: the last states of a recurrence, say.
    """
    constant = {node.name for node in weight_only_nodes(program)}
    counted = [s for s in program.sites if s.kind in kinds and ":in" not in s.name and not s.name.startswith(without)]
    named = {site.node for site in counted} - constant - unread_nodes(program)
    return {
        node.name
        for node in program.graph.nodes
        if node.name in named
        and is_tensor_node(node)
        and node.meta["val"].is_floating_point()
        and not traits_of(node).is_arbitrary
    }


@dataclass(frozen=True)
class Collective:
    """An all-reduce in a step.

    Attributes:
        node: Of the baseline's program: whose terms these are.
        name: Of the candidate's node.
        first_rank: Process of the first term; the others follow.
        terms: What each rank gave.
        results: What each rank got.
    """

    node: str
    name: str
    first_rank: int
    terms: Sequence[Tensor]
    results: Sequence[Tensor]

    def bound_ratios(self) -> list[float]:
        """Return, of each rank, the worst error over the bound of a sum of so many terms, added up in any order.

        Each of n - 1 additions rounds a partial sum, which is at most the sum of the terms' sizes.
        """
        dtype, count = self.terms[0].dtype, len(self.terms)
        if not dtype.is_floating_point:
            total = torch.stack(list(self.terms)).sum(0).to(dtype)
            return [0.0 if torch.equal(result, total) else torch.inf for result in self.results]
        terms = torch.stack([term.double() for term in self.terms])
        total, u = terms.sum(0), unit_roundoff(dtype) * (count - 1)
        allowed = u / (1 - u) * terms.abs().sum(0) + count * smallest_precise(dtype)
        return [_worst(result.double(), total, allowed) for result in self.results]


def _worst(result: Tensor, total: Tensor, allowed: Tensor) -> float:
    if result.shape != total.shape:
        return torch.inf
    counts = total.isfinite()  # what comes of NaN is the fault of the term that has it
    ratio = torch.where(counts, (result - total).abs() / allowed, 0.0).nan_to_num(torch.inf, posinf=torch.inf)
    return float(ratio.max()) if ratio.numel() else 0.0


_DEPTH = 8
"""Ops before one whose values are kept, for a region that is wrong only when it is compiled as one."""

RUNTIME = "onnxruntime"
"""Back-end whose kernels run an ONNX file as it is (see `program.onnx.session`)."""


class Place(StrEnum):
    """Where a side stands on the ladder; the value is the name of its level."""

    PROGRAM = "program"
    SOURCE = "source"
    RANKS = "ranks"
    PASS = "pass"  # noqa: S105 (a graph pass, no password)
    OP_BY_OP = "op-by-op"
    ENGINE = "engine"
    BISECTION = "bisection"
    RELEASE = "release"
    CANDIDATE = "candidate"
    UNTOUCHED = "candidate, untouched"
    RECORD = "record"
    RECORDED = "recorded"
    STEP = "step"
    RUN = "run"


class ObservedAt(Enum):
    """What a side was observed at: every op that it has, module outputs, or results alone."""

    OP = "op"
    SEGMENT = "segment"
    RESULT = "result"


class Guarantee(Enum):
    """What the verdicts of a side promise: in words, and at which level it is observed."""

    EVERY_OP = "judged op by op", ObservedAt.OP
    STORED_OPS = "judged at ops kept as stored", ObservedAt.OP
    SEGMENTS = "judged by segments", ObservedAt.SEGMENT
    RESULTS = "judged at results", ObservedAt.RESULT
    RESULTS_AND_CACHES = "judged at results and caches", ObservedAt.RESULT
    FEW_OUTPUTS = "judged at a few outputs a build", ObservedAt.RESULT
    NEAR_THE_ERROR = "judged near the error", ObservedAt.RESULT
    GRADIENTS = "judged at loss and gradients", ObservedAt.RESULT

    @property
    def text(self) -> str:
        """In words, for people."""
        return self.value[0]

    @property
    def observed_at(self) -> ObservedAt:
        """Where a side that promises this is observed."""
        return self.value[1]


@dataclass(frozen=True)
class Observed:
    """One value of a side: the tensor, the side's own site for it, and how it was paired."""

    tensor: torch.Tensor
    site: str
    method: str


@dataclass
class Side(ABC):
    """One implementation under judgement.

    Args:
        place: Where it stands on the ladder.
        guarantee: What its verdicts promise.
        detail: What tells levels at one place apart: of a pass, which one.
        program: Its own program, op by op; None where it has none.
        pairs: Baseline node -> the op of `program` that is its counterpart, observed or not.
        replay: Judges what its ops, regions or segments introduced; None where results alone are judged.
        arranged: Gives its tensors the baseline's dimensions.
        has_fixed_cache: Whether `program` is an export of a module that runs with a cache that grows.
        logits: Of the last step, [B, S, V], where it chooses tokens.
        plain: Results of the current step other than tensors.
        written: Inputs of the current step that it has written to, as it leaves them; None where that is not observed.
    """

    place: Place = field(kw_only=True)
    guarantee: Guarantee = field(default=Guarantee.EVERY_OP, kw_only=True)
    detail: str = field(default="", kw_only=True)
    program: Program | None = field(default=None, kw_only=True)
    pairs: Mapping[str, SitePair] = field(default_factory=dict, kw_only=True)
    replay: Replay | None = field(default=None, kw_only=True)
    arranged: Arranged = field(default_factory=Arranged, kw_only=True)
    has_fixed_cache: bool = field(default=False, kw_only=True)
    logits: torch.Tensor | None = field(default=None, kw_only=True)
    written: Mapping[str, torch.Tensor] | None = field(default=None, init=False)
    plain: Mapping[str, Any] = field(default_factory=dict, init=False)
    _results: Mapping[str, torch.Tensor] = field(default_factory=dict, init=False)

    @property
    def level(self) -> str:
        """Name of the level, on screen and in documents."""
        return f"{self.place} {self.detail}" if self.detail else self.place.value

    @property
    def observed_at(self) -> ObservedAt:
        """What it was observed at."""
        return self.guarantee.observed_at

    @property
    def backend(self) -> str | None:
        """Back-end that runs `program`; None for torch in eager mode."""
        return None if self.program is None or self.program.onnx is None else RUNTIME

    @property
    def kernels(self) -> Kernels:
        """How exact its elementwise kernels are, where that is known."""
        return UNMEASURED if self.replay is None else self.replay.accumulation.kernels

    @cached_property
    def counterparts(self) -> Mapping[str, str]:
        """Baseline node -> node of `program`."""
        return {node: pair.candidate.node for node, pair in self.pairs.items()}

    @property
    def called(self) -> Mapping[str, tuple[str, str]] | None:
        """Of a record, result of the baseline -> what it calls that, and how this is known; None of what runs."""
        return None

    @property
    def reordered(self) -> tuple[str, ...]:
        """Path prefixes that are left out: what is in there, the baseline's program computes in another order."""
        return ()

    def countable(self, baseline: Program) -> set[str]:
        """Return the nodes of the baseline's program that the coverage of this side is a share of."""
        return float_nodes(baseline, ("op",))

    def begin(self, case: Case) -> None:
        """Forget everything of an earlier case."""
        if self.replay is not None:
            self.replay.begin()

    @abstractmethod
    def step(self, inputs: StepInputs | Mapping[str, Any]) -> None:
        """Run one step; afterwards `observed` answers for it."""

    @abstractmethod
    def observed(self, node: str) -> list[Observed]:
        """Return this side's values of the baseline program's `node` in the current step.

        Several, where a module passes on what another one made and both were observed; none, where it has no such
        tensor.
        """

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return what came out of the current step, by this side's own names and in its order, caches left out."""
        return self._results

    def module_outputs(self) -> Mapping[str, torch.Tensor]:
        """Return what modules and taps made in the current step so far, by site; nothing of what knows no modules."""
        return {}

    def results_by_node(self, baseline: Program) -> dict[str, torch.Tensor]:
        """Return the results of a side that is observed by the names of the baseline's own nodes."""
        observed = {name: self.observed(baseline.output_nodes[name]) for name in results_of(baseline)}
        return {name: several[-1].tensor for name, several in observed.items() if several}

    def collectives(self) -> Sequence[Collective]:
        """Return the sums of the current step that several processes made of their terms; none of one process."""
        return ()

    def blamed(self, node: Node, observed: Observed, expected: torch.Tensor) -> tuple[int | None, tuple[Hint, ...]]:
        """Return which process of several made an error, and what explains it; None where all did, or there is one.

        Args:
            node: Of the baseline's program.
            observed: What this side has for it.
            expected: What that should be.
        """
        return None, ()

    def around(self, baseline: Program, node: Node) -> tuple[Node | None, dict[str, Any]]:
        """Return the counterpart of `node` in this side's program, and the values around that by the nodes there."""
        own, values = self.program, {} if self.replay is None else self.replay.values
        if own is None:
            return None, {}
        ours = {port.name: port.node for port in baseline.inputs}
        counterparts = {**self.counterparts, **{ours[port.name]: port.node for port in own.inputs if port.name in ours}}
        target = own.nodes.get(counterparts.get(node.name, ""))
        if target is None or self.arranged.is_arranged(node.name):
            return None, {}
        near = {other.name for other in ancestors(target, _DEPTH)}
        kept = {
            counterparts[name]: clone(value)
            for name, value in values.items()
            if counterparts.get(name) in near
            and isinstance(value, torch.Tensor)
            and not self.arranged.is_arranged(name)
        }
        return target, {**own.weights(), **kept}

    def computes(self, baseline: Program, node: Node) -> Piece | None:
        """Return what this side's program computes for a `node` of the baseline's, from tensors that both have."""
        target, values = self.around(baseline, node)
        return None if target is None else cut([target], values, values.keys() - {target.name})
