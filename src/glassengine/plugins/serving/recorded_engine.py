"""A recording of a serving engine as a candidate, and dumps that do not say which rows are of which request.

Hooks write down what modules return, and the token ids and positions that the model was given. Where the rows of one
request end, the lengths of its sequences say, else a position that does not follow the one before. Which request a row
continues, the number of its place in the pool says, else that it is the only one of this length; where several are,
what follows is left out and listed: rows are never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from glassengine.errors import CorruptError, UsageError
from glassengine.plugins.serving.alignment import require_layout
from glassengine.plugins.serving.requests import INPUT_IDS, LOGITS
from glassengine.recording.layout.layout import Entry
from glassengine.recording.source import TensorSource
from glassengine.results import Skipped
from glassengine.serving.protocol import (
    EngineSetting,
    Served,
    ServedWeight,
    ServingRun,
    is_served,
    open_served,
)

BY_REQUEST = ("vllm", "sglang")
"""Layouts of servers whose forwards have the rows of several requests."""
_IDS = (INPUT_IDS, "input_ids", "model.forward_batch_info.input_ids", ".:in.input_ids", ".:in[0]", "model:in.input_ids")
_POSITIONS = ("./in.positions", "positions", "model.forward_batch_info.positions", ".:in.positions", ".:in[1]")
_LENGTHS = ("seq_lens", "model.forward_batch_info.seq_lens")
_POOL = ("req_pool_indices",)
_SCORES = re.compile(r"logits_processor(:out(\[0\]|\.next_token_logits)?)?|\.:out\.next_token_logits")
_PORT = re.compile(r"(?P<module>.*?):(?P<side>in|out)(?:\[(?P<place>\d+)\])?")
_UNKNOWN = (
    "which tokens it begins with is not in the dump: they were read from the prefix cache (--disable-radix-cache)"
)
_UNCERTAIN = "which request these rows continue is not certain: several were of this length"


@dataclass
class _Request:
    name: str
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    prompt: int = 0
    decodes: bool = False
    slot: int | None = None


class DescribedForwards:
    """A dump by the names of the plug-in in vLLM, with the rows of requests.

    Raises:
        UsageError: It does not say on which tokens it was made.
        CorruptError: What it says of its rows does not fit.
    """

    def __init__(self, source: TensorSource, layout: str) -> None:
        self.path: Path = source.path
        self.complete = source.complete
        self._source = source
        self._by_step: dict[int, dict[str, Entry]] = {}
        for entry in source.entries:
            self._by_step.setdefault(entry.step, {})[entry.site] = entry
        # What was behind the last forward that the dump has, or before its first one.
        steps = [step for step in sorted(self._by_step) if self._find(step, _IDS) is not None]
        if not steps:
            raise UsageError(
                "the dump does not say on which tokens it was made",
                got=f"{source.path}: {', '.join(list(next(iter(self._by_step.values()), {}))[:4])}",
                expected="input_ids and positions of each forward",
                hint="--map FILE, with a dump that has them",
            )
        self._unknown: dict[str, str] = {}
        forwards = _Rows(self._unknown).of([self._given(step) for step in steps])
        self._places: dict[Entry, Entry] = {}
        for number, step in enumerate(steps):
            rows = sum(int(part["length"]) for part in forwards[number])
            for entry in self._by_step[step].values():
                made = _renamed(entry, number, rows)
                self._places[made] = entry
        self.entries: Sequence[Entry] = tuple(self._places)
        self.skipped: Sequence[Skipped] = tuple(source.skipped)
        self.metadata: dict[str, Any] = {
            **source.metadata,
            "layout": layout,
            "as_deployed": True,
            "forwards": forwards,
            "unknown": self._unknown,
        }

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`."""
        return self._source.tensor(self._places[entry]).reshape(entry.shape)

    def _find(self, step: int, names: Sequence[str]) -> Tensor | None:
        found = self._by_step.get(step, {})
        entry = next((found[name] for name in names if name in found), None)
        return None if entry is None else self._source.tensor(entry)

    def _given(self, step: int) -> _Given:
        ids, positions = self._find(step, _IDS), self._find(step, _POSITIONS)
        if ids is None or positions is None or ids.dim() != 1 or positions.shape != ids.shape:
            got = f"{self.path}: step {step}: {_size(ids)} token ids, {_size(positions)} positions"
            raise CorruptError("the rows of requests do not fit", got=got, expected="[tokens] of both")
        lengths, pool = self._find(step, _LENGTHS), self._find(step, _POOL)
        return _Given(
            ids.tolist(),
            positions.tolist(),
            None if lengths is None else lengths.flatten().tolist(),
            None if pool is None else pool.flatten().tolist(),
            f"{self.path}: step {step}",
        )


