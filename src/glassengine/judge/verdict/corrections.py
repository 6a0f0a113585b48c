"""Says how the candidate's line should read, and which value of the baseline's configuration a number comes from.

A line is corrected where one number, one name, one list of axes or one call in it is the mistake, and nothing else in
the line could be meant.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import itertools
import keyword
import math
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch.fx import Node
from torch.nn import functional
from torch.utils import _pytree as pytree

from glassengine.judge.hypotheses.trials.hypothesis import constants_of, whole_of
from glassengine.judge.site_pairs import (
    ancestors,
    done_later,
    origin_of,
    passed_on,
    passes_on,
    readers_of,
    region_of,
)
from glassengine.judge.verdict.origins import place_of
from glassengine.judge.verdict.statements import ALIKE, statements_apart
from glassengine.program.representation.naming import depth_of, line_beside, source_line
from glassengine.program.representation.program import Program
from glassengine.results import Altered, Divergence, Findings, Hint
from glassengine.sites import Site, code_of_line, parts_of_line

_OF_AXES = frozenset({"dims", "dim"})
_OF_PLACES = frozenset({"index", "start", "end", "step", "length"})
"""Arguments that a line may calculate: a number in `x[i - 1]` is a part of one."""
_OF_SHAPES = frozenset({"reshape", "view", "expand", "repeat", "flatten", "unflatten", "transpose", "permute", "size"})
"""Functions whose whole numbers are sizes and axes: none of them is a number of another op on the line."""
_LEAST_AXES = 3
"""Two numbers beside each other are found in many lines."""
_MOST_PLACES = 24
"""Places in the code of each side, the nearest to the end of a region, of which each is compared with each."""
_DIVISIONS = (torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar)


def line_of_number(program: Program | None, counterparts: Mapping[str, str], divergence: Divergence) -> str | None:
    """Return "file:line: line" of the one op of a region that has the number which is proven to be the mistake.

    A region of several lines is named by the op that it ends in; None where no op, or more than one, has the number.

    Args:
        program: The candidate's; None where it has none.
        counterparts: Node of the baseline -> node of `program`.
        divergence: Its first hint counts.
    """
    end = _proven(program, counterparts, divergence)
    change = None if end is None else divergence.hints[0].change
    # A whole number is a size or an axis of other ops as well.
    if program is None or end is None or change is None or not isinstance(change.candidate, float):
        return None
    holders = [op for op in region_of(end, set(counterparts.values()))[0] if _has(op, change.candidate)]
    return _source(program, holders[0]) if len(holders) == 1 else None


def _proven(program: Program | None, counterparts: Mapping[str, str], divergence: Divergence) -> Node | None:
    """Return the candidate's node of a divergence whose mistake is proven."""
    there = counterparts.get(divergence.node or "")
    is_proven = any(hint.proven for hint in divergence.hints[:1])
    return None if program is None or there is None or not is_proven else program.node(there)


def line_of_reader(
    baseline: Program, program: Program | None, counterparts: Mapping[str, str], divergence: Divergence
) -> str | None:
    """Return "file:line: line" of an op inside of a region, or where the candidate reads what an op is missing for.

    It is the line that is most like the baseline's. None where no op is missing.
    """
    there = _proven(program, counterparts, divergence)
    if program is None or there is None:
        return None
    named = (one.node for one in baseline.sites if one.name == divergence.site)
    node = baseline.node(next(named, divergence.node or ""))
    if whole_of(node) is not None and counterparts.get(node.name, there.name) != there.name:
        return source_line(program.node(counterparts[node.name]))
    is_inside = node.name != divergence.node and node.name not in counterparts
    is_passed_by = any(counterparts.get(source.name) == there.name for source in node.all_input_nodes)
    is_missing = is_passed_by and done_later(node, there, counterparts) is None
    return _changed(baseline, program, node) if is_inside or is_missing else None


def _frames(node: Node) -> list[str]:
    """Return the lines by which a node was made, the innermost first."""
    return [source_line(node, depth) or "" for depth in range(depth_of(node), 0, -1)]


