"""Finds the line of each side that a divergence is about.

It is the line of the op that was flagged, unless what is proven says which other line holds the mistake; where nothing
is proven, it is the one line, or the one statement, that the two versions of a function do not share near the op. A
line that only picks a tensor, or a part of one, runs no op: the source has it, and a trace does not.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import linecache
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property, lru_cache

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.hypotheses.trials.hypothesis import constants_of, whole_of
from glassengine.judge.site_pairs import (
    ancestors,
    done_later,
    origin_of,
    passed_on,
    passes_on,
    place_of,
    readers_of,
    region_of,
)
from glassengine.judge.verdict.score import Score
from glassengine.program.representation.naming import depth_of, line_beside, op_name, source_line, user_frames
from glassengine.program.representation.program import Program
from glassengine.results import FLAGGED, Divergence
from glassengine.sites import code_of_line, parts_of_line

_ALIKE = 0.65
"""Share of the characters that two versions of a line have in common."""
_IS, _ASSIGNS = re.compile(" = "), re.compile(r" [-+*/@&|]*= ")
_METHOD = re.compile(r"([^\W\d]\w*)\.\w+\(")
_NAME = re.compile(r"(?!self\b)\b[^\W\d]\w*")
_MOST_PLACES = 24
"""Places in the code of each side, the nearest to the end of a region, of which each is compared with each."""
_DIVISIONS = (torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar)


def as_written(score: Score, program: Program, divergence: Divergence) -> Divergence:
    """Name the op that computes, on both sides, and the line of the candidate's own: that of a number proven wrong."""
    own, known = score.side.program, score.side.counterparts
    if own is None:
        return replace(divergence, candidate_source=None)
    ends = RegionEnds(program, own, known, divergence) if divergence.node in known else None
    named = divergence if ends is None else ends.at_what_computes()
    is_proven = any(hint.proven for hint in divergence.hints[:1])
    added = line = both = None
    if ends is not None and is_proven:
        added = ends.line_of_added_op()
        line = ends.line_of_number() or added or ends.line_of_reader()
        both = ends.lines_that_differ() if line is None or _is_of_both(program, line) else None
    is_told = line is not None and not _is_of_both(program, line)
    if line and is_told and _is_of_both(own, named.source):
        # The baseline's line for which the candidate has this one.
        runs = next((one.node for one in own.sites if one.source == line), None)
        if runs is not None and (ours := _changed(own, program, own.node(runs))):
            return replace(named, source=ours, candidate_source=line)
    if ends is not None and both is None and not is_told:
        beside = ends.lines_of_region()
        both = None if beside is None or _is_right(score, program, beside[0]) else beside
    if both is not None:
        return replace(named, source=both[0], candidate_source=both[1])
    site = own.sites.get(named.candidate_site)
    line = line or (None if site is None else site.source)
    is_another = named.source and code_of_line(line) != code_of_line(named.source)
    if ends is not None and line and line != added and is_another and ends.is_beside(line):
        line = _line_of_same_ops(program, own, named.source)
    line = line or _line_of_other_layers(own, named)
    node = next((site.node for site in program.sites if site.name == named.site), None)
    if line is None and node is not None and is_proven:
        source = _statement_not_run(program.node(node), own.graph.nodes)
        return replace(named, source=source or named.source, candidate_source=None)
    return replace(named, candidate_source=line)


def _is_right(score: Score, program: Program, line: str) -> bool:
    """Whether all ops of a line of the baseline compute, were judged as they are, and are right."""
    sites = [site for site in program.sites if site.source == line]
    right = {pair.site for pair in score.pairs if pair.verdict not in FLAGGED}
    turned = {node for node, pair in score.side.pairs.items() if pair.arrangement is not None}
    return bool(sites) and all(
        site.name in right and site.node not in turned and not passes_on(program.node(site.node)) for site in sites
    )


