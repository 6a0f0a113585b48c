"""Reads the artifacts of two builds, and finds what differs in their manifests and stages.

Stages are paired by name, nodes by structure (`diff_graphs`). A stage that does to its graph what the stage of the same
name does on the other side only inherits the differences of the stages before it.

Nodes are matched from strict to loose: equal fingerprints (the value is computed the same way from the same weights and
inputs), equal calls on inputs that are matched already, equal sites or names, equal operations in order. A matched node
is unchanged when it calls the same thing with the same literals on matched inputs, so neither another numbering nor
a change further up counts.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from glassengine.errors import CorruptError, UsageError
from glassengine.program.representation.listing import NodeLine, read_listing
from glassengine.reading.copies import here
from glassengine.reading.documents import damaged, parsed
from glassengine.reading.files import read_bytes
from glassengine.results.backends import ArtifactComparison, Change, Difference, StageComparison

MANIFEST = "manifest.json"
FORMAT = "glassengine artifacts"
SCHEMA_VERSION = 1
MAX_BYTES = 64 << 20


class _Stage(msgspec.Struct):
    name: str
    directory: str


class _File(msgspec.Struct):
    sha256: str


class _Manifest(msgspec.Struct):
    """The content of `manifest.json`."""

    format: Literal["glassengine artifacts"]
    schema_version: int
    complete: bool
    failure: str | None
    files: dict[str, _File]
    stages: list[_Stage]
    options: dict[str, Any]
    versions: dict[str, Any]
    backend: str | None = None
    dtype: str | None = None
    fingerprint: str | None = None


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest of build artifacts.

    Raises:
        CorruptError: It is missing, damaged, no manifest of artifacts, or of a newer schema.
    """
    path = directory / MANIFEST
    what, version = "the manifest of build artifacts", SCHEMA_VERSION
    try:
        raw = read_bytes(path, most=MAX_BYTES, inside=directory)
        manifest = parsed(raw, _Manifest, path, what=what, version=version, nonfinite=True)
        data = parsed(raw, dict[str, Any], path, what=what, nonfinite=True)
        names = [*manifest.files, *(stage.directory for stage in manifest.stages)]
        if outside := [name for name in names if not _is_inside(name)]:
            raise damaged(what, path, f"it names files outside of its directory: {outside[0]!r}")
    except CorruptError as error:
        hint = error.hint or "write them with: glass build MODEL --artifacts DIR"
        raise CorruptError(error.what, got=error.got, expected=error.expected, hint=hint) from error
    return data


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return bool(name) and "\\" not in name and "\0" not in name and not {"", ".", ".."} & set(parts)


def compare_artifacts(baseline: str | Path, candidate: str | Path) -> ArtifactComparison:
    """Compare the artifacts of two builds: which stages differ, in which nodes, and which options and versions.

    Args:
        baseline: What `--artifacts` wrote.
        candidate: The same of the other build.

    Raises:
        CorruptError: A manifest or listing is missing or damaged.
        UsageError: A build wrote no stage.
    """
    sides = [here(baseline), here(candidate)]
    manifests = [read_manifest(side) for side in sides]
    listings = [_listings(side, manifest) for side, manifest in zip(sides, manifests, strict=True)]
    stages = _compare_stages(*listings)
    differences = tuple(_differences(*manifests))
    names = [{name for name in manifest["files"] if _is_of_backend(name)} for manifest in manifests]
    hashes = [{name: entry["sha256"] for name, entry in manifest["files"].items()} for manifest in manifests]
    files = tuple(sorted(name for name in names[0] & names[1] if hashes[0][name] != hashes[1][name]))
    notes = [
        f"{side}: the build did not end well ({manifest['failure'] or 'it was interrupted'})"
        for side, manifest in zip(sides, manifests, strict=True)
        if not manifest["complete"]
    ]
    same_stages = all(stage.status == "identical" for stage in stages)
    # Where graphs or settings differ the back-end's files follow; by themselves they say that the back-end changed.
    complete = all(manifest["complete"] for manifest in manifests)
    ok = complete and same_stages and not differences and not files
    return ArtifactComparison(str(baseline), str(candidate), ok, complete, stages, differences, files, tuple(notes))


def _is_of_backend(name: str) -> bool:
    return "/" not in name and name not in ("graph_module.py", "graph.txt", "builder_config.json", "index.html")


def _listings(directory: Path, manifest: Mapping[str, Any]) -> list[tuple[str, list[NodeLine]]]:
    """Return (name, listing) of each stage; a name that comes again is numbered."""
    found: list[tuple[str, list[NodeLine]]] = []
    for entry in manifest["stages"]:
        times = sum(name.partition("#")[0] == entry["name"] for name, _ in found)
        name = f"{entry['name']}#{times + 1}" if times else entry["name"]
        found.append((name, read_listing(directory / entry["directory"] / "graph.json", inside=directory)))
    if not found:
        raise UsageError(f"{directory} holds no stages", got="a build that ended before the model was exported")
    return found