def _parting(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str] | None:
    """Return the first lines of two lists that are written otherwise, not those that one list has besides."""
    here, there = ([code_of_line(line) for line in lines] for lines in (ours, theirs))
    for tag, i, i_end, j, j_end in SequenceMatcher(None, here, there, autojunk=False).get_opcodes():
        if tag == "replace":
            is_one = i_end - i == j_end - j or SequenceMatcher(None, here[i], there[j]).ratio() >= ALIKE
            return (ours[i], theirs[j]) if is_one else None
    return None


def is_beside(
    baseline: Program, program: Program, counterparts: Mapping[str, str], divergence: Divergence, line: str
) -> bool:
    """Whether a line stands in both sides, and makes or reads a tensor that lacks what a mistake is about."""
    own, there = baseline.node(divergence.node or ""), program.node(counterparts[divergence.node or ""])
    is_of_source = there.name in {counterparts.get(source.name) for source in own.all_input_nodes}
    change = divergence.hints[0].change if divergence.hints else None
    if change is not None and own.target is there.target and [*map(_end, change.ops)] == [_end(divergence.site)]:
        return False  # both have the op that is another
    is_near = passes_on(there) or is_of_source or code_of_line(source_line(own)) == code_of_line(line)
    return is_near and is_of_both(baseline, line)


def lines_that_differ(
    baseline: Program, program: Program | None, counterparts: Mapping[str, str], divergence: Divergence
) -> tuple[str | None, str] | None:
    """Return the lines of both sides that call the one line of an op in other words or order, or do the op later.

    None where nothing differs.
    """
    there = _proven(program, counterparts, divergence)
    if program is None or there is None:
        return None
    own = baseline.node(divergence.node or "")
    if (later := done_later(own, there, counterparts)) is not None:
        between = next(origin_of(one) for one in later.all_input_nodes if there in ancestors(one))
        beside = line_beside(own, next(iter(readers_of(own)), own)), line_beside(later, between)
        if code_of_line(beside[0]) == code_of_line(beside[1]) or not is_of_both(baseline, beside[1]):
            return None if beside[1] is None else (beside[0], beside[1])
        earlier = source_line(between)
        return _parting(_frames(own), _frames(later)) or (None if earlier is None else (beside[0], earlier))
    ours, theirs = _frames(own), _frames(there)
    return _parting(ours, theirs) if [*map(code_of_line, ours[:1])] == [*map(code_of_line, theirs[:1])] else None


def is_of_both(baseline: Program, line: str | None) -> bool:
    """Whether a line of the candidate stands in the baseline word for word: what is wrong is another one, if any is."""
    return code_of_line(line) in _lines(baseline, "").values()


def line_of_same_ops(baseline: Program, program: Program, source: str | None) -> str | None:
    """Return the candidate's line that is written as a line of the baseline, and runs the same ops as often."""
    ours, theirs = (
        [site for site in one.sites if site.kind == "op" and code_of_line(site.source) == code_of_line(source)]
        for one in (baseline, program)
    )
    lines = {site.source for site in theirs}
    return lines.pop() if len(lines) == 1 and Counter(s.op for s in ours) == Counter(s.op for s in theirs) else None


def line_of_other_layers(program: Program | None, found: Divergence) -> str | None:
    """Return the candidate's line that is written as a line of the baseline, where only another layer runs its op."""
    if program is None or found.source is None:
        return None
    place, code = place_of(found.site, found.source), code_of_line(found.source)
    alike = [one for one in program.sites if code_of_line(one.source) == code]
    lines = {one.source for one in alike if place_of(one.name, found.source) == place}
    return lines.pop() if len(lines) == 1 else None


def line_replaced(baseline: Program, program: Program | None, ours: str | None, theirs: str) -> str | None:
    """Return the line of the baseline that the candidate has another one for, where that of the op is in both."""
    node = None if program is None else next((one.node for one in program.sites if one.source == theirs), None)
    if program is None or node is None or not is_of_both(program, ours):
        return None
    return _changed(program, baseline, program.node(node))


