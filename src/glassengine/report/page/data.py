"""Writes the files beside a page, `data/<kind>-<number>.js`: rows, details, and values of the worst tensors.

They are scripts that hand over JSON, as a page on a disk may not fetch; a browser filters and sorts the columns of
rows by the hundred thousand.

Every file is one call of `glassReport` with plain JSON in ASCII: no name in it is ever read as code or markup.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from glassengine.results import VERDICTS, Divergence, Pair, TensorValues
from glassengine.results.base import plain
from glassengine.results.report import ReportColumn, ReportFiles

FOLDER = "data"
MOST_TENSORS = 200
_MOST_ELEMENTS = 1 << 26
_MOST_IN_ALL = 1 << 28
_PER_FILE = 16
ROWS_PER_FILE, SITES_PER_FILE, DETAILS_PER_FILE = 1 << 16, 1 << 15, 1 << 11
INHERITED, NONFINITE, SHAPE = 1, 2, 4
NAMES = ("level", "case", "dtype", "judged_by")
_CODES = {
    "site": "I", "candidate": "I", "step": "I", "rank": "I", "level": "H", "case": "H", "dtype": "H", "judged_by": "H",
    "verdict": "B", "flags": "B", "noise_ratio": "f", "bound_ratio": "f", "max_abs_diff": "f", "snr_db": "f",
}  # fmt: skip
_TYPES = {"B": "Uint8", "H": "Uint16", "I": "Uint32", "f": "Float32"}
_VERDICT = {name: number for number, name in enumerate(VERDICTS)}
_IN_COLUMNS = {*_CODES, "candidate_site", "inherited"} - {"candidate", "flags"}  # keys of a pair
_NO_NAME = ""
_MOST_NAMES = 0xFFFF
_LARGEST = 3.4e38


class DataFolder:
    """Writes the files, and knows how many there are of each kind.

    Args:
        directory: Of the page; the folder `data` is made in it.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self.kinds: dict[str, ReportFiles] = {}

    def write(self, kind: str, number: int, items: Any) -> None:
        """Write one file of plain values."""
        self.path(kind, number).write_bytes(b'glassReport("%b",%d,%b);\n' % (kind.encode(), number, _ascii(items)))

    def path(self, kind: str, number: int) -> Path:
        """Return where a file is."""
        return self._folder / f"{kind}-{number}.js"

    def read(self, kind: str, number: int) -> Any:
        """Return what `write` was given."""
        text = self.path(kind, number).read_text(encoding="ascii")
        return json.loads(text[len(f'glassReport("{kind}",{number},') : -len(");\n")])

    def list(self, kind: str, *, num_items: int, items_per_file: int) -> None:
        """Note how many items of a kind there are in all."""
        self.kinds[kind] = ReportFiles(kind, num_items, items_per_file)


def _ascii(items: Any) -> bytes:
    """Return plain values as JSON in ASCII: half a million of them, so that the faster writer is asked first."""
    try:
        if (text := msgspec.json.encode(items)).isascii():
            return text
    except UnicodeEncodeError:  # half of a character, which JSON has an escape for
        pass
    return json.dumps(items, separators=(",", ":"), allow_nan=False).encode("ascii")


def compressed(path: Path) -> str:
    """Return the items of a file that `write` wrote, as gzip in base 64."""
    _, _, items = path.read_text(encoding="ascii").partition(",")[2].partition(",")
    packed = gzip.compress(items.removesuffix(");\n").encode("ascii"), mtime=0)
    return base64.b64encode(packed).decode("ascii")