def described(source: TensorSource, layout: str | None) -> TensorSource:
    """Return a recording of a server with the rows of requests; any other recording as it is."""
    layout = layout or source.metadata.get("layout")
    if layout not in BY_REQUEST or "forwards" in source.metadata:
        return source
    if len({entry.rank for entry in source.entries}) > 1:
        raise UsageError(
            "the model was run in parts, of which each rank has its own",
            got=str(source.path),
            expected="a dump of one process",
            hint="--tp-size 1 --pp-size 1",
        )
    return DescribedForwards(source, layout)


def _size(tensor: Tensor | None) -> str:
    return "no" if tensor is None else str(list(tensor.shape))


def _renamed(entry: Entry, step: int, rows: int) -> Entry:
    """Return an entry by the name that the plug-in would give it; heads that were made rows are heads again."""
    site, shape = entry.site, entry.shape
    if site in _IDS:
        site = INPUT_IDS
    elif site in _POSITIONS:
        site = _POSITIONS[0]
    elif _SCORES.fullmatch(site):
        site = LOGITS
    elif "/" not in site:
        found = _PORT.fullmatch(site)
        module, side, place = (found["module"], found["side"], found["place"]) if found else (site, "out", None)
        site = f"{module}/{side}.{place or 0}"
    if rows and len(shape) == 2 and shape[0] > rows and shape[0] % rows == 0:
        shape = (rows, shape[0] // rows, shape[1])
    return replace(entry, site=site, step=step, shape=shape, rank=0)


@dataclass(frozen=True)
class _Given:
    ids: list[int]
    positions: list[int]
    lengths: list[int] | None
    pool: list[int] | None
    described: str

    def parts(self) -> Iterator[tuple[int, int]]:
        """Yield first row and number of rows of each request."""
        if self.lengths is None:
            starts = [at for at, one in enumerate(self.positions) if not at or one != self.positions[at - 1] + 1]
            yield from ((at, end - at) for at, end in zip(starts, [*starts[1:], len(self.positions)], strict=True))
            return
        row = 0
        for length in self.lengths:
            start = self.positions[row] if row < len(self.positions) else -1
            number = length - start
            if start < 0 or number < 1 or self.positions[row : row + number] != list(range(start, length)):
                got = f"{self.described}: a sequence of {length} tokens, positions {self.positions[row : row + 8]}"
                raise CorruptError("the rows of requests do not fit", got=got)
            yield row, number
            row += number


class _Rows:
    """Which request each row continues.

    Args:
        unknown: Filled: name of what cannot be judged -> why.
    """

    def __init__(self, unknown: dict[str, str]) -> None:
        self._unknown = unknown
        self._alive: list[_Request] = []
        self._number = 0
        self._lost = False

    def of(self, forwards: Sequence[_Given]) -> list[list[dict[str, Any]]]:
        """Return the rows of requests, forward by forward."""
        made = [self._forward(given) for given in forwards]
        return [
            [
                {"name": one.name, "prompt": one.tokens[: one.prompt], "start": start, "length": number}
                for one, start, number in parts
            ]
            for parts in made
        ]

    def _forward(self, given: _Given) -> list[tuple[_Request, int, int]]:
        parts = [(row, number, given.positions[row]) for row, number in given.parts()]
        if given.pool is not None and len(given.pool) != len(parts):
            raise CorruptError("the rows of requests do not fit", got=f"{given.described}: {len(given.pool)} requests")
        decodes = all(number == 1 and start for _, number, start in parts)
        owners = self._owners(given, parts)
        found = []
        for place, (row, number, start) in enumerate(parts):
            one = owners.get(place) or self._new(start, _UNKNOWN)
            one.slot = None if given.pool is None else given.pool[place]
            one.tokens += given.ids[row : row + number]
            one.decodes |= number == 1 and start > 0
            one.prompt += 0 if one.decodes else number
            one.length = start + number
            found.append((one, start, number))
        if decodes:
            # Who is not among those that decode has ended.
            now = [id(one) for one, _, _ in found]
            self._alive = [one for one in self._alive if id(one) in now]
        return found

    def _owners(self, given: _Given, parts: Sequence[tuple[int, int, int]]) -> dict[int, _Request]:
        """Return the request that each part continues, by its place; a new one where that is not certain."""
        if given.pool is not None:
            return self._by_pool(given.pool, parts)
        owners: dict[int, _Request] = {}
        if self._lost:
            return {place: self._new(start, _UNCERTAIN) for place, (_, _, start) in enumerate(parts)}
        by_start: dict[int, list[int]] = {}
        for place, (_, number, start) in enumerate(parts):
            # A prompt that goes on, or one whose beginning was in a cache; or rows of several that follow each other.
            inside = range(start if start else 1, start + number)
            if number > 1 and (start or given.lengths is None):
                others = [one for one in self._alive if one.length in inside]
                if start or others:
                    self._forget(others)
                    # Without lengths, rows of several may look like those of one: who is where is not known any more.
                    self._lost |= given.lengths is None and bool(others)
                    owners[place] = self._new(start, _UNCERTAIN if others else _UNKNOWN)
            elif start:
                by_start.setdefault(start, []).append(place)
        for start, places in by_start.items():
            before = [one for one in self._alive if one.length == start]
            if len(before) == len(places):
                owners |= dict(zip(places, before, strict=True))  # servers keep their order
            elif before:
                self._forget(before)
                owners |= {place: self._new(start, _UNCERTAIN) for place in places}
        return owners

    def _by_pool(self, pool: Sequence[int], parts: Sequence[tuple[int, int, int]]) -> dict[int, _Request]:
        owners = {}
        for place, (_, number, start) in enumerate(parts):
            one = next((one for one in self._alive if one.slot == pool[place]), None)
            if one is not None and start and one.length == start and not (number > 1 and one.decodes):
                owners[place] = one
            elif one is not None:
                self._forget([one])
        return owners

    def _forget(self, those: Sequence[_Request]) -> None:
        gone = [id(one) for one in those]
        self._alive = [one for one in self._alive if id(one) not in gone]

    def _new(self, start: int, why: str) -> _Request:
        one = _Request(str(self._number))
        self._number += 1
        if start or why == _UNCERTAIN:
            self._unknown[one.name] = why
        self._alive.append(one)
        return one


@dataclass
class RecordedEngine:
    """A recording of a serving engine, made before or elsewhere, as the engine itself.

    Args:
        source: Of one prompt.
        weights_of: The engine that made it, where its file is here.
    """

    source: TensorSource
    weights_of: Served | None = None

    @property
    def kind(self) -> str:
        """Layout of its tensors."""
        return str(self.source.metadata.get("layout") or "recording")

    @property
    def spec(self) -> str:
        """The recording."""
        return str(self.source.path)

    choices: Sequence[str] = ()

    def weights(self, module: nn.Module, config: Any) -> Mapping[str, ServedWeight]:
        """Return the weights of the file, where it is here."""
        return self.weights_of.weights(module, config) if self.weights_of is not None else {}

    def extra_weights(self) -> Sequence[str]:
        """Return the tensors of the file that stand for no parameter."""
        return self.weights_of.extra_weights() if self.weights_of is not None else ()

    def settings(self, config: Any) -> Sequence[EngineSetting]:
        """Return the settings of the file, where it is here."""
        return self.weights_of.settings(config) if self.weights_of is not None else ()

    def record(self, run: ServingRun, path: Path) -> None:
        """Do nothing: there is a recording."""


def recorded_engine(source: TensorSource, layout: str | None = None) -> RecordedEngine:
    """Return a recording as an engine, with its weights where the file that it names is still here.

    Args:
        source: The recording.
        layout: Of its names, where it does not say it, or says another.

    Raises:
        UnknownNameError: There is no such layout.
        UsageError: It is of a server, and does not say which rows are of which request.
    """
    if layout is not None:
        require_layout(layout)
    source = described(source, layout)
    made_by = source.metadata.get("target")
    try:
        served = open_served(made_by) if isinstance(made_by, str) and is_served(made_by) else None
    except UsageError:
        served = None
    return RecordedEngine(source, served)