def lines_of_region(
    baseline: Program, program: Program | None, counterparts: Mapping[str, str], divergence: Divergence
) -> tuple[str, str] | None:
    """Return the line of each side that the other has not, in the functions that run the ops of a region.

    None where the lines of its end differ: but not where its site is another op, or the candidate's stands in both.
    """
    there = counterparts.get(divergence.node or "")
    if program is None or there is None:
        return None
    ends = baseline.node(divergence.node or ""), program.node(there)
    lines = [source_line(end) for end in ends]
    if (
        code_of_line(lines[0]) != code_of_line(lines[1])
        and divergence.source == lines[0]
        and not is_of_both(baseline, lines[1])
    ):
        return None
    both = []
    for end, known in zip(ends, (counterparts, set(counterparts.values())), strict=True):
        views = [view for source in end.all_input_nodes for view in passed_on(source)]
        by_frames = {tuple(_frames(op)): op for op in [*views, *region_of(end, known)[0]]}
        both.append([*reversed(by_frames.values())][:_MOST_PLACES])
    operands = zip(*(end.all_input_nodes for end in ends), strict=False)
    others = [(own, read) for own, read in operands if counterparts.get(own.name, own.name) != read.name]
    tried = itertools.chain(itertools.product(*both), others)
    return next(filter(None, itertools.starmap(statements_apart, tried)), None)


def _changed(baseline: Program, program: Program, node: Node) -> str | None:
    """Return the line of a program that is most like that of a baseline's op, which it does not have; None without it.

    Where both have the op's module, its lines alone count: another layer may be right.
    """
    module = site.name.rpartition("/")[0] if (site := _site(baseline, node)) else ""
    every = [{one: _lines(program, one) for one in ("", module)} for program in (baseline, program)]
    ours, theirs = (lines[module if all(one[module] for one in every) else ""] for lines in every)
    code, known = code_of_line(source_line(node)), set(ours.values())
    ratios = {
        source: SequenceMatcher(None, code, other).ratio() for source, other in theirs.items() if other not in known
    }
    best = max(ratios, key=lambda source: ratios[source], default=None)
    return best if code not in theirs.values() and best is not None and ratios[best] >= ALIKE else None


def _end(site: str) -> str:
    return site.rpartition("/")[2]


def _lines(program: Program, module: str) -> dict[str | None, str]:
    """Return the lines of the ops of a program, or of those of one module: "file:line: code" -> code."""
    ops = (site for site in program.sites if site.kind == "op" and site.name.startswith(f"{module}/" if module else ""))
    return {site.source: parts[2] for site in ops if (parts := parts_of_line(site.source))}


def line_of_added_op(
    baseline: Program, program: Program | None, counterparts: Mapping[str, str], divergence: Divergence
) -> str | None:
    """Return "file:line: line" of what only the candidate has in a region that is proven wrong.

    None where that is in several lines, where what goes in has taken the place of what comes out, and where the
    candidate lacks another op than the one that is changed.
    """
    there = _proven(program, counterparts, divergence)
    if program is None or there is None:
        return None
    ours, ends = region_of(baseline.node(divergence.node or ""), counterparts)
    if there.name in {counterparts[end.name] for end in ends}:
        return None
    theirs = region_of(there, set(counterparts.values()))[0]
    numbers = Counter(op.target for op in ours if not passes_on(op))
    numbers.subtract(op.target for op in theirs if not passes_on(op))
    changed = divergence.hints[0].change
    own = () if changed is None else changed.ops
    lacking = [_site(baseline, op) for op in ours if numbers[op.target] > 0]
    is_known = all(site is not None and site.name.endswith(own) for site in lacking)
    if changed is not None and not (changed.argument or changed.exchanged or changed.operands):
        is_known = is_known or len({site and site.source for site in lacking}) == 1  # one line instead of another
    sources = {_source(program, op) for op in theirs if numbers[op.target] < 0}
    return sources.pop() if len(sources) == 1 and is_known else None