class ListFiles:
    """Items of one kind, written as soon as they fill a file."""

    def __init__(self, folder: DataFolder, kind: str, items_per_file: int) -> None:
        self._folder, self._kind, self._each = folder, kind, items_per_file
        self._items: list[Any] = []
        self.num_items = 0

    def add(self, item: Any) -> None:
        """Add an item of plain values."""
        self._items.append(item)
        self.num_items += 1
        if len(self._items) == self._each:
            self._write()

    def close(self) -> None:
        """Write the rest."""
        if self._items:
            self._write()
        self._folder.list(self._kind, num_items=self.num_items, items_per_file=self._each)

    def item(self, number: int) -> Any:
        """Return an item that was written; after `close`."""
        return self._folder.read(self._kind, number // self._each)[number % self._each]

    def _write(self) -> None:
        self._folder.write(self._kind, (self.num_items - 1) // self._each, self._items)
        self._items = []


class PageValues:
    """Reads both records, and writes what is shown of their tensors.

    Args:
        baseline: Recording, or anything else that compare reads.
        candidate: Likewise.

    Raises:
        UsageError: One does not exist.
        CorruptError: One is damaged.
    """

    def __init__(self, baseline: str | Path, candidate: str | Path) -> None:
        from glassengine.recording.source import open_source

        self._sides = open_source(baseline), open_source(candidate)
        self._entries = tuple({(one.step, one.rank, one.site): one for one in side.entries} for side in self._sides)
        self.without: Counter[str] = Counter()

    def write(self, folder: DataFolder, rows: Iterable[tuple[int, Pair]]) -> tuple[int, ...]:
        """Write the values of some rows, and return those that have any; `without` counts why others have none.

        Raises:
            CorruptError: The bytes of a tensor are damaged.
        """
        found = ListFiles(folder, "values", _PER_FILE)
        shown: list[int] = []
        left = _MOST_IN_ALL
        for row, pair in rows:
            item = self._item(pair, left)
            if isinstance(item, str):
                self.without[item] += 1
                continue
            left -= math.prod(pair.shape or ())
            found.add(plain(item))
            shown.append(row)
        found.close()
        return tuple(shown)

    def _item(self, pair: Pair, left: int) -> TensorValues | str:
        """Return what is shown of a pair, or why nothing is."""
        from glassengine.numerics.distances import tensor_values

        ours = self._entries[0].get((pair.step, pair.rank, pair.site))
        theirs = self._entries[1].get((pair.step, pair.rank, pair.candidate_site))
        if ours is None or theirs is None:
            return "the records given do not have the tensor"
        if math.prod(ours.shape) > min(left, _MOST_ELEMENTS):
            return "too large to be read for a report"
        x, y = self._sides[0].tensor(ours), self._sides[1].tensor(theirs)
        if x.shape != y.shape:
            return "the two sides have other shapes or layouts"
        return tensor_values(x, y)


class _Names(dict[str, int]):
    """Name -> its place; a new name takes the next one."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


class PageRows:
    """Takes pairs in order of execution, and writes their files into `folder`."""

    def __init__(self, folder: DataFolder) -> None:
        self.folder = folder
        self._columns = {name: array(code) for name, code in _CODES.items()}
        self._sites = _Names()
        self._names = {name: _Names() for name in NAMES}
        self._details = ListFiles(folder, "details", DETAILS_PER_FILE)

    def __len__(self) -> int:
        return len(self._columns["site"])

    def add(self, pair: Pair, plain: dict[str, Any]) -> None:
        """Add a row."""
        figures = pair.figures
        is_shape = figures is None and pair.noise_ratio is None and pair.judged_by == "shape"
        flags = INHERITED if pair.inherited else 0
        has_nan = pair.noise_ratio is not None and math.isnan(pair.noise_ratio)
        if has_nan or (figures is not None and figures.num_nonfinite_mismatch):
            flags |= NONFINITE
        dtype = pair.baseline.dtype if pair.dtype is None and pair.baseline is not None else pair.dtype
        numbers: dict[str, Any] = {
            "site": self._sites[pair.site],
            "candidate": self._sites[pair.candidate_site],
            "step": min(max(pair.step, 0), 0xFFFFFFFF),
            "rank": min(max(pair.rank, 0), 0xFFFFFFFF),
            "level": self._place("level", pair.level),
            "case": self._place("case", pair.case),
            "dtype": self._place("dtype", dtype),
            "judged_by": self._place("judged_by", pair.judged_by),
            "verdict": _VERDICT[pair.verdict],
            "flags": flags | SHAPE if is_shape else flags,
            "noise_ratio": _number(pair.noise_ratio),
            "bound_ratio": _number(pair.bound_ratio),
            "max_abs_diff": _number(None if figures is None else figures.max_abs_diff),
            "snr_db": _number(None if figures is None else figures.snr_db),
        }
        for name, column in self._columns.items():
            column.append(numbers[name])
        self._details.add({key: value for key, value in plain.items() if value is not None and key not in _IN_COLUMNS})

    def _place(self, column: str, name: str | None) -> int:
        names = self._names[column]
        return names[name or _NO_NAME] if len(names) < _MOST_NAMES or name in names else names[_NO_NAME]

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Column -> what its numbers stand for."""
        return {"verdict": VERDICTS, **{name: tuple(found) for name, found in self._names.items()}}

    @property
    def steps(self) -> list[int]:
        """All steps, in order."""
        return sorted(map(int, np.unique(self._array("step"))))

    @property
    def sites(self) -> tuple[str, ...]:
        """All names, in the order of their places."""
        return tuple(self._sites)

    def place_of(self, site: str) -> int | None:
        """Return the place of a name; None of one that no row has."""
        return self._sites.get(site)

    def row_of(self, found: Divergence | None) -> int | None:
        """Return the row that shows a divergence; None where there is none."""
        site = None if found is None else self._sites.get(found.site)
        if found is None or site is None:
            return None
        fits = (self._array("site") == site) & (self._array("step") == found.step)
        level = self._names["level"].get(found.level or _NO_NAME)
        by_level = fits & (self._array("level") == level) if level is not None else fits
        fits = by_level if by_level.any() else fits
        if found.rank is not None and (by_rank := fits & (self._array("rank") == found.rank)).any():
            fits = by_rank
        rows = np.flatnonzero(fits)
        if not len(rows):
            return None
        own = rows[(self._array("flags")[rows] & INHERITED) == 0]
        rows = own if len(own) else rows
        return int(rows[np.argmax(self._array("verdict")[rows])])

    def pair(self, row: int) -> Pair:
        """Return what a row shows; after `close`."""
        from glassengine.reading.documents import converted

        numbers = {name: column[row] for name, column in self._columns.items()}
        plain = {
            "step": numbers["step"],
            "rank": numbers["rank"],
            "site": self.sites[numbers["site"]],
            "candidate_site": self.sites[numbers["candidate"]],
            "inherited": bool(numbers["flags"] & INHERITED),
            **{name: found[numbers[name]] or None for name, found in self.names.items()},
            **{name: None if math.isnan(numbers[name]) else numbers[name] for name in ("noise_ratio", "bound_ratio")},
            **self._details.item(row),
        }
        return converted(plain, Pair, self.folder.path("details", row // DETAILS_PER_FILE), words=True)

    def worst_first(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Return the rows, worst first: by verdict, introduced before inherited, without a size, then the ratio."""
        verdict, flags = self._array("verdict").astype(np.int16), self._array("flags")
        ratio, snr = self._array("noise_ratio"), self._array("snr_db")
        difference = self._array("max_abs_diff")
        has_no_size = (flags & (SHAPE | NONFINITE)) > 0
        keys = (
            np.arange(len(self)),
            -np.nan_to_num(difference, nan=0.0),
            np.nan_to_num(snr, nan=np.inf, posinf=_LARGEST, neginf=-_LARGEST),
            -np.nan_to_num(ratio, nan=-1.0, posinf=_LARGEST),
            ~has_no_size,
            flags & INHERITED,
            -verdict,
        )
        return np.lexsort(keys).astype(np.uint32)

    def leave_out_regions(self, reads: Mapping[str, Sequence[str]]) -> None:
        """Let the end of a region count as inherited where an op in the region is known to introduce the error.

        Args:
            reads: Site -> the sites that its op reads, in order of execution.
        """
        by_region = self._array("judged_by") == self._names["judged_by"].get("segment", -1)
        flags = self._columns["flags"]
        own = (self._array("verdict") >= _VERDICT["suspicious"]) & ((self._array("flags") & INHERITED) == 0)
        names, ends = self.sites, _ends(reads)
        guilty: dict[tuple[int, int], set[str]] = {}
        for row in np.flatnonzero(own & ~by_region).tolist():
            guilty.setdefault(self._step_of(row), set()).add(names[self._columns["site"][row]])
        judged = {
            level: {
                ends.get(names[site], names[site]) for site in set(self._array("site")[self._array("level") == level])
            }
            for level in set(self._array("level")[own & by_region].tolist())
        }
        inside: dict[tuple[int, int], set[str]] = {}
        for row in np.flatnonzero(own & by_region).tolist():
            level, site = self._columns["level"][row], self._columns["site"][row]
            if (level, site) not in inside:
                inside[level, site] = _region(ends.get(names[site], names[site]), reads, judged[level])
            if inside[level, site] & guilty.get(self._step_of(row), set()):
                flags[row] |= INHERITED

    def _step_of(self, row: int) -> tuple[int, int]:
        return self._columns["step"][row], self._columns["case"][row]

    def close(self) -> tuple[ReportColumn, ...]:
        """Write the rest, and return the columns."""
        self._details.close()
        sites = ListFiles(self.folder, "sites", SITES_PER_FILE)
        for name in self._sites:
            sites.add(name)
        sites.close()
        columns = {**{name: self._array(name) for name in _CODES}, "worst": self.worst_first()}
        for number, first in enumerate(range(0, len(self), ROWS_PER_FILE)):
            part = {name: _encoded(column[first : first + ROWS_PER_FILE]) for name, column in columns.items()}
            self.folder.write("rows", number, part)
        self.folder.list("rows", num_items=len(self), items_per_file=ROWS_PER_FILE)
        codes = _CODES | {"worst": "I"}
        return tuple(ReportColumn(name, _TYPES[codes[name]]) for name in columns)

    def flagged(self, most: int) -> Iterator[int]:
        """Yield rows, worst first, that are not identical."""
        verdict = self._array("verdict")
        yield from (int(row) for row in self.worst_first()[:most] if verdict[row])

    def _array(self, name: str) -> Any:
        column = self._columns[name]
        return np.frombuffer(column, dtype=column.typecode) if len(column) else np.zeros(0, dtype=column.typecode)


def _ends(reads: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return, of each module, the site of its last op."""
    ends: dict[str, str] = {}
    for site in reads:
        module = site.rpartition("/")[0]
        while module:
            ends[module] = site
            module = module.rpartition(".")[0]
    return ends


def _region(end: str, reads: Mapping[str, Sequence[str]], judged: Set[str]) -> set[str]:
    """Return the sites between a tensor and those above it that were judged."""
    found: set[str] = set()
    left = list(reads.get(end, ()))
    while left:
        site = left.pop()
        if site not in found and site not in judged:
            found.add(site)
            left += reads.get(site, ())
    return found


def _number(value: float | None) -> float:
    """Return what a column of floats holds; a number beyond float32 becomes the largest one."""
    if value is None:
        return math.nan
    if -_LARGEST <= value <= _LARGEST or not math.isfinite(value):
        return value
    return math.copysign(_LARGEST, value)


def _encoded(column: Any) -> str:
    data = column if sys.byteorder == "little" else column.byteswap()
    return base64.b64encode(np.ascontiguousarray(data).tobytes()).decode("ascii")