@dataclass(frozen=True)
class RegionEnds:
    """The op of each side at which a divergence was found; the ops above it, up to counterparts, are its region.

    Attributes:
        baseline: Its program.
        program: The candidate's.
        counterparts: Node of the baseline -> node of the candidate.
        divergence: Its first hint counts.
    """

    baseline: Program
    program: Program
    counterparts: Mapping[str, str]
    divergence: Divergence

    @cached_property
    def own(self) -> Node:
        """The op of the baseline."""
        return self.baseline.node(self.divergence.node or "")

    @cached_property
    def there(self) -> Node:
        """Its counterpart."""
        return self.program.node(self.counterparts[self.divergence.node or ""])

    @cached_property
    def _known(self) -> set[str]:
        """Nodes of the candidate that have counterparts."""
        return set(self.counterparts.values())

    @cached_property
    def _region(self) -> list[Node]:
        """Ops of the candidate's region."""
        return region_of(self.there, self._known)[0]

    def at_what_computes(self) -> Divergence:
        """Name the ops that compute where a region ends in views: what a view passes on, it did not make."""
        named = self.divergence
        own = self.baseline.sites.op_of(origin_of(self.own, self.counterparts).name)
        there = self.program.sites.op_of(origin_of(self.there, self._known).name)
        is_its_end = named.site in {site.name for site in self.baseline.sites.by_node.get(self.own.name, ())}
        if own is not None and own.node != self.own.name and is_its_end:
            named = replace(named, site=own.name, source=own.source)
        if there is not None and there.node != self.there.name:
            named = replace(named, candidate_site=there.name)
        return named

    def line_of_number(self) -> str | None:
        """Return the line of the one op of the region that has the number which is proven to be the mistake.

        A region of several lines is named by the op that it ends in; None where no op, or more than one, has the
        number.
        """
        change = self.divergence.hints[0].change
        # A whole number is a size or an axis of other ops as well.
        if change is None or not isinstance(change.candidate, float):
            return None
        holders = [op for op in self._region if _has(op, change.candidate)]
        return _source(self.program, holders[0]) if len(holders) == 1 else None

    def line_of_added_op(self) -> str | None:
        """Return the line of what only the candidate has in a region that is proven wrong.

        None where that is in several lines, where what goes in has taken the place of what comes out, and where the
        candidate lacks another op than the one that is changed.
        """
        ours, ends = region_of(self.own, self.counterparts)
        if self.there.name in {self.counterparts[end.name] for end in ends}:
            return None
        numbers = Counter(op.target for op in ours if not passes_on(op))
        numbers.subtract(op.target for op in self._region if not passes_on(op))
        changed = self.divergence.hints[0].change
        own = () if changed is None else changed.ops
        lacking = [self.baseline.sites.op_of(op.name) for op in ours if numbers[op.target] > 0]
        is_known = all(site is not None and site.name.endswith(own) for site in lacking)
        if changed is not None and not (changed.argument or changed.exchanged or changed.operands):
            is_known = is_known or len({site and site.source for site in lacking}) == 1  # one line instead of another
        sources = {_source(self.program, op) for op in self._region if numbers[op.target] < 0}
        return sources.pop() if len(sources) == 1 and is_known else None

    def line_of_reader(self) -> str | None:
        """Return the line of an op inside of a region, or where the candidate reads what an op is missing for.

        It is the line that is most like the baseline's. None where no op is missing.
        """
        site = self.baseline.sites.get(self.divergence.site)
        node = self.own if site is None else self.baseline.node(site.node)
        there = self.counterparts.get(node.name)
        if whole_of(node) is not None and there not in (None, self.there.name):
            return source_line(self.program.node(there))
        is_inside = node is not self.own and there is None
        is_passed_by = any(self.counterparts.get(source.name) == self.there.name for source in node.all_input_nodes)
        is_missing = is_passed_by and done_later(node, self.there, self.counterparts) is None
        return _changed(self.baseline, self.program, node) if is_inside or is_missing else None

    def lines_that_differ(self) -> tuple[str | None, str] | None:
        """Return the lines of both sides that call the one line of an op otherwise, or do the op later."""
        if (later := done_later(self.own, self.there, self.counterparts)) is not None:
            between = next(origin_of(one) for one in later.all_input_nodes if self.there in ancestors(one))
            ours = line_beside(self.own, next(iter(readers_of(self.own)), self.own))
            theirs = line_beside(later, between)
            is_of_both = _is_of_both(self.baseline, theirs)
            if is_of_both and (callers := _parting(_frames(self.own), _frames(later))):
                return callers
            if is_of_both and code_of_line(ours) != code_of_line(theirs):
                theirs = source_line(between) or theirs
            return None if theirs is None else (ours, theirs)
        frames = _frames(self.own), _frames(self.there)
        innermost = [[*map(code_of_line, lines[:1])] for lines in frames]
        return _parting(*frames) if innermost[0] == innermost[1] else None

    def lines_of_region(self) -> tuple[str, str] | None:
        """Return the line of each side that the other has not, in the functions that run the ops of a region.

        None where the lines of its end differ: but not where its site is another op, or the candidate's stands in both.
        """
        ends = self.own, self.there
        lines = [source_line(end) for end in ends]
        is_one = code_of_line(lines[0]) == code_of_line(lines[1])
        if not is_one and self.divergence.source == lines[0] and not _is_of_both(self.baseline, lines[1]):
            return None
        both = []
        for end, known in zip(ends, (self.counterparts, self._known), strict=True):
            views = [view for source in end.all_input_nodes for view in passed_on(source)]
            by_frames = {tuple(_frames(op)): op for op in [*views, *region_of(end, known)[0]]}
            both.append([*reversed(by_frames.values())][:_MOST_PLACES])
        operands = zip(*(end.all_input_nodes for end in ends), strict=False)
        others = [(own, read) for own, read in operands if self.counterparts.get(own.name, own.name) != read.name]
        tried = itertools.chain(itertools.product(*both), others)
        return next(filter(None, itertools.starmap(_statements_apart, tried)), None)

    def is_beside(self, line: str) -> bool:
        """Whether a line stands in both sides, and makes or reads a tensor that lacks what a mistake is about."""
        is_of_source = self.there.name in {self.counterparts.get(source.name) for source in self.own.all_input_nodes}
        change = self.divergence.hints[0].change if self.divergence.hints else None
        if change is not None and self.own.target is self.there.target and change.is_of(self.divergence.site):
            return False  # both have the op that is another
        is_near = passes_on(self.there) or is_of_source or code_of_line(source_line(self.own)) == code_of_line(line)
        return is_near and _is_of_both(self.baseline, line)