def _site(program: Program, op: Node) -> Site | None:
    return next((site for site in program.sites.by_node.get(op.name, ()) if site.kind == "op"), None)


def _source(program: Program, op: Node) -> str | None:
    return None if (site := _site(program, op)) is None else site.source


def _has(op: Node, number: float) -> bool:
    """Whether an op uses a number, which a division has turned over."""
    literals = [leaf for leaf in pytree.tree_leaves(constants_of([op])) if isinstance(leaf, (int, float))]
    if op.target in _DIVISIONS:
        literals += [1 / leaf for leaf in literals if leaf]
    return any(_is_same(leaf, number) for leaf in literals)


def with_lines(divergence: Divergence) -> Divergence:
    """Return a divergence whose proven mistakes say how the candidate's line should read."""
    source = parts_of_line(divergence.candidate_source)
    if source is None:
        return divergence

    def lined(hint: Hint) -> Hint:
        if not hint.proven or hint.change is None:
            return hint
        # The line is that of the op that was flagged: of another op of its region, a call in it is not the one.
        own = [*map(_end, hint.change.ops)] == [_end(divergence.site)]
        line = corrected(source[2], hint.change, is_own=own)
        return hint if line is None else replace(hint, line=line)

    return replace(divergence, hints=tuple(map(lined, divergence.hints)))


def corrected(line: str, change: Altered, *, is_own: bool = True) -> str | None:
    """Return a line with the baseline's literal instead of the candidate's; None where it is not there exactly once.

    Args:
        line: Of Python.
        change: What is another in the candidate.
        is_own: Whether the line is that of the op which is changed: only then its calls are.
    """
    wrong, right = change.candidate, change.baseline
    op = change.ops[0].rpartition("/")[2].partition(".")[0] if is_own and len(change.ops) == 1 else ""
    if change.exchanged:
        return exchanged(line, op, change.exchanged) if op else None
    if change.argument == "bias" and isinstance(right, str):
        return with_bias(line, op, right) if op else None
    if change.argument == "transposed":
        return transposed(line, change.operands[0]) if len(change.operands) == 1 else None
    if isinstance(right, list):
        return _with_axes(line, right, wrong) if change.argument in _OF_AXES else None
    if right is None or type(wrong) is not type(right):
        return None
    is_name = isinstance(wrong, str) and change.argument == "activation"
    if is_name and not (wrong.isidentifier() and right.isidentifier() and not keyword.iskeyword(right)):
        return None
    tokens = list(_tokens(line, names=is_name))
    places = [
        (start, end)
        for start, end, value in tokens
        if _is_same(value, wrong) and (isinstance(value, type(wrong)) or _is_operand(line, start, end))
        if isinstance(value, float) or _called(line, start) not in _OF_SHAPES - {op}
        if change.argument not in _OF_PLACES or not _is_operand(line, start, end)
        if change.argument != "b" or line[:start].endswith("[")  # the item of a list
    ]
    if not places and op and change.argument is not None:
        divided = _divided(line, tokens, right, wrong)
        return divided or with_argument(line, op, change.argument, wrong, right)
    if len(places) != 1:
        return None
    ((start, end),) = places
    is_known = is_name or not isinstance(right, float) or math.isfinite(right)
    written = (right if is_name else repr(right)) if is_known else f"float('{right}')"
    return line[:start] + written + line[end:]


def _is_operand(line: str, start: int, end: int) -> bool:
    """Whether a literal is multiplied, divided, added or a power: a number that stands alone is a size or an index."""
    return line[:start].rstrip().endswith(("*", "/", "+", "-")) or line[end:].lstrip().startswith(("*", "/", "+", "-"))


