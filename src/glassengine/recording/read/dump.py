"""What another program wrote, or all ranks of a run, with what a recording can be asked for."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from glassengine.errors import UnknownNameError
from glassengine.recording.layout.layout import MANIFEST, Entry, LeftOut
from glassengine.recording.layout.statistics import summarize
from glassengine.recording.read.ranks import RankRecordings
from glassengine.recording.read.reader import Recording
from glassengine.recording.read.shown import Shown
from glassengine.recording.read.source import TensorSource, open_source
from glassengine.results import Summary
from glassengine.sites import matches
from glassengine.stores.places import place


class Dump(Shown):
    """Tensors that are not in one recording, for reading; made by `glassengine.open`.

    Attributes:
        path: Where they are.
        metadata: What is known about them; empty in most foreign files.
        complete: Whether everything that was meant to be there is.
        incomplete_because: Why not, else None.
        steps: The steps that have tensors, ascending.
        entries: The tensors, in recorded order within ascending steps.
        left_out: What is there, or was seen, and has no values that can be read.
        stopped: Empty: no dump has it.
    """

    def __init__(self, source: TensorSource) -> None:
        self.path = source.path
        self.metadata = source.metadata
        self.complete = source.complete
        self.incomplete_because = None if source.complete else "a rank is missing, or its recording is incomplete"
        self.entries = source.entries
        self.left_out = (
            source.left_out
            if isinstance(source, RankRecordings)
            else tuple(LeftOut(item.site, item.step or 0, 0, item.reason) for item in source.skipped)
        )
        self.steps = sorted({entry.step for entry in self.entries} | {item.step for item in self.left_out})
        self.stopped: dict[int, str] = {}
        self._source = source

    def find(self, pattern: str) -> tuple[list[Entry], list[LeftOut]]:
        """Return the tensors, and those without values, whose name matches `pattern`.

        Raises:
            UnknownNameError: Nothing matches.
        """
        entries = [entry for entry in self.entries if matches(pattern, entry.site)]
        left_out = [item for item in self.left_out if matches(pattern, item.site)]
        if not entries and not left_out:
            raise UnknownNameError("site", pattern, [entry.site for entry in self.entries])
        return entries, left_out

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`.

        Raises:
            CorruptError: They are damaged.
        """
        return self._source.tensor(entry)

    def summary(self, entry: Entry) -> Summary:
        """Return the statistics of one of `entries`, computed each time."""
        return summarize(self.tensor(entry))


def open_dump(path: str | Path) -> Recording | Dump:
    """Open a recording, or anything else that `compare` reads: recordings of several ranks, dumps, files of tensors.

    Raises:
        UsageError: It does not exist or is of no known kind.
        CorruptError: It is damaged, would run code, or is written by a newer version.
    """
    there = place(path)
    if (there / MANIFEST).exists():
        return Recording.open(there)
    return Dump(open_source(there))