def _source(program: Program, op: Node) -> str | None:
    return None if (site := program.sites.op_of(op.name)) is None else site.source


def _has(op: Node, number: float) -> bool:
    """Whether an op uses a number, which a division has turned over."""
    leaves = pytree.tree_leaves(constants_of([op]))
    literals = [leaf for leaf in leaves if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)]
    if op.target in _DIVISIONS:
        literals += [1 / leaf for leaf in literals if leaf]
    return any(math.isclose(leaf, number, rel_tol=1e-6) for leaf in literals)


def _frames(node: Node) -> list[str]:
    """Return the lines by which a node was made, the innermost first."""
    return [source_line(node, depth) or "" for depth in range(depth_of(node), 0, -1)]


def _parting(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str] | None:
    """Return the first lines of two lists that are written otherwise, not those that one list has besides."""
    here, there = ([code_of_line(line) for line in lines] for lines in (ours, theirs))
    for tag, i, i_end, j, j_end in SequenceMatcher(None, here, there, autojunk=False).get_opcodes():
        if tag == "replace":
            is_one = i_end - i == j_end - j or SequenceMatcher(None, here[i], there[j]).ratio() >= _ALIKE
            return (ours[i], theirs[j]) if is_one else None
    return None


def _is_of_both(baseline: Program, line: str | None) -> bool:
    """Whether a line of the candidate stands in the baseline word for word: what is wrong is another one, if any is."""
    return code_of_line(line) in _lines(baseline, "").values()