def _called(line: str, place: int) -> str:
    """Return the name of the function among whose arguments a place of a line is; empty outside of calls."""
    depth = 0
    for at in range(place - 1, -1, -1):
        depth += (line[at] in ")]") - (line[at] in "([")
        if depth < 0:
            return (re.search(r"\w*$", line[:at]) or [""])[0] if line[at] == "(" else ""
    return ""


def _with_axes(line: str, right: list[Any], wrong: Any) -> str | None:
    """Return a line with axes in the right order, where they stand in it once and nothing else could be meant."""
    if not isinstance(wrong, list) or len(wrong) != len(right) or len(wrong) < _LEAST_AXES:
        return None
    found = list(re.finditer(r"(?<![\w.,] )(?<![\w.,-])" + r",\s*".join(map(str, wrong)) + r"(?![\w.]|,\s*-?\w)", line))
    return line[: found[0].start()] + ", ".join(map(str, right)) + line[found[0].end() :] if len(found) == 1 else None


def _divided(line: str, tokens: list[tuple[int, int, Any]], right: Any, wrong: Any) -> str | None:
    """Return a line with another divisor, where a factor is the one number that it divides by."""
    if not (isinstance(wrong, float) and isinstance(right, float) and wrong and right):
        return None
    places = [
        (start, end)
        for start, end, value in tokens
        if not isinstance(value, (bool, str)) and value and _is_same(1 / value, wrong)
        if line[:start].rstrip().endswith("/") and not line[:start].rstrip().endswith("//")
    ]
    if len(places) != 1:
        return None
    ((start, end),) = places
    return f"{line[:start]}{float(f'{1 / right:.12g}')!r}{line[end:]}"


def _tokens(line: str, *, names: bool) -> Iterator[tuple[int, int, Any]]:
    """Yield first place, last place and value of the literals of a line, or of its names."""
    before = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            is_flag = token.string in ("True", "False")
            if token.type == tokenize.NAME and not is_flag:
                if names:
                    yield token.start[1], token.end[1], token.string
            elif not names and (is_flag or token.type in (tokenize.NUMBER, tokenize.STRING)):
                start, value = token.start[1], ast.literal_eval(token.string)
                yield start, token.end[1], value
                if before == "-" and token.type == tokenize.NUMBER:
                    yield line.rindex("-", 0, start), token.end[1], -value
            before = token.string
    except (tokenize.TokenError, SyntaxError, ValueError):
        return  # a line of several


def _is_same(value: Any, wrong: Any) -> bool:
    if isinstance(wrong, (bool, str)) or isinstance(value, (bool, str)):
        return bool(type(value) is type(wrong) and value == wrong)
    return isinstance(value, (int, float)) and abs(value - wrong) <= 1e-6 * abs(wrong)


_MODULES = frozenset({"F", "torch", "functional"})
"""Names under which functions are called, whose arguments are those of the op; a method has one of them before it."""


def exchanged(line: str, op: str, places: tuple[int, ...]) -> str | None:
    """Return a line in which two arguments of the one call of a function have changed places; None without it.

    Args:
        line: Of Python, of one statement.
        op: Name of the function.
        places: Of its positional arguments, those of a list counted one by one.
    """
    call = _the_call(line, op)
    if call is None or len(places) != 2:
        return None
    # The tensors of a list are counted one by one.
    lists = (argument.elts if isinstance(argument, (ast.List, ast.Tuple)) else [argument] for argument in call.args)
    arguments = [*itertools.chain.from_iterable(lists)]
    if len(arguments) <= max(places) or any(isinstance(argument, ast.Starred) for argument in arguments):
        return None
    a, b = sorted((arguments[place] for place in places), key=lambda argument: argument.col_offset)
    (start, middle), (further, end) = _columns(a), _columns(b)
    return line[:start] + line[further:end] + line[middle:further] + line[start:middle] + line[end:]


