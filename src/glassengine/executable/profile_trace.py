"""The trace of a profile and its summary `profile.json`: our spans made readable, where the time went, and read back.

The trace is the JSON object that Chrome and Perfetto read: `traceEvents` with one event per span ("ph": "X"), times in
microseconds. Spans of one thread are nested by time. `glass profile DIR` shows the summary.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from glassengine.errors import CorruptError, UsageError
from glassengine.reading.copies import here
from glassengine.reading.documents import Size, parsed
from glassengine.reading.files import read_bytes
from glassengine.spans import PREFIX, Kernels
from glassengine.writing import document_checksum

SUMMARY = "profile.json"
FORMAT = "glass-profile"
SCHEMA_VERSION = 2
OUTSIDE = "(outside of modules)"

Event = dict[str, Any]
Trace = dict[str, Any]
# Version from which on a profile has a checksum.
_FIRST_SEALED = 2
_MAX_BYTES = 128 << 20
# Two levels for each span within another.
_MAX_DEPTH = 400


@dataclass
class ProfileSpan:
    """One event with what happened inside it; times in microseconds."""

    event: Event
    children: list[ProfileSpan] = field(default_factory=list)

    @property
    def duration(self) -> float:
        """Of the whole span."""
        return float(self.event["dur"])

    @property
    def self_time(self) -> float:
        """Of what none of the children covers."""
        return max(self.duration - sum(child.duration for child in self.children), 0.0)


def sealed(summary: Mapping[str, Any]) -> str:
    """Return the text of a `profile.json`, with a checksum over what it says."""
    content = json.loads(json.dumps(summary))
    return json.dumps({**content, "checksum": document_checksum(content)})


def annotate(trace: Trace, kernels_of: Callable[[str], Kernels]) -> None:
    """Rewrite our spans in place: plain names, `args.kind`, `args.site`; steps as spans from one end to the next.

    `kernels_of` maps the name of an executable to (name of kernel, site) in the order of execution.
    """
    ends: list[Event] = []
    for event in trace["traceEvents"]:
        name = str(event.get("name", ""))
        if event.get("ph") == "X" and name.startswith(PREFIX):
            _, kind, event["name"] = name.split("|", 2)
            event["args"] = {**event.get("args", {}), "kind": kind}
            if kind in ("op", "module"):
                event["args"]["site"] = event["name"]
            if kind == "step":
                ends.append(event)
        elif event.get("ph") == "X" and event.get("cat") == "gpu_memcpy":  # between an accelerator and the host
            event["args"] = {**event.get("args", {}), "kind": "transfer"}
    for root in nest(trace):
        for span in _walk(root):
            if kind_of(span.event) == "execute":
                _name_kernels(span, kernels_of(span.event["name"]))
    begin = min((float(event["ts"]) for event in trace["traceEvents"] if event.get("ph") == "X"), default=0.0)
    # On a row of their own, since other spans may cross the ends of steps.
    row = 1 + max((event["tid"] for event in trace["traceEvents"] if isinstance(event.get("tid"), int)), default=0)
    for event in sorted(ends, key=lambda event: float(event["ts"])):
        end = float(event["ts"])
        # The name by which TensorBoard knows steps.
        event |= {"name": f"ProfilerStep#{event['name']}", "ts": begin, "dur": end - begin, "tid": row}
        begin = end
    if ends:
        named = {
            "ph": "M",
            "name": "thread_name",
            "pid": ends[0]["pid"],
            "tid": row,
            "ts": 0,
            "args": {"name": "steps"},
        }
        trace["traceEvents"].append(named)


def nest(trace: Trace) -> list[ProfileSpan]:
    """Return the outermost spans of every thread, in order of time; steps are left out, which cross them."""
    threads: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") not in ("Trace", None) and kind_of(event) != "step":
            threads[event.get("pid"), event.get("tid")].append(event)
    roots: list[ProfileSpan] = []
    for events in threads.values():
        events.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
        stack: list[ProfileSpan] = []
        for event in events:
            start = float(event["ts"])
            while stack and float(stack[-1].event["ts"]) + stack[-1].duration <= start:
                stack.pop()
            span = ProfileSpan(event)
            (stack[-1].children if stack else roots).append(span)
            stack.append(span)
    return roots


def kind_of(event: Event) -> str | None:
    """Return the kind of one of our spans; None for an operation of torch."""
    found = event.get("args", {}).get("kind")
    return str(found) if found is not None else None


def summarize(trace: Trace) -> dict[str, Any]:
    """Return where the time went, as JSON values; times in microseconds.

    Returns:
        `kinds`: kind -> count and total. `paths`: module path -> number of calls and the time spent in it and not in
        its submodules, kernels and ops of compiled graphs under the module that they compute. `flame`: the spans of the
        same names on top of each other, merged, with count, total and own time. `steps`: length of each.
    """
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: {"count": 0, "total_us": 0.0})
    paths: dict[str, dict[str, float]] = defaultdict(lambda: {"calls": 0, "own_us": 0.0})
    flame: dict[str, Any] = {}
    steps = []
    for event in trace["traceEvents"]:
        if (kind := kind_of(event)) is not None:
            kinds[kind]["count"] += 1
            kinds[kind]["total_us"] += float(event["dur"])
            if kind == "step":
                steps.append(float(event["dur"]))

    def add(span: ProfileSpan, level: dict[str, Any], path: str) -> None:
        site = span.event.get("args", {}).get("site")
        if site is not None:
            path = re.split(r"[/@:]", site, maxsplit=1)[0]
            paths[path]["calls"] += kind_of(span.event) == "module"
        paths[path]["own_us"] += span.self_time
        entry = level.setdefault(_label(span.event), {"count": 0, "total_us": 0.0, "own_us": 0.0, "children": {}})
        entry["count"] += 1
        entry["total_us"] += span.duration
        entry["own_us"] += span.self_time
        for child in span.children:
            add(child, entry["children"], path)

    for root in nest(trace):
        add(root, flame, OUTSIDE)
    return {"kinds": dict(kinds), "paths": dict(paths), "flame": flame, "steps_us": steps}


def _label(event: Event) -> str:
    kind = kind_of(event)
    name = str(event["name"])
    return f"{kind}: {name}" if kind in ("compile", "execute", "transfer", "snapshot") else name


def _walk(span: ProfileSpan) -> Iterator[ProfileSpan]:
    yield span
    for child in span.children:
        yield from _walk(child)


def _name_kernels(execution: ProfileSpan, kernels: Kernels) -> None:
    """Put sites on the kernels of one execution: they ran in the order in which `kernels` lists them."""
    position = 0
    for span in _walk(execution):
        name = str(span.event["name"])
        for ahead in range(position, len(kernels)):
            kernel, site = kernels[ahead]
            if name == kernel or name.endswith("_" + kernel):
                span.event["args"] = {**span.event.get("args", {}), "site": site, "kind": "op", "kernel": name}
                span.event["name"] = site
                position = ahead + 1
                break


class _Kind(msgspec.Struct):
    count: Size
    total_us: float


class _Path(msgspec.Struct):
    calls: Size
    own_us: float


class _Flame(msgspec.Struct):
    count: Size
    total_us: float
    own_us: float
    children: dict[str, _Flame]


class _Profile(msgspec.Struct):
    """The content of `profile.json`, see `summarize`."""

    format: Literal["glass-profile"]
    schema_version: int
    wall_us: float
    num_steps: Size
    kinds: dict[str, _Kind]
    paths: dict[str, _Path]
    flame: dict[str, _Flame]
    steps_us: list[float]
    checksum: str | None = None


@dataclass(frozen=True)
class StoredProfile:
    """A profile on disk.

    Attributes:
        directory: That holds it.
        data: Of its `profile.json`; times in microseconds, see `summarize`.
    """

    directory: Path
    data: dict[str, Any]


def read_profiles(
    directory: str | Path, *, against: str | Path | None = None
) -> tuple[StoredProfile, StoredProfile | None]:
    """Return a profile and the one it is compared with.

    Args:
        directory: A profile, or a directory of profiles, of which the newest is meant.
        against: The other one, named in the same way; None: the one before, if there is any.

    Raises:
        UsageError: No profile exists.
        CorruptError: A profile is damaged or of a newer schema.
    """
    given = here(directory)
    path = _newest(given)
    if against is not None:
        other = here(against)
        return _read(path, inside=given), _read(_newest(other), inside=other)
    numbered = _profiles(path.parent) if re.fullmatch(r"profile-\d+", path.name) else []
    before = [other for other in numbered if other.name < path.name]
    return _read(path, inside=given), _read(before[-1], inside=path.parent) if before else None


def _newest(directory: Path) -> Path:
    if (directory / SUMMARY).is_file():
        return directory
    found = _profiles(directory) if directory.is_dir() else []
    if not found:
        raise UsageError(
            "no profile found", got=str(directory), expected=f"profile-NNNNNN/{SUMMARY}", hint="glass run --profile DIR"
        )
    return found[-1]


def _profiles(directory: Path) -> list[Path]:
    found = (path for path in directory.iterdir() if re.fullmatch(r"profile-\d+", path.name))
    return sorted(path for path in found if (path / SUMMARY).is_file())


def _read(directory: Path, *, inside: Path) -> StoredProfile:
    """Read a profile below `inside`, which the user named; a link instead of a profile leads out of it."""
    path = directory / SUMMARY
    raw = read_bytes(path, most=_MAX_BYTES, inside=inside)
    parsed(raw, _Profile, path, what="the profile", version=SCHEMA_VERSION, depth=_MAX_DEPTH)
    data = parsed(raw, dict[str, Any], path, what="the profile", depth=_MAX_DEPTH)
    found = data.pop("checksum", None)
    if (found is not None or data["schema_version"] >= _FIRST_SEALED) and found != document_checksum(data):
        hint = "take the profile again, or copy it again from where it was taken"
        raise CorruptError("the profile is not what was written", got=f"{path}: another checksum", hint=hint)
    return StoredProfile(directory, data)