def _line_of_same_ops(baseline: Program, program: Program, source: str | None) -> str | None:
    """Return the candidate's line that is written as a line of the baseline, and runs the same ops as often."""
    ours, theirs = (
        [site for site in one.sites if site.kind == "op" and code_of_line(site.source) == code_of_line(source)]
        for one in (baseline, program)
    )
    lines = {site.source for site in theirs}
    return lines.pop() if len(lines) == 1 and Counter(s.op for s in ours) == Counter(s.op for s in theirs) else None


def _line_of_other_layers(program: Program, found: Divergence) -> str | None:
    """Return the candidate's line that is written as a line of the baseline, where only another layer runs its op."""
    if found.source is None:
        return None
    place, code = place_of(found.site, found.source), code_of_line(found.source)
    alike = [one for one in program.sites if code_of_line(one.source) == code]
    lines = {one.source for one in alike if place_of(one.name, found.source) == place}
    return lines.pop() if len(lines) == 1 else None


def _changed(baseline: Program, program: Program, node: Node) -> str | None:
    """Return the line of a program that is most like that of a baseline's op, which it does not have; None without it.

    Where both have the op's module, its lines alone count: another layer may be right.
    """
    module = site.name.rpartition("/")[0] if (site := baseline.sites.op_of(node.name)) else ""
    every = [{one: _lines(program, one) for one in ("", module)} for program in (baseline, program)]
    ours, theirs = (lines[module if all(one[module] for one in every) else ""] for lines in every)
    code, known = code_of_line(source_line(node)), set(ours.values())
    ratios = {
        source: SequenceMatcher(None, code, other).ratio() for source, other in theirs.items() if other not in known
    }
    best = max(ratios, key=lambda source: ratios[source], default=None)
    return best if code not in theirs.values() and best is not None and ratios[best] >= _ALIKE else None


def _lines(program: Program, module: str) -> dict[str | None, str]:
    """Return the lines of the ops of a program, or of those of one module: "file:line: code" -> code."""
    ops = (site for site in program.sites if site.kind == "op" and site.name.startswith(f"{module}/" if module else ""))
    return {site.source: parts[2] for site in ops if (parts := parts_of_line(site.source))}


def _statements_apart(ours: Node, theirs: Node) -> tuple[str, str] | None:
    """Return "file:line: code" of the statement of each side that the other lacks, in a function that runs two ops.

    It runs the op, makes what the statement that runs it reads, or reads what that makes, of an op that takes a part.
    The innermost function with such a statement counts; where none has one, those that are further above the op count.
    None where a function has several.
    """
    is_part = op_name(ours) == "getitem"
    frames = _of_both(user_frames(ours), user_frames(theirs))[::-1]
    for is_deep, pair in itertools.product((False, True), frames):
        texts, around = zip(*map(_at, pair), strict=True)
        names = [_names("".join(around[i][-1:]), texts[i] if is_deep else ()) for i in (0, 1)]
        apart = [
            {
                text: line
                for text, line in texts[i].items()
                if text not in texts[1 - i] and _is_near(text, around[i], names[i], is_part)
            }
            for i in (0, 1)
        ]
        if any(apart):
            both = [line for i in (0, 1) if (line := _the_one(apart[i], int(pair[i]["line"]), around[i][:-1]))]
            codes = [parts[2] for line in both if (parts := parts_of_line(line))]
            is_one = len(codes) == 2 and SequenceMatcher(None, codes[0], codes[1]).ratio() >= _ALIKE
            return (both[0], both[1]) if is_one else None
    return None