def with_argument(line: str, op: str, name: str, default: Any, value: Any) -> str | None:
    """Return a line in which the one call of a function has an argument that it left to its default.

    Args:
        line: Of Python, of one statement.
        op: Name of the function.
        name: Of the argument.
        default: What the candidate computes with, which has to be the function's own default.
        value: As it should be.
    """
    call = _the_call(line, op)
    parameters = _parameters(op)
    if call is None or name not in parameters or not isinstance(value, (bool, int, float, str)):
        return None
    is_given = any(word.arg in (name, None) for word in call.keywords)
    is_starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    place = list(parameters).index(name)
    if is_given or is_starred or len(call.args) > place or not call.args:
        return None
    if type(parameters[name]) is not type(default) or parameters[name] != default or call.end_col_offset is None:
        return None
    end = call.end_col_offset - 1
    return f"{line[:end].rstrip().rstrip(',')}, {name}={value!r}{line[end:]}"


def with_bias(line: str, op: str, bias: str) -> str | None:
    """Return a line in which the one call of a function has the bias of the module whose weight it has.

    Args:
        line: Of Python, of one statement.
        op: Name of the function.
        bias: Name of the tensor, with its module.
    """
    call, names = _the_call(line, op), list(_parameters(op))
    if call is None or "bias" not in names or len(call.args) != names.index("bias") or call.end_col_offset is None:
        return None
    if any(word.arg in ("bias", None) for word in call.keywords):
        return None
    weight = call.args[names.index("weight")]
    parts, module = ast.unparse(weight).split("."), bias.split(".")[:-1]
    if not module or not isinstance(weight, ast.Attribute) or parts[-2:] != [module[-1], "weight"]:
        return None
    name = ".".join([*parts[:-1], bias.rpartition(".")[2]])
    _, end = _columns(weight)
    return f"{line[:end]}, {name}{line[end:]}"


def transposed(line: str, weight: str) -> str | None:
    """Return a line in which a weight is transposed, or is not any more; None where it is not read exactly once.

    Args:
        line: Of Python, of one statement.
        weight: Name of a matrix, with its module.
    """
    tree = _parsed(line)
    ending = weight.split(".")[-2:]
    if tree is None or len(ending) < 2:
        return None
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _ends(node, ending)]
    if len(found) != 1:
        return None
    _, end = _columns(found[0])
    rest = line[end:]
    undone = next((word for word in (".T", ".mT", ".t()") if rest.startswith(word)), None)
    if undone is None:
        return None if rest.startswith((".", "[")) else f"{line[:end]}.T{rest}"
    after = rest[len(undone) :]
    return None if after[:1].isidentifier() or after.startswith((".", "[")) else line[:end] + after


def _ends(node: ast.Attribute, names: list[str]) -> bool:
    return ast.unparse(node).split(".")[-len(names) :] == names


def _parsed(line: str) -> ast.Module | None:
    """Return the tree of a line that is a whole statement; columns are counted in bytes, so that it is of ASCII."""
    try:
        return ast.parse(line) if line.isascii() else None
    except (SyntaxError, ValueError):
        return None


def _the_call(line: str, op: str) -> ast.Call | None:
    """Return the one call of a function in a line that is a whole statement; None where there is none, or several."""
    tree = _parsed(line)
    if tree is None:
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_of(node.func, op)]
    others = sum(isinstance(node, ast.Attribute) and node.attr == op for node in ast.walk(tree))
    return calls[0] if len(calls) == 1 and others == 1 else None


def _is_of(function: ast.expr, op: str) -> bool:
    """Whether a called name is that of a function of torch: `F.gelu`, `torch.nn.functional.gelu`."""
    if not isinstance(function, ast.Attribute) or function.attr != op:
        return False
    owner = function.value
    return (owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else "") in (
        _MODULES
    )


def _parameters(op: str) -> dict[str, Any]:
    """Return the parameters of a function of torch with their defaults; empty where Python does not know them."""
    known = getattr(functional, op, None)
    try:
        return {name: one.default for name, one in inspect.signature(known).parameters.items()} if known else {}
    except (TypeError, ValueError):
        return _DOCUMENTED.get(op, {})


