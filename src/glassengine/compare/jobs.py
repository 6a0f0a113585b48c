"""A plan in a file, for jobs that share a disk and nothing else: an array of Slurm jobs, or machines without a cluster.

    plan.jsonl               what is compared, then one chunk a line
    plan.jsonl.answers/      an answer for each chunk, by its number

No job waits for another: it judges the chunks of its number and leaves, and one that was killed is started again and
judges what has no answer. Who merges makes the plan once more, and takes an answer for what it was the answer to.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from glassengine.compare.distribute import Here
from glassengine.compare.judge_chunk import opened
from glassengine.compare.plan import Plan
from glassengine.compare.prepared import prepared, sendable
from glassengine.compare.units import Answer, Chunk, Request
from glassengine.errors import UsageError
from glassengine.reading.documents import damaged, parsed
from glassengine.reading.files import open_regular, read_bytes
from glassengine.workers import Died
from glassengine.writing.files import aside

SCHEMA_VERSION = 1
FORMAT = "glassengine comparison plan"
_MAX_LINE = 1 << 28
_MAX_ANSWER = 1 << 30
_MOST_NAMED = 8


class _Header(msgspec.Struct):
    format: str
    schema_version: int
    request: Request
    num_chunks: Annotated[int, msgspec.Meta(ge=0)]


class _Stored(msgspec.Struct):
    schema_version: int
    asked: str
    answer: Answer


def plan_comparison(
    baseline: str | Path,
    candidate: str | Path,
    path: str | Path,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    map: str | Path | Mapping[str, Any] | None = None,
    show_only: Sequence[str] = (),
    floating_point_only: bool = False,
    transpose: Sequence[str] = (),
    device: str = "cpu",
    fail_on: Literal["rounding", "suspicious", "wrong"] | None = None,
    min_coverage: float = 0.9,
) -> int:
    """Write the plan of a comparison for jobs, and return the number of its chunks; see `compare`.

    Raises:
        UsageError: There is one at this path that has answers already; otherwise as `compare`.
        IncomparableError: As `compare`.
        UnknownNameError: As `compare`.
        CorruptError: As `compare`.
    """
    plan, options = prepared(
        baseline,
        candidate,
        rtol=rtol,
        atol=atol,
        map=map,
        show_only=show_only,
        floating_point_only=floating_point_only,
        transpose=transpose,
        device=device,
        fail_on=fail_on,
        min_coverage=min_coverage,
    )
    if not all(math.isfinite(value) for value in (rtol or 0.0, atol or 0.0)):
        raise UsageError("a plan holds finite tolerances", got=f"--rtol {rtol} --atol {atol}")
    return _write(Path(path), plan, sendable(options, baseline, candidate, map))


def _write(path: Path, plan: Plan, request: Request) -> int:
    if _answers(path).exists() and any(_answers(path).iterdir()):
        raise UsageError(
            "the plan has answers already", got=str(path), hint=f"--merge {path}, or remove it and {_answers(path)}"
        )
    spans = [span for span in plan.spans if plan.is_asked(span)]
    with aside(path) as target, target.open("wb") as file:
        file.write(msgspec.json.encode(_Header(FORMAT, SCHEMA_VERSION, _alike(request), len(spans))) + b"\n")
        for span in spans:
            file.write(msgspec.json.encode(plan.chunk(span)) + b"\n")
    return len(spans)


def judge_planned(path: Path, number: int, count: int | None = None) -> list[int]:
    """Judge every chunk of a plan that is for one job of several, and return their numbers.

    Args:
        path: Of the plan.
        number: Of the job, from 0.
        count: How many jobs there are; None is one for each chunk.

    Raises:
        UsageError: The plan has no such chunk.
        GlassError: A chunk cannot be judged; those before it have their answers.
    """
    lines = _lines(path)
    header = _header(next(lines, b""), path)
    count = header.num_chunks if count is None else count
    if not 0 <= number < count:
        raise UsageError(
            "the plan has no such chunk", got=str(number), expected=f"0 to {count - 1}", hint=f"--array=0-{count - 1}"
        )
    _answers(path).mkdir(exist_ok=True)
    done = []
    for place, line in enumerate(lines):
        if place % count != number:
            continue
        target = _answer_file(path, place)
        if not target.exists():
            chunk = parsed(line, Chunk, path, what="a plan")
            answer = opened(header.request.key())(chunk)
            stored = _Stored(SCHEMA_VERSION, _digest(header.request, chunk), answer)
            with aside(target) as beside:
                beside.write_bytes(msgspec.msgpack.encode(stored))
        done.append(place)
    return done


class Planned:
    """Takes the answers that jobs have left; what is asked beyond them is judged by another.

    Args:
        path: Of the plan.
        request: What is compared now.
        other: Answers the rest.

    Raises:
        UsageError: The plan is of another comparison, or chunks have no answer yet.
    """

    def __init__(self, path: Path, request: Request, other: Here) -> None:
        self._request, self._other = _alike(request), other
        lines = _lines(path)
        header = _header(next(lines, b""), path)
        if header.request != self._request:
            raise UsageError(
                "the plan is of another comparison",
                got=_told(self._request),
                expected=_told(header.request),
                hint="the same sides and options as when it was made",
            )
        missing = [place for place in range(header.num_chunks) if not _answer_file(path, place).is_file()]
        if missing:
            named = ",".join(map(str, missing[:_MOST_NAMED])) + (",..." if len(missing) > _MOST_NAMED else "")
            raise UsageError(
                f"{len(missing)} of {header.num_chunks} chunks have no answer",
                got=named,
                hint=f"python -P -m glassengine.compare.chunk {path} {missing[0]}",
            )
        self._files = {
            _digest(self._request, parsed(line, Chunk, path, what="a plan")): i for i, line in enumerate(lines)
        }
        self._path = path

    def answers(self, chunks: Iterable[Chunk], *, again: bool = False) -> Generator[Answer | Died, None, None]:
        """See `distribute.Judges`."""
        for chunk in chunks:
            place = self._files.get(_digest(self._request, chunk))
            yield self._other.answer(chunk) if place is None else self._stored(place, chunk)

    def _stored(self, place: int, chunk: Chunk) -> Answer:
        path = _answer_file(self._path, place)
        data = read_bytes(path, most=_MAX_ANSWER, inside=path.parent)
        try:
            found = msgspec.msgpack.decode(data, type=_Stored)
            if found.schema_version != SCHEMA_VERSION or found.asked != _digest(self._request, chunk):
                raise ValueError("it is the answer to something else")
            if [one.number for one in found.answer.outcomes] != [unit.number for unit in chunk.units]:
                raise ValueError("it is of other tensors")
        except (ValueError, RecursionError) as error:
            raise damaged("the answer to a chunk", path, error) from error
        return found.answer


def _alike(request: Request) -> Request:
    """Return what two requests for the same have in common."""
    same: Request = msgspec.structs.replace(request, token="")
    return same


def _told(request: Request) -> str:
    told: Sequence[str] = [f"{name}={value!r}" for name, value in msgspec.structs.asdict(request).items() if value]
    return ", ".join(told)


def _digest(request: Request, chunk: Chunk) -> str:
    return hashlib.sha256(msgspec.json.encode(_alike(request)) + b"\n" + msgspec.json.encode(chunk)).hexdigest()


def _lines(path: Path) -> Iterator[bytes]:
    with open_regular(path) as file:
        while line := file.readline(_MAX_LINE):
            yield line


def _header(line: bytes, path: Path) -> _Header:
    found = parsed(line, _Header, path, what="a plan", version=SCHEMA_VERSION)
    if found.format != FORMAT:
        raise damaged("a plan", path, f"its format is {found.format!r}")
    return found


def _answers(path: Path) -> Path:
    return path.with_name(f"{path.name}.answers")


def _answer_file(path: Path, place: int) -> Path:
    return _answers(path) / f"{place:06d}.answer"