def _compare_stages(
    left: Sequence[tuple[str, list[NodeLine]]], right: Sequence[tuple[str, list[NodeLine]]]
) -> tuple[StageComparison, ...]:
    sides = [dict(left), dict(right)]
    own = [_own_changes(left), _own_changes(right)]
    stages: list[StageComparison] = []
    for name in _merged([name for name, _ in left], [name for name, _ in right]):
        if name not in sides[0] or name not in sides[1]:
            side = 0 if name in sides[0] else 1
            status = ("baseline only", "candidate only")[side]
            stages.append(StageComparison(name, status, own[side][name].changes))
            continue
        diff = diff_graphs(sides[0][name], sides[1][name])
        is_first = not any(stage.status != "identical" for stage in stages)
        if not diff.changes:
            status = "identical"
        elif not is_first and sorted(own[0][name].keys) == sorted(own[1][name].keys):
            status = "inherited"
        else:
            status = "different"
        stages.append(StageComparison(name, status, diff.changes if status == "different" else ()))
    return tuple(stages)


def _own_changes(stages: Sequence[tuple[str, list[NodeLine]]]) -> dict[str, GraphDiff]:
    """Return stage -> what it changed in the graph of the stage before it."""
    before: list[NodeLine] = []
    changes = {}
    for name, lines in stages:
        changes[name] = diff_graphs(before, lines)
        before = lines
    return changes


def _merged(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """Return the names of both sides, each side in its own order as far as they agree."""
    merged = list(left)
    position = 0
    for name in right:
        if name in merged:
            position = merged.index(name) + 1
        else:
            merged.insert(position, name)
            position += 1
    return merged


def _differences(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[Difference]:
    found = []
    for table in ("versions", "options"):
        left, right = (_flat(manifest[table]) for manifest in (baseline, candidate))
        for key in sorted(left.keys() | right.keys()):
            if left.get(key) != right.get(key):
                found.append(Difference(f"{table}.{key}", left.get(key), right.get(key)))
    for key in ("backend", "dtype", "fingerprint"):
        if baseline.get(key) != candidate.get(key):
            found.append(Difference(key, baseline.get(key), candidate.get(key)))
    return found


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


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
    matched: dict[str, str] = {}
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
        _pair_equal(left, right, key, matched)
        taken = set(matched.values())
        left = [line for line in left if line.name not in matched]
        right = [line for line in right if line.name not in taken]
        _follow(left, right, matched)
    taken = set(matched.values())
    left = [line for line in left if line.name not in matched]
    right = [line for line in right if line.name not in taken]
    old, new = ([(line.op, line.target, line.literals, line.shape) for line in side] for side in (left, right))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for block in matcher.get_matching_blocks():
        for offset in range(block.size):
            matched[left[block.a + offset].name] = right[block.b + offset].name
    return matched


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
    left: Iterable[NodeLine], right: Iterable[NodeLine], key: Callable[[NodeLine], Hashable], matched: dict[str, str]
) -> None:
    """Match nodes of one key in order, where both sides have as many of them."""
    groups: dict[Hashable, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, lines in enumerate((left, right)):
        for line in lines:
            groups[key(line)][side].append(line.name)
    for value, (old, new) in groups.items():
        if value is not None and len(old) == len(new):
            matched.update(zip(old, new, strict=True))


def _follow(left: Sequence[NodeLine], right: Sequence[NodeLine], matched: dict[str, str]) -> None:
    """Match nodes that do the same with inputs that are matched, and so on down the graph."""
    calls: dict[Hashable, list[NodeLine]] = defaultdict(list)
    for line in left:
        calls[line.target, line.literals, line.dtype, line.shape].append(line)
    origin = {new: old for old, new in matched.items()}

    def fits(old: NodeLine, new: NodeLine) -> bool:
        if len(old.inputs) != len(new.inputs):  # as of lists of tensors, which one op takes of any length
            return False
        pairs = [(matched.get(a), b if b in origin else None) for a, b in zip(old.inputs, new.inputs, strict=True)]
        return all(a == b for a, b in pairs) and any(a is not None for a, _ in pairs)

    for new in right:
        if new.name in origin:
            continue
        same_call = calls[new.target, new.literals, new.dtype, new.shape]
        fitting = [old for old in same_call if old.name not in matched and fits(old, new)]
        old = next((old for old in fitting if old.sites == new.sites), fitting[0] if len(fitting) == 1 else None)
        if old is not None:
            matched[old.name] = new.name
            origin[new.name] = old.name


def _is_same(old: NodeLine, new: NodeLine, matched: dict[str, str]) -> bool:
    same_call = (old.target, old.literals, old.dtype, old.shape) == (new.target, new.literals, new.dtype, new.shape)
    return same_call and tuple(matched.get(name) for name in old.inputs) == new.inputs


def _key(line: NodeLine | None) -> tuple[str, ...]:
    return ("-",) if line is None else (line.target, line.literals, line.dtype, line.shape, *line.sites[:1])