_DOCUMENTED: dict[str, dict[str, Any]] = {
    "scaled_dot_product_attention": {
        "query": inspect.Parameter.empty,
        "key": inspect.Parameter.empty,
        "value": inspect.Parameter.empty,
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    },
    "linear": {"input": inspect.Parameter.empty, "weight": inspect.Parameter.empty, "bias": None},
    "gelu": {"input": inspect.Parameter.empty, "approximate": "none"},
}
"""Functions that are written in C, as torch documents them; those that mistakes are known of."""


def _columns(node: ast.expr) -> tuple[int, int]:
    assert node.end_col_offset is not None
    return node.col_offset, node.end_col_offset


_OF_KIND = {
    "eps": ("eps",),
    "position": ("theta", "base"),
    "scale": ("scal", "multiplier", "factor", "head_dim", "softcap"),
    "activation": ("act", "activation"),
    "mask": ("window",),
}
"""Kind of a mistake -> what the names of its values in a configuration have in common."""
_ROOTS = ("head_dim", "query_pre_attn_scalar")
"""Values whose root turned over is the scale of the scores."""
_SAME = 1e-6
_MOST_DEPTH = 3


def with_configuration(result: Findings, module: Any) -> Findings:
    """Return findings whose hints name the value of the configuration that the baseline's number is.

    Args:
        result: Of a check.
        module: The reference; it may have no configuration.
    """
    values = dict(_values(getattr(module, "config", None)))
    if not values:
        return result

    def named(found: Divergence) -> Divergence:
        return dataclasses.replace(found, hints=tuple(_named(hint, values) for hint in found.hints))

    first, levels = result.first_divergence, []
    for level in result.levels:
        own = level.first_divergence
        levels.append(level if own is None else dataclasses.replace(level, first_divergence=named(own)))
    return dataclasses.replace(
        result,
        first_divergence=None if first is None else named(first),
        origins=tuple(map(named, result.origins)),
        levels=tuple(levels),
    )


def _named(hint: Hint, values: Mapping[str, Any]) -> Hint:
    change = hint.change
    if change is None or change.argument is None or isinstance(change.baseline, (bool, list, type(None))):
        return hint
    name = value_named(change.baseline, hint.kind, values)
    if name is None:
        return hint
    shown = values[name]
    text = f"{hint.text}; the reference has config.{name} = {shown:.6g}" if isinstance(shown, float) else (
        f"{hint.text}; the reference has config.{name} = {shown}"
    )  # fmt: skip
    return dataclasses.replace(hint, text=text, change=dataclasses.replace(change, configured=name))


def value_named(number: Any, kind: str, values: Mapping[str, Any]) -> str | None:
    """Return the one name of a configuration whose value a literal is, for its kind; None where none or several are.

    Args:
        number: A number or a word of the baseline.
        kind: Of the mistake in it.
        values: Name -> value.
    """
    words = _OF_KIND.get(kind, ())
    found = [
        name
        for name, value in values.items()
        if any(word in name.rpartition(".")[2] for word in words)
        and "initializer" not in name
        and _is(number, name, value)
    ]
    # One value may be written twice: for the layers and in the part that all of them share.
    return found[0] if len({name.rpartition(".")[2] for name in found}) == 1 else None


def _is(number: Any, name: str, value: Any) -> bool:
    if isinstance(number, str) or isinstance(value, str):
        return bool(number == value)
    # Of a root only the scale is made, and a width alone is none.
    made = value**-0.5 if name.rpartition(".")[2] in _ROOTS and value > 0 else value
    return bool(abs(float(number) - made) <= _SAME * abs(made))


def _values(config: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and words of a configuration, those of its parts by dotted names."""
    held = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
    if not isinstance(held, Mapping) or depth == _MOST_DEPTH:
        return
    for name, value in held.items():
        if not isinstance(name, str) or name.startswith("_"):
            continue
        if isinstance(value, str) or (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        ):
            yield f"{path}{name}", value
        elif isinstance(value, Mapping) or name.endswith("config"):
            yield from _values(value, f"{path}{name}.", depth + 1)
