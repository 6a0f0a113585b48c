"""What differs between two listings, node by node, independent of names.

Nodes are matched from strict to loose: equal fingerprints (the value is computed the same way from the same weights and
inputs), equal calls on inputs that are matched already, equal sites or names, equal operations in order. A matched node
is unchanged when it calls the same thing with the same literals on matched inputs, so neither another numbering nor
a change further up counts.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from glassengine.program.listing.listing import NodeLine
from glassengine.results.artifacts import Change


@dataclass(frozen=True)
class GraphDiff:
    """Changes in graph order, and for each the same thing without names of nodes (`keys`, to compare two diffs)."""

    changes: tuple[Change, ...]
    keys: tuple[tuple[str, ...], ...]

    def count(self, kind: str) -> int:
        """Return the number of changes of one kind."""
        return sum(change.kind == kind for change in self.changes)


def match_nodes(baseline: Sequence[NodeLine], candidate: Sequence[NodeLine]) -> dict[str, str]:
    """Return baseline node -> the candidate node that is the same; each is matched at most once."""
    found: dict[str, str] = {}
    left, right = list(baseline), list(candidate)
    keys: tuple[Callable[[NodeLine], Hashable], ...] = (
        lambda line: (line.fingerprint, line.sites),
        lambda line: line.fingerprint,
        lambda line: (line.sites, line.target, line.literals) if line.sites else None,
        lambda line: (line.name, line.target, line.literals),
        lambda line: (line.sites, line.op) if line.sites else None,
        lambda line: line.op if line.op == "output" else None,
    )
    for key in keys:
        _pair_equal(left, right, key, found)
        taken = set(found.values())
        left = [line for line in left if line.name not in found]
        right = [line for line in right if line.name not in taken]
        _follow(left, right, found)
    taken = set(found.values())
    left = [line for line in left if line.name not in found]
    right = [line for line in right if line.name not in taken]
    old, new = ([(line.op, line.target, line.literals, line.shape) for line in side] for side in (left, right))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for block in matcher.get_matching_blocks():
        for offset in range(block.size):
            found[left[block.a + offset].name] = right[block.b + offset].name
    return found


def diff_graphs(baseline: Sequence[NodeLine], candidate: Sequence[NodeLine]) -> GraphDiff:
    """Return what `candidate` has added, removed and changed."""
    matched = match_nodes(baseline, candidate)
    position = {line.name: index for index, line in enumerate(baseline)}
    origin = {new: baseline[position[old]] for old, new in matched.items()}
    found: list[tuple[int, NodeLine | None, NodeLine | None]] = []
    where = len(baseline)  # an added node stands before the next node that is on both sides, after what was removed
    for new in reversed(candidate):
        old = origin.get(new.name)
        where = where if old is None else position[old.name]
        if old is None or not _is_same(old, new, matched):
            found.append((where, old, new))
    found = [(position[line.name], line, None) for line in baseline if line.name not in matched] + found[::-1]
    changes: list[Change] = []
    keys: list[tuple[str, ...]] = []
    for _, left, right in sorted(found, key=lambda entry: entry[0]):
        kind = "added" if left is None else "removed" if right is None else "changed"
        sites = right.sites if right is not None else left.sites if left is not None else ()
        texts = [None if line is None else str(line) for line in (left, right)]
        changes.append(Change(kind, texts[0], texts[1], sites))
        keys.append((kind, *_key(left), *_key(right)))
    return GraphDiff(tuple(changes), tuple(keys))


def diff_text(diff: GraphDiff) -> str:
    """Return the content of `diff-from-previous.txt`."""
    counts = ", ".join(f"{diff.count(kind)} {kind}" for kind in ("added", "removed", "changed"))
    lines = [f"# nodes: {counts}", *(line for change in diff.changes for line in change.lines)]
    return "".join(f"{line}\n" for line in lines)


def _pair_equal(
    left: Iterable[NodeLine], right: Iterable[NodeLine], key: Callable[[NodeLine], Hashable], found: dict[str, str]
) -> None:
    """Match nodes of one key in order, where both sides have as many of them."""
    groups: dict[Hashable, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, lines in enumerate((left, right)):
        for line in lines:
            groups[key(line)][side].append(line.name)
    for value, (old, new) in groups.items():
        if value is not None and len(old) == len(new):
            found.update(zip(old, new, strict=True))


def _follow(left: Sequence[NodeLine], right: Sequence[NodeLine], found: dict[str, str]) -> None:
    """Match nodes that do the same with inputs that are matched, and so on down the graph."""
    calls: dict[Hashable, list[NodeLine]] = defaultdict(list)
    for line in left:
        calls[line.target, line.literals, line.dtype, line.shape].append(line)
    origin = {new: old for old, new in found.items()}

    def fits(old: NodeLine, new: NodeLine) -> bool:
        if len(old.inputs) != len(new.inputs):  # as of lists of tensors, which one op takes of any length
            return False
        pairs = [(found.get(a), b if b in origin else None) for a, b in zip(old.inputs, new.inputs, strict=True)]
        return all(a == b for a, b in pairs) and any(a is not None for a, _ in pairs)

    for new in right:
        if new.name in origin:
            continue
        same_call = calls[new.target, new.literals, new.dtype, new.shape]
        fitting = [old for old in same_call if old.name not in found and fits(old, new)]
        old = next((old for old in fitting if old.sites == new.sites), fitting[0] if len(fitting) == 1 else None)
        if old is not None:
            found[old.name] = new.name
            origin[new.name] = old.name


def _is_same(old: NodeLine, new: NodeLine, matched: dict[str, str]) -> bool:
    same_call = (old.target, old.literals, old.dtype, old.shape) == (new.target, new.literals, new.dtype, new.shape)
    return same_call and tuple(matched.get(name) for name in old.inputs) == new.inputs


def _key(line: NodeLine | None) -> tuple[str, ...]:
    return ("-",) if line is None else (line.target, line.literals, line.dtype, line.shape, *line.sites[:1])