def _the_one(apart: Mapping[str, str], last: int, loops: Sequence[str]) -> str | None:
    """Return the line of the one statement that is not after a line; a loop or condition around it where none is."""
    before = {text: line for text, line in apart.items() if (at := parts_of_line(line)) and int(at[1]) <= last} or apart
    lines = [line for text, line in before.items() if text not in loops] or [*before.values()]
    return lines[0] if len(lines) == 1 else None


def _statement_not_run(ours: Node, theirs: Iterable[Node]) -> str | None:
    """Return "file:line: code" of the statement that calls the one that makes an op, where other ops run that one.

    A module that is not called is missing where it is called: its own lines may run for another one. None where the
    innermost statement is run by none of the others, and where all are run.
    """
    run = {_at(frame)[1][-1:] for node in theirs for frame in user_frames(node)}
    for depth, frame in enumerate(user_frames(ours)[::-1]):
        places, around = _at(frame)
        if around and around[-1:] not in run:
            return places.get(around[-1]) if depth else None
    return None


def _at(frame: re.Match[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    return _statements(frame["file"], int(frame["line"]))


def _of_both(ours: list[re.Match[str]], theirs: list[re.Match[str]]) -> list[tuple[re.Match[str], re.Match[str]]]:
    """Return the frames of each side that stand in one place; where one side calls more, the last of one name."""
    if len(ours) == len(theirs):
        return list(zip(ours, theirs, strict=True))
    here, there = ([frame["function"] for frame in frames] for frames in (ours, theirs))
    blocks = SequenceMatcher(None, here, there).get_matching_blocks()
    return [(ours[i + k], theirs[j + k]) for i, j, size in blocks for k in range(size)][-1:]


@lru_cache(maxsize=256)
def _statements(file: str, line: int) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the statements of the function around a line, each with "file:line: code", and those that hold the line.

    The last of these is on the line, the others are loops and conditions around it.
    """
    name, lines = file.split("/site-packages/")[-1], linecache.getlines(file)
    around = [one for one in _parsed("".join(lines)) if one.lineno <= line <= (one.end_lineno or 0)]
    functions = [one for one in around if isinstance(one, ast.FunctionDef)]
    inside = [one for one in ast.walk(functions[-1]) if isinstance(one, ast.stmt)][1:] if functions else []
    texts: dict[str, int] = {}
    for one in inside:  # of equal ones the last that is not after the line
        text = ast.unparse(one).partition("\n")[0]
        texts[text] = one.lineno if one.lineno <= line else texts.get(text, one.lineno)
    places = {text: f"{name}:{number}: {lines[number - 1].strip()}" for text, number in texts.items()}
    own = around[around.index(functions[-1]) + 1 :] if functions else []
    return places, tuple(ast.unparse(one).partition("\n")[0] for one in own)


@lru_cache(maxsize=16)
def _parsed(source: str) -> list[ast.stmt]:
    """Return the statements of a file, those inside of others after these; none where it cannot be parsed."""
    with contextlib.suppress(SyntaxError):
        return [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.stmt)]
    return []


def _names(own: str, texts: Iterable[str]) -> set[str]:
    """Return the names that a statement reads, and those that others read to make or to change them."""
    found, before = _read(own), set[str]()
    while found != before:
        before = set(found)
        for text in texts:
            found |= _read(text) if _made(text) & before else set()
    return found


def _is_near(text: str, around: Sequence[str], names: set[str], is_part: bool) -> bool:
    """Whether a statement is one of those around a line, makes what the line reads, or reads a part that it makes."""
    return text in around or bool(_made(text) & names) or (is_part and bool(_made("".join(around[-1:])) & _read(text)))


def _made(text: str) -> set[str]:
    """Return the names that a statement gives values, or of which it calls a method."""
    called = _METHOD.match(text)
    return {called[1]} if called else set(_NAME.findall("".join(_ASSIGNS.split(text, maxsplit=1)[:-1])))


def _read(text: str) -> set[str]:
    return set(_NAME.findall(_IS.split(text, maxsplit=1)[-1]))
