"""Judges the tensors of one side, one by one, and keeps what is found over all cases.

`Score.visit` is where the verdict on a tensor is made; its docstring lists the rules in their order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.cases import Case
from glassengine.judge.end_to_end import EndToEnd
from glassengine.judge.exclusions.masked import completed, read_by_softmax
from glassengine.judge.exclusions.perturbation import MOST_MARKED, Differing, differing, unread
from glassengine.judge.exclusions.sources import CHOICES, TEXTS
from glassengine.judge.hypotheses.hints import Hints
from glassengine.judge.hypotheses.trials.hypothesis import called
from glassengine.judge.replay.expected import ReplayedTensor
from glassengine.judge.sides.protocol import Observed, Side
from glassengine.judge.site_pairs import walk
from glassengine.judge.verdict.evidence import EvidenceBox, rms
from glassengine.judge.verdict.origins import OriginTracker, Why
from glassengine.numerics.distances import measure, tensor_values
from glassengine.numerics.drift import Drift
from glassengine.numerics.exemptions import BELOW, DRAWN, PADDING, TIES, UNREAD, UNWRITTEN, Ledger, Masks
from glassengine.numerics.judgement import Judgement, unit_roundoff
from glassengine.numerics.mask_values import is_finite
from glassengine.numerics.tolerance import tolerance
from glassengine.numerics.verdict import TIED, Reference, SameBits
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.program.representation.program import Program
from glassengine.results import (
    FLAGGED,
    VERDICTS,
    Altered,
    Divergence,
    Figures,
    Hint,
    Pair,
    Skipped,
    TensorValues,
    worst,
)

_COMPENSATED = 3.0
MOST_WITH_VALUES = 64
_MOST_ELEMENTS = 1 << 24
"""Of a tensor whose elements are shown."""


@dataclass(frozen=True)
class Judged:
    """A tensor, its judgement, and whether its op introduced the error (None: only the graph can tell).

    `predicted` is what the op should have made where it was replayed, `inherited` gives the RMS of what the op's inputs
    carried in, and `local` the judgement of the op alone.
    """

    tensor: torch.Tensor
    judgement: Judgement
    introduced: bool | None
    inherited: Callable[[], float | None] = lambda: None
    local: Judgement | None = None
    is_clean: bool = False
    contradicts: bool = False
    exempt: Masks = field(default_factory=dict)
    differing: Differing | None = None
    predicted: torch.Tensor | None = None


def figures_of(baseline: torch.Tensor, candidate: torch.Tensor) -> Figures | None:
    """Return how far two tensors are apart by the tolerances of their dtypes; None where their shapes differ."""
    if baseline.shape != candidate.shape:
        return None
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in (baseline, candidate)]
    allowed = tolerance(*names)
    return measure(baseline, candidate, rtol=allowed.rtol, atol=allowed.atol)


def _of_dtype(node: Node, ours: torch.Tensor, theirs: torch.Tensor) -> Hint:
    """Return the hint of an op that is right but for its dtype."""
    here, there = (str(made.dtype).removeprefix("torch.") for made in (ours, theirs))
    name = called(op_name(node))
    text = f"dtype of {name}: {here} in the baseline, {there} in the candidate"
    change = Altered(ops=(name,), argument="dtype", baseline=here, candidate=there)
    return Hint("dtype", text, 1.0, evidence="argument", proven=True, change=change)


def _values_of(reference: Reference, candidate: torch.Tensor) -> TensorValues | None:
    """Return elements and axes of a wrong tensor, to be shown; None of a large or differently shaped one."""
    baseline = reference.native
    if candidate.numel() > _MOST_ELEMENTS or baseline.shape != candidate.shape:
        return None
    if reference.valid is not None:
        candidate = torch.where(reference.valid, candidate, baseline.to(candidate.dtype))
    return tensor_values(baseline, candidate)


def is_compensated(local: ReplayedTensor, accumulated: Judgement, reference: Reference, tensor: torch.Tensor) -> bool:
    """Whether the op was only fed and written another way (a scale moved into its input, say).

    An error that the op really introduced is in its result; here the result is closer to the baseline than that.
    """
    # If everything depends on a tie, no error was counted; a candidate that chose as the baseline did has none.
    of_result = reference.distance(tensor) if reference.is_silent else accumulated.rms_error
    introduced, exempt = local.judgement.rms_error, reference.known.exempt
    is_partly_chosen = bool(CHOICES & exempt.keys()) and not reference.is_silent
    if introduced is not None and is_partly_chosen and tensor.shape == local.predicted.shape:
        # What is right beside a tie says nothing of an error that is below the tie alone.
        apart = tensor.double() - local.predicted
        left_out = functools.reduce(torch.logical_or, exempt.values()).expand(apart.shape)
        introduced = rms(apart[~left_out])
    return introduced is not None and of_result is not None and introduced > _COMPENSATED * of_result


def padding_differs(tensor: torch.Tensor, reference: Reference) -> bool:
    """Whether a tensor is another one than the reference where that is padding."""
    # Other exclusions are followed to their end: nothing that counts depends on them.
    padding, native = reference.known.exempt.get(PADDING), reference.native
    if padding is None or tensor.shape != native.shape:
        return False
    if tensor.dtype is native.dtype and torch.equal(tensor, native):
        return False
    return bool(((tensor != native) & padding).any())


def inherited_in(found: ReplayedTensor, reference: Reference) -> float | None:
    """Return the RMS of what the inputs of an op carried in, from its result on these; None if unknown."""
    predicted = found.predicted
    if predicted.shape != reference.exact.shape or not predicted.is_floating_point():
        return None
    return rms(predicted - reference.exact)


def exempt_by_replay(found: ReplayedTensor, accumulated: Masks, tensor: torch.Tensor) -> Masks:
    """Return, by reason, the elements that do not count of a tensor whose op was replayed.

    The replay starts from what the candidate chose and drew, so choices above the op leave nothing out.
    """
    if found.exempt is not None:
        return found.exempt
    masks = {reason: mask for reason, mask in accumulated.items() if reason not in CHOICES}
    # The op itself chose otherwise among values that rounding cannot tell apart.
    if found.judgement.is_tie and tensor.shape == found.predicted.shape:
        masks[TIES] = tensor != found.predicted
    return masks


def contradicted_region(start: Node, contradicting: Collection[str], clean: Collection[str]) -> set[str] | None:
    """Return the nodes that `start` reaches, itself included, before one that contradicts on every path.

    Args:
        start: A node whose tensor is flagged.
        contradicting: Nodes whose tensors are right, and not what the op makes of the tensors paired with its inputs.
        clean: Nodes whose tensors are right.

    Returns:
        None where nothing contradicts, or where a path leads to a result or to a clean node that agrees with it.
    """
    found = [start]
    for node in walk([start], lambda one: (user for user in one.users if user.name not in contradicting)):
        if node.op == "output" or node.name in clean:
            return None
        found.append(node)
    has_wall = any(user.name in contradicting for node in found for user in node.users)
    return {node.name for node in found} if has_wall else None


UNREAD_ELEMENTS = "elements differ that no result reads"


@dataclass
class Score:
    """What one side did over all cases.

    Attributes:
        empty_nodes: Nodes of which every element was left out in some step.
        left_out: What was not judged, or not all of it, by site and reason; the first step counts.
        ledger: Counts elements that did not count.
        drift: What is lost where; None where it is not asked for.
        sums: Of each product that introduced an error, whether coarse sums are why; None where its values do not tell.
        unlike: Which result of a candidate's export is not the candidate's, in words; None where all are.
        may_tie: Whether in this case the side chose otherwise at a tie, or may have where it was not observed.
    """

    side: Side
    program: Program
    pairs: list[Pair] = field(default_factory=list)
    divergences: dict[str, Divergence] = field(default_factory=dict)
    coarsened: Divergence | None = None
    """The first tensor that has fewer bits than the baseline's and is off by more than those explain."""
    judged_nodes: set[str] = field(default_factory=set)
    empty_nodes: set[str] = field(default_factory=set)
    left_out: dict[tuple[str, str], Skipped] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    evidence: EvidenceBox | None = None
    unlike: str | None = None
    may_tie: bool = False
    drift: Drift | None = None
    sums: dict[str, bool | None] = field(default_factory=dict)
    _tracker: OriginTracker | None = None
    _num_seen: int = 0
    _num_with_values: int = 0
    _clean: set[str] = field(default_factory=set)
    _contradicting: set[str] = field(default_factory=set)
    _flagged: list[Node] = field(default_factory=list)
    _first_of_step: int = 0
    _differing: dict[str, Differing] = field(default_factory=dict)

    def found_parts(self) -> dict[str, Any]:
        """Return what was found, without the side and the program, which stay in their process."""
        kept = ("side", "program", "evidence", "may_tie")
        names = [one.name for one in dataclasses.fields(self) if one.name not in kept and not one.name.startswith("_")]
        return {name: getattr(self, name) for name in names} | {"results": self.results.found_so_far()}

    def merge(self, later: Mapping[str, Any]) -> None:
        """Add what `found` returned of later cases of the same side."""
        room = MOST_WITH_VALUES - sum(pair.values is not None for pair in self.pairs)
        for pair in later["pairs"]:
            room -= pair.values is not None
            self.pairs.append(pair if room >= 0 else dataclasses.replace(pair, values=None))
        for node, found in later["divergences"].items():
            first = self.divergences.setdefault(node, found)
            self.divergences[node] = dataclasses.replace(first, verdict=worst([first.verdict, found.verdict]))
        self.coarsened = self.coarsened or later["coarsened"]
        self.judged_nodes |= later["judged_nodes"]
        self.empty_nodes |= later["empty_nodes"]
        for key, skipped in later["left_out"].items():
            self.left_out.setdefault(key, skipped)
        self.ledger.add_all(later["ledger"])
        if self.drift is not None:
            self.drift.merge(later["drift"])
        self.sums |= {node: shown for node, shown in later["sums"].items() if self.sums.get(node) is None}
        self.unlike = self.unlike or later["unlike"]
        self.results.merge(later["results"])

    def fresh(self) -> Score:
        """Return a score of the same side that has judged nothing yet."""
        drift = None if self.drift is None else Drift()
        evidence = None if self.evidence is None else EvidenceBox(self.program)
        return Score(self.side, self.program, evidence=evidence, drift=drift)

    def begin(self, case: Case) -> None:
        """Start a case: neither caches nor blame outlive one."""
        self.side.begin(case)
        self._tracker = OriginTracker(self.program)
        self.may_tie = False

    @cached_property
    def results(self) -> EndToEnd:
        """The results of the side, end to end."""
        return EndToEnd(self.program, self.side.level, called=self.side.called)

    def visit(self, node: Node, reference: Reference, case: Case, step: int, *, tied: bool) -> bool:
        """Judge this side's values of `node`. A verdict is made in this order.

        1. exclusions   elements that may legally differ do not count: `reference.known`, see `judge.exclusions`
        2. floor        the noise that all ops above add up to, by the reference (`_judge`)
        3. replay       what the op makes of the candidate's own inputs: floor and bound of this op alone, then the
                        EXPLANATIONS of `judge.replay.replay` (`_judge`)
        4. compensation a replayed error that is not in the result was only written another way (`_judge`)
        5. path         introduced or inherited, or below a tie: `OriginTracker.visit`
        6. readers      elements that no result reads are left out after the step: `end_step`
        7. pairing      pairs that their right readers contradict are dropped after the step: `_unpair`
        8. gauges       what the next ops take back for any values is left out: `run.leave_out_gauges`
        9. softening    wrong becomes suspicious where it cannot matter: `conclude.softened`
        10. results     `results.Findings.conclude` has the rule of `ok`

        Where all sides have the program's bits in the whole step, `reference` is `SameBits`, and 2 to 4 are left out.

        Args:
            node: Of the baseline program.
            reference: Of its value in this step.
            case: What runs.
            step: Of the case.
            tied: Whether other sides, or rounding alone, chose otherwise here; counts where this side was not observed.

        Returns:
            Whether there is a tie here.
        """
        assert self._tracker is not None
        # Random in every side, and unknown to the reference from there on: only replay counts.
        is_drawn = DRAWN in reference.known.exempt
        if traits_of(node).is_arbitrary:
            self._tracker.visit(node, None, tied=is_drawn)
            if self.side.observed(node.name):
                site = self.program.sites.by_node[node.name][0].name
                self.ledger.add(site, reference.exact.numel(), {}, whole=DRAWN if is_drawn else UNWRITTEN)
            return tied
        found = [(seen, self._judge(node, seen, reference)) for seen in self.side.observed(node.name)]
        if not found:
            self.may_tie |= reference.unstable is not None
            self._tracker.visit(node, None, tied=tied or is_drawn)
            return tied
        observed, judged = max(found, key=lambda item: VERDICTS.index(item[1].judgement.verdict))
        judgement = judged.judgement
        if judged.is_clean:
            self._clean.add(node.name)
        if judged.contradicts:
            self._contradicting.add(node.name)
        # The reference itself excludes what depends on a tie that it knows.
        is_tied = judgement.is_tie and not reference.is_tie(judged.tensor)
        self.may_tie |= judgement.is_tie
        is_rounded = judged.tensor.is_floating_point() or judged.tensor.is_complex()
        visited = self._tracker.visit(
            node,
            judgement.verdict,
            introduced=judged.introduced,
            tied=is_tied or is_drawn,
            # Between exact values there is nothing to choose.
            is_choice=not is_rounded and not reference.known.is_exact,
            is_broken=is_rounded and not is_finite(judged.tensor),
            masked=PADDING in reference.known.exempt,
            padding_differs=padding_differs(judged.tensor, reference),
        )
        assert visited.verdict is not None
        if visited.verdict == "rounding" and judged.local is not None:
            judgement = judged.local
        self._leave_out(node, observed, judgement, reference, step)
        site = self._site(node, observed)
        is_below = visited.why is Why.BELOW_TIE
        self.ledger.add(site, judged.tensor.numel(), judged.exempt, whole=BELOW if is_below else None)
        if judgement.is_empty:
            return is_tied
        self.judged_nodes.add(node.name)
        flagged, replay, values = visited.verdict in FLAGGED, self.side.replay, None
        is_origin = flagged and not visited.inherited
        if is_origin:
            self._num_with_values += 1
            values = _values_of(reference, judged.tensor) if self._num_with_values <= MOST_WITH_VALUES else None
        self.pairs.append(
            Pair(
                step=step,
                site=site,
                candidate_site=observed.site,
                method=observed.method,
                confidence=1.0 if observed.method == "name+fingerprint" else 0.9,
                verdict=visited.verdict,
                judged_by="noise floor" if judged.introduced is None or replay is None else replay.method,
                figures=figures_of(reference.native, judged.tensor) if flagged else None,
                noise_ratio=judgement.noise_ratio,
                bound_ratio=judgement.bound_ratio,
                level=self.side.level,
                case=case.name,
                inherited=visited.inherited,
                reason=visited.reason or judgement.reason,
                dtype=str(reference.native.dtype).removeprefix("torch."),
                shape=tuple(reference.native.shape),
                values=values,
            )
        )
        if flagged:
            self._flagged.append(node)
        both = reference.native, judged.tensor
        units = [unit_roundoff(made.dtype) for made in both if made.is_floating_point()]
        if self.coarsened is None and visited.why is Why.MANY_ROUNDINGS and units[1:] > units[:1]:
            first = self._divergence(node, observed, judged, reference, step)
            self.coarsened = dataclasses.replace(first, hints=(_of_dtype(node, *both), *first.hints))
        if node.name in self._tracker.origins and is_origin:
            divergence = self._divergence(node, observed, judged, reference, step)
            if node.name not in self.divergences:
                if self.evidence is not None:
                    self.evidence.keep(self.side, node, observed, reference, step)
                if judged.differing is not None and len(self._differing) < MOST_MARKED:
                    self._differing[node.name] = judged.differing
                self.divergences[node.name] = divergence
            if traits_of(node).reads_memory and self.sums.get(node.name) is None:
                self.sums[node.name] = self._hints.is_summed_coarsely(node, judged.tensor)
        return is_tied or visited.why is Why.TIE

    def _judge(self, node: Node, observed: Observed, reference: Reference) -> Judged:
        """Judge one observed value: by replay where the op's inputs were observed, else by the accumulated floor."""
        cache_axis = self.program.sites.by_node[node.name][0].axes.get("cache")
        tensor = completed(observed.tensor, reference.native, cache_axis, self._num_seen)
        replay, replayed = self.side.replay, None
        if isinstance(reference, SameBits):
            introduced = None if replay is None else False
            return Judged(tensor, reference.judge(tensor), introduced, is_clean=True, exempt=reference.known.exempt)
        # What a replay finds right keeps the ratio of the replay.
        accumulated = reference.judge(tensor, roughly=replay is not None)
        is_clean = accumulated.verdict not in FLAGGED
        if replay is not None:
            computes = partial(self.side.computes, self.program)
            native = reference.native if accumulated.verdict == "identical" else None
            replayed = replay.judge(node, observed.tensor, reference.valid, reference.known, computes, native)
        if self.drift is not None:
            predicted = None if replayed is None else replayed.predicted
            self.drift.add(node.name, observed.site, reference, tensor, predicted)
        by_floor = Judged(tensor, accumulated, None, is_clean=is_clean, exempt=reference.known.exempt)
        if replayed is None or (replayed.judgement.is_empty and is_clean):
            return by_floor if replay is None else dataclasses.replace(by_floor, judgement=reference.judge(tensor))
        local = replayed.judgement
        if local.verdict in FLAGGED and is_compensated(replayed, accumulated, reference, tensor):
            return dataclasses.replace(by_floor, judgement=reference.judge(tensor), contradicts=is_clean)
        exempt = exempt_by_replay(replayed, by_floor.exempt, tensor)
        by_replay = dataclasses.replace(by_floor, inherited=partial(inherited_in, replayed, reference), exempt=exempt)
        other = self._hints.not_reached(node) if local.verdict not in FLAGGED else None
        if other is not None:
            local = Judgement("wrong", None, None, other)
        if local.verdict not in FLAGGED:
            judgement = local if is_clean or local.is_tie else accumulated
            return dataclasses.replace(by_replay, judgement=judgement, introduced=False, local=local)
        if local.verdict == "suspicious" and self._hints.differences(node, tensor, reference):
            # Two kinds of evidence: too large for rounding, and other arguments or weights than the baseline's.
            reason = "written differently, and too large for rounding"
            local = dataclasses.replace(local, verdict="wrong", reason=reason)
        return dataclasses.replace(
            by_replay,
            judgement=max((local, accumulated), key=lambda one: VERDICTS.index(one.verdict)),
            introduced=True,
            differing=differing(observed.tensor, replayed.predicted, replayed.again, exempt.values()),
            predicted=replayed.predicted,
        )

    @cached_property
    def _hints(self) -> Hints:
        return Hints(self.program, self.side)

    def _site(self, node: Node, observed: Observed) -> str:
        """The op's site; a module's own where only modules were observed and this one is not what the op made."""
        sites = self.program.sites.by_node[node.name]
        own = [site.name for site in sites if site.name == observed.site and site.kind in ("module", "tap")]
        return own[0] if own and len(self.side.observed(node.name)) > 1 else sites[0].name

    def _leave_out(self, node: Node, observed: Observed, judgement: Judgement, reference: Reference, step: int) -> None:
        """List a tensor that is not judged, or only in part.

        Elements of padding, of unwritten memory and below ties or draws are only counted, unless nothing else is left.
        """
        left_out = [TEXTS[reason] for reason in reference.known.exempt if reason in TEXTS]
        reasons = [f"in part: {reason}" for reason in left_out]
        if judgement.is_empty:
            self.empty_nodes.add(node.name)
            is_tied = reference.valid is None or bool(reference.valid.any())
            other = TIED if is_tied else PADDING if PADDING in reference.known.exempt else UNWRITTEN
            reasons = [f"all of it: {r}" for r in left_out or [other]]
        for reason in reasons:
            site = self._site(node, observed)
            self.left_out.setdefault((site, reason), Skipped(site, "both", reason, step=step, level=self.side.level))

    def end_case(self) -> None:
        """Give every divergence the worst verdict of what it caused."""
        assert self._tracker is not None
        self._unpair()
        for name, verdict in self._tracker.origins.items():
            if name in self.divergences:
                found = self.divergences[name]
                self.divergences[name] = dataclasses.replace(found, verdict=worst([found.verdict, verdict]))

    def _unpair(self) -> None:
        """Take back the pairs of the step that were none (see `contradicted_region`)."""
        dropped: set[str] = set()
        if self.side.pairs and self.side.program is not self.program:  # one program's ops are their own counterparts
            for node in self._flagged:
                dropped |= contradicted_region(node, self._contradicting, self._clean) or set()
        if dropped:
            self._drop(dropped)
        self._clean, self._contradicting, self._flagged = set(), set(), []
        self._first_of_step = len(self.pairs)

    def end_step(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Leave out what no result reads of the tensors that are wrong by themselves in this step of these `inputs`."""
        marked = {name: one.where for name, one in self._differing.items()}
        shown = {name for name, one in self._differing.items() if one.shows}
        known = unread(self.program, inputs, marked, read_by_softmax(self.program.graph)[1], shown) if marked else set()
        known = {name for name in known if self._differing[name].rest().verdict not in FLAGGED}
        own = {node.name for node in self._flagged} & self.divergences.keys()
        for name in known:
            del self.divergences[name]
            self.ledger.leave_out(UNREAD, self.program.sites.by_node[name][0].name, int(marked[name].sum()))
        if own and own <= known:  # what is inherited, from them
            for at, pair in enumerate(self.pairs[self._first_of_step :], self._first_of_step):
                if pair.verdict in FLAGGED:
                    self.pairs[at] = dataclasses.replace(pair, verdict="rounding", reason=UNREAD_ELEMENTS)
        else:
            self._drop(known)
        self._differing = {}

    def _drop(self, nodes: set[str]) -> None:
        sites = {site.name for node in nodes for site in self.program.sites.by_node.get(node, ())}
        kept = [p for p in self.pairs[self._first_of_step :] if p.site not in sites or p.verdict not in FLAGGED]
        self.pairs[self._first_of_step :] = kept
        judged = {pair.site for pair in self.pairs}
        for node in nodes & self.judged_nodes:
            if not any(site.name in judged for site in self.program.sites.by_node[node]):
                self.judged_nodes.discard(node)
        for node in nodes:
            self.divergences.pop(node, None)

    def begin_step(self, num_seen: int) -> None:
        """Start a step in which `num_seen` slots of the cache are in use."""
        assert self._tracker is not None
        self._unpair()
        self._num_seen = num_seen
        self._tracker.begin_step()

    def _divergence(
        self, node: Node, observed: Observed, judged: Judged, reference: Reference, step: int
    ) -> Divergence:
        judgement = judged.judgement
        hints = self._hints.of(node, judged.tensor, reference, [other.name for other in self._flagged])
        for name in self._hints.covered & self.divergences.keys():
            earlier = self.divergences[name]
            less = [hint for hint in earlier.hints if not hint.proven]
            # Of a tensor that was flagged before and is made anew here, the proof is this one; one that is only not
            # read here may have its own.
            is_own = name == self._hints.lost and len(less) < len(earlier.hints)
            if earlier.step == step and not is_own:
                self.divergences[name] = dataclasses.replace(earlier, hints=(hints[0], *less))
        place = self._hints.place
        expected = reference.native if judged.predicted is None else judged.predicted
        rank, more = self.side.blamed(node, observed, expected)
        site = place or self.program.sites.by_node[node.name][0]
        return Divergence(
            level=self.side.level,
            step=step,
            site=self._site(node, observed) if place is None else place.name,
            node=node.name,
            candidate_site=observed.site,
            source=site.source,
            verdict=judgement.verdict,
            noise_ratio=judgement.noise_ratio,
            bound_ratio=judgement.bound_ratio,
            introduced=judgement.rms_error,
            inherited=judged.inherited(),
            hints=tuple(sorted([*more, *hints], key=lambda hint: (-hint.proven, -hint.score))),
            rank=rank,
            num_untried=self._hints.num_untried,
        )
