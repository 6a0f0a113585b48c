"""Reads a server's forwards as each request saw them: the prefill and decode steps of a program.

A server concatenates the rows of all requests, takes prompts in chunks, and reads the beginning of a prompt from its
prefix cache. A recording of it says in `forwards` which rows are of which request; here every position of a request is
looked up where it was computed: in a forward of its own, or of an earlier request with the same tokens up to there.

Joins the recordings of a server's ranks to one of a single process.

A table says which tensors are parts (`Table.ranks`): heads side by side, the parts of fused projections, halves of gate
and up; where there are more ranks than key heads, some have the same one. Everything else is a copy in every rank. A
rank whose copies are others than those of the first is judged on its own, with its copies and the parts of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from glassengine.errors import CorruptError, UsageError
from glassengine.recording.layout.layout import Entry
from glassengine.recording.source import TensorSource
from glassengine.results import Skipped
from glassengine.sites import matches

INPUT_IDS = "./in.input_ids"
LOGITS = "./logits.0"
ALL_LOGITS = "./all_logits.0"


class RequestRows(msgspec.Struct, frozen=True):
    """Rows of a forward that are of one request, as a recording says them.

    Attributes:
        name: Of the request.
        prompt: Its token ids.
        start: Position of its first row.
        length: Number of rows; those of parts follow each other.
    """

    name: str
    prompt: tuple[int, ...]
    start: int
    length: int


@dataclass(frozen=True)
class _Row:
    forward: int
    row: int
    part: int
    is_last: bool


class Forwards:
    """A recording of a server, by requests.

    Args:
        source: Each step is a forward; its metadata have "forwards".

    Raises:
        CorruptError: What it says of its rows does not fit its tensors.
    """

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        require_seen(source)
        try:
            self.parts = msgspec.convert(source.metadata.get("forwards"), list[tuple[RequestRows, ...]])
        except msgspec.ValidationError as error:
            raise CorruptError("the rows of requests are not described", got=f"{source.path}: {error}") from error
        self.entries: dict[int, dict[str, Entry]] = {}
        for entry in source.entries:
            self.entries.setdefault(entry.step, {})[entry.site] = entry
        self._rows: dict[str, dict[int, _Row]] = {}
        self._tokens: dict[str, dict[int, int]] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}
        for forward, parts in enumerate(self.parts):
            self._read(forward, parts)

    def _read(self, forward: int, parts: Sequence[RequestRows]) -> None:
        ids = self.entries.get(forward, {}).get(INPUT_IDS)
        total = sum(part.length for part in parts)
        if ids is None or any(part.length < 0 or part.start < 0 for part in parts) or ids.shape[0] < total:
            got = f"forward {forward}: {total} rows of requests, token ids {list(ids.shape) if ids else 'none'}"
            raise CorruptError("the rows of requests do not fit", got=f"{self.source.path}: {got}")
        tokens = self.source.tensor(ids).tolist()
        row = 0
        for number, part in enumerate(parts):
            self.prompts.setdefault(part.name, part.prompt)
            rows, known = self._rows.setdefault(part.name, {}), self._tokens.setdefault(part.name, {})
            for position in range(part.start, part.start + part.length):
                # What was computed again, of a request that had to wait, is not what the others have read.
                known.setdefault(position, tokens[row])
                rows.setdefault(position, _Row(forward, row, number, position == part.start + part.length - 1))
                row += 1

    def requests(self) -> tuple[list[RequestSource], list[Skipped]]:
        """Return each request, in the order in which they began, and those that cannot be judged."""
        found, skipped = [], []
        unknown = self.source.metadata.get("unknown") or {}
        for name, prompt in self.prompts.items():
            if name in unknown:
                skipped.append(Skipped(f"request {name}", "candidate", unknown[name]))
                continue
            rows, own = dict(self._rows[name]), self._tokens[name]
            tokens = [*prompt, *(own[at] for at in range(len(prompt), 1 + max(own, default=-1)) if at in own)]
            if not prompt or max(own, default=-1) < len(prompt) - 1:
                skipped.append(Skipped(f"request {name}", "candidate", "its prompt was not read to the end"))
            elif missing := self._shared(name, tokens, rows):
                why = f"{missing} tokens of its prompt were read from the prefix cache, and made before the recording"
                skipped.append(Skipped(f"request {name}", "candidate", why))
            else:
                found.append(RequestSource(self, name, prompt, tokens, rows))
        return found, skipped

    def _shared(self, name: str, tokens: Sequence[int], rows: dict[int, _Row]) -> int:
        """Add the rows of earlier requests that begin with the same tokens; return how many are still missing."""
        want = [at for at in range(len(tokens)) if at not in rows]
        if not want:
            return 0
        began = min(row.forward for row in rows.values())
        for other, known in self._tokens.items():
            whole = [*self.prompts[other], *(known[at] for at in sorted(known) if at >= len(self.prompts[other]))]
            same = next((at for at, pair in enumerate(zip(whole, tokens, strict=False)) if pair[0] != pair[1]), None)
            end = min(len(whole), len(tokens)) if same is None else same
            for at in want:
                row = self._rows[other].get(at)
                if other != name and at < end and at not in rows and row is not None and row.forward < began:
                    rows[at] = row
        return sum(at not in rows for at in want)


def require_seen(source: TensorSource) -> None:
    """Refuse what a server recorded of a model whose modules it did not call, or not in this process alone."""
    settings = source.metadata.get("settings") or {}
    if settings.get("compiled"):
        raise UsageError(
            "the server has compiled the model: its modules are not called one by one",
            got=str(source.path),
            hint="vllm serve MODEL --enforce-eager, or LLM(..., enforce_eager=True)",
        )
    if settings.get("world", 1) != 1:
        raise UsageError(
            "the model was run in parts, of which each rank has its own",
            got=f"{source.path}: {settings['world']} ranks",
            expected="one",
            hint="--tensor-parallel-size 1 --pipeline-parallel-size 1",
        )


class RequestSource:
    """One request of a server, as a recording of prefill and decode steps.

    Args:
        forwards: Of the server.
        name: Of the request.
        prompt: Token ids.
        tokens: Those of the prompt, and what followed.
        rows: Where each position was computed.
    """

    complete = True
    skipped: Sequence[Skipped] = ()

    def __init__(
        self,
        forwards: Forwards,
        name: str,
        prompt: Sequence[int],
        tokens: Sequence[int],
        rows: Mapping[int, _Row],
    ) -> None:
        self._forwards, self._rows, self.name, self.prompt = forwards, rows, name, tuple(prompt)
        self._tokens = tuple(tokens)
        self.metadata: dict[str, Any] = {
            **forwards.source.metadata,
            "token_ids": [list(tokens)],
            "prompt_lengths": [len(prompt)],
            "request": name,
        }
        self.entries: Sequence[Entry] = tuple(self._made())

    @property
    def path(self) -> Path:
        """Of the server's recording."""
        return self._forwards.source.path

    def _positions(self, step: int) -> range:
        first = len(self.prompt)
        return range(first) if step == 0 else range(first + step - 1, first + step)

    def _made(self) -> Iterator[Entry]:
        num_steps = len(self._tokens) - len(self.prompt) + 1
        for step in range(num_steps):
            positions = self._positions(step)
            forwards = list(dict.fromkeys(self._rows[at].forward for at in positions))
            held = [self._forwards.entries[one] for one in forwards]
            lengths = [sum(part.length for part in self._forwards.parts[one]) for one in forwards]
            for site, entry in held[0].items():
                known = [one[site] for one in held if site in one]
                if len(known) != len(held) or (site == LOGITS and any(ALL_LOGITS in one for one in held)):
                    continue
                if site != LOGITS and any(
                    not one.shape or one.shape[0] < n for one, n in zip(known, lengths, strict=True)
                ):
                    continue
                num = len(positions) if site != LOGITS else sum(self._rows[at].is_last for at in positions)
                nbytes = entry.nbytes // max(1, entry.shape[0]) * num
                name = LOGITS if site == ALL_LOGITS else site
                yield replace(entry, site=name, step=step, shape=(num, *entry.shape[1:]), nbytes=nbytes, location=None)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the rows of the request, in the order of their positions."""
        source, entries = self._forwards.source, self._forwards.entries
        rows = [self._rows[at] for at in self._positions(entry.step)]
        made: list[Tensor] = []
        read: dict[tuple[int, str], Tensor] = {}

        def value(forward: int, site: str) -> Tensor | None:
            found = entries[forward].get(site)
            if found is not None and (forward, site) not in read:
                read[forward, site] = source.tensor(found)
            return read.get((forward, site))

        for row in rows:
            if entry.site != LOGITS:
                held, number = value(row.forward, entry.site), row.row
            else:
                # The server's own logits are of the last row of each request; those of all rows were asked beside them.
                is_own = row.is_last and value(row.forward, LOGITS) is not None
                held = value(row.forward, LOGITS if is_own else ALL_LOGITS)
                number = row.part if is_own else row.row
            if held is not None and number < held.shape[0]:
                made.append(held[number])
        if len(made) != entry.shape[0]:
            got = f"{self.path}: {entry.site} of {len(made)} rows, {entry.shape[0]} expected"
            raise CorruptError("the rows of requests do not fit", got=got)
        return torch.stack(made)


WAYS = ("side by side", "keys", "qkv", "halves")


class JoinedRanks:
    """The recording of a server as one of its ranks has it, with the parts of the others.

    Args:
        sources: Of the ranks, in order.
        rank: Whose copies are taken.
        ways: Pattern of names -> one of `WAYS`.
        numbers: Of the checkpoint, as `alignment.numbers_of`.

    Raises:
        CorruptError: The ranks have not run the same forwards.
    """

    def __init__(
        self, sources: Sequence[TensorSource], rank: int, ways: Mapping[str, str], numbers: Mapping[str, int | None]
    ) -> None:
        own = sources[rank]
        forwards = [[[_identity(part) for part in one] for one in source.metadata["forwards"]] for source in sources]
        if any(one != forwards[0] for one in forwards[1:]):
            raise CorruptError("the ranks have not run the same forwards", got=str(own.path))
        self.path: Path = own.path
        self.complete = own.complete
        self.skipped = own.skipped
        settings = {**own.metadata["settings"], "world": 1}
        self.metadata: dict[str, Any] = {**own.metadata, "settings": settings, "rank": rank}
        self._sources = sources
        self._rank = rank
        self._heads, self._kv_heads = numbers["heads"] or 1, numbers["kv_heads"] or 1
        self._found = [{(one.site, one.step): one for one in source.entries} for source in sources]
        self._ways: dict[Entry, str | None] = {}
        # What the first rank alone has, the scores above all, is everybody's.
        for place in dict.fromkeys([*self._found[rank], *self._found[0]]):
            one = self._found[rank].get(place) or self._found[0][place]
            way = next((way for pattern, way in ways.items() if matches(pattern, one.site)), None)
            parts = [found[place].shape for found in self._found if place in found]
            if way is not None and (len(parts) < len(sources) or len(set(parts)) > 1 or not one.shape):
                continue
            shape = one.shape if way is None else self._whole(way, one.shape)
            if shape is not None:
                nbytes = one.nbytes // max(1, one.shape[-1]) * shape[-1] if one.shape else one.nbytes
                self._ways[replace(one, rank=0, shape=shape, nbytes=nbytes, location=None)] = way
        self.entries: Sequence[Entry] = tuple(self._ways)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`."""
        way, place = self._ways[entry], (entry.site, entry.step)
        if way is None:
            rank = self._rank if place in self._found[self._rank] else 0
            return self._sources[rank].tensor(self._found[rank][place])
        parts = [source.tensor(found[place]) for source, found in zip(self._sources, self._found, strict=True)]
        made = self._joined(way, parts)
        if tuple(made.shape) != entry.shape:
            raise CorruptError("a file changed while it was being read", got=f"{self.path}: {entry.site}")
        return made

    def is_as(self, other: JoinedRanks) -> bool:
        """Whether the copies of two ranks are the same."""
        places = [(entry.site, entry.step) for entry, way in self._ways.items() if way is None]
        pairs = [(self._found[self._rank].get(place), other._found[other._rank].get(place)) for place in places]
        mine, theirs = self._sources[self._rank], other._sources[other._rank]
        return all(a is None or b is None or torch.equal(mine.tensor(a), theirs.tensor(b)) for a, b in pairs)

    @property
    def _apart(self) -> int:
        """Of how many ranks in a row each has the same key heads."""
        return max(1, len(self._sources) // self._kv_heads)

    def _whole(self, way: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of what parts of a shape make; None where they do not fit."""
        try:
            return tuple(self._joined(way, [torch.empty(shape, device="meta")] * len(self._sources)).shape)
        except (RuntimeError, ValueError):
            return None

    def _joined(self, way: str, parts: Sequence[Tensor]) -> Tensor:
        # Heads of their own are a dimension: [tokens, heads, size]; else they are in the last one.
        dim = 1 if parts[0].dim() == 3 else -1
        if way == "side by side":
            return torch.cat(list(parts), dim)
        if way == "keys":
            return torch.cat(list(parts[:: self._apart]), dim)
        if way == "halves":
            halves = zip(*(part.chunk(2, -1) for part in parts), strict=True)
            return torch.cat([torch.cat(one, -1) for one in halves], -1)
        queries = self._heads // len(parts)
        keys = max(1, self._kv_heads // len(parts))
        size = parts[0].shape[-1] // (queries + 2 * keys)
        sizes = [queries * size, keys * size, keys * size]
        split = [part.split_with_sizes(sizes, -1) for part in parts]
        kept = split[:: self._apart]
        return torch.cat([*(one[0] for one in split), *(one[1] for one in kept), *(one[2] for one in kept)], -1)


def of_ranks(
    sources: Sequence[TensorSource], ways: Mapping[str, str], numbers: Mapping[str, int | None]
) -> list[TensorSource]:
    """Return a server's recording for each rank that has copies of its own; for one rank, what it is."""
    if len(sources) == 1:
        return list(sources)
    made = [JoinedRanks(sources, rank, ways, numbers) for rank in range(len(sources))]
    return [made[0], *(one for one in made[1:] if not one.is_as(made[0]))]


def _identity(part: Mapping[str, Any]) -> tuple[Any, ...]:
    return part.get("start"), part.get("length"), tuple(part.get("prompt") or ())
