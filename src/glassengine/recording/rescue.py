"""Recovers the steps that had ended when the process of a recording was killed, and that only its ring holds.

They become a recording of their own in `recovered/`, once; or, where nothing can be written, in a directory that lives
as long as whoever reads it. The ring of a process that still runs is left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from glassengine.errors import GlassError
from glassengine.reading.files import open_regular, read_open
from glassengine.recording import layout, moved
from glassengine.recording.journaled import Journaled
from glassengine.recording.records import append_tokens
from glassengine.recording.recovery import IndexContents, read_index
from glassengine.recording.replayed import Replay
from glassengine.recording.ring_file import LeftRing
from glassengine.recording.shard_files import ShardFiles
from glassengine.recording.writer import RecordingWriter
from glassengine.writing import hold

_MAX_MOVED_BYTES = 1 << 30
_PARTIAL = f"{layout.RECOVERED}.part"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovered:
    """Where recovered steps are.

    Attributes:
        path: A recording whose shards have numbers of their own; one in a temporary directory goes with this.
    """

    path: Path

    def added_to(self, contents: IndexContents, shards: ShardFiles) -> IndexContents:
        """Return what an index says together with the recovered steps that it has not."""
        with open_regular(self.path / layout.INDEX, inside=self.path) as file:
            found = read_index(file, shards.data_bytes)
        known = set(contents.steps)
        tokens = [list(row) for row in contents.token_ids]
        append_tokens(tokens, enumerate(found.token_ids))
        return IndexContents(
            contents.steps + [step for step in found.steps if step not in known],
            contents.entries.with_steps_of(found.entries),
            contents.left_out.with_steps_of(found.left_out),
            {**found.stopped, **contents.stopped},
            tokens,
            contents.damage,
        )


def recovered(directory: Path) -> Recovered | None:
    """Return the steps of a recording that was never closed that are not in its index, recovering them now if need be.

    To be called before the index is read: what the writer brings to it meanwhile leaves the ring.
    """
    there = directory / layout.RECOVERED
    try:
        if not os.path.lexists(directory / layout.RING):
            return Recovered(there) if (there / layout.MANIFEST).is_file() else None
        with open_regular(directory / layout.RING, inside=directory) as file:
            ring = LeftRing.read(file)
            if ring is None or ring.is_stopped:
                return None
            with _index(directory) as is_held:
                if not _has_ended(ring, is_held=is_held, directory=directory):
                    return None
                return _recover(directory, ring, may_write=is_held is False)
    except (GlassError, OSError, ValueError) as error:
        # The rest of the recording can be read.
        _log.warning("steps that only the ring of %s holds cannot be recovered: %s", directory, error)
        return None


@contextlib.contextmanager
def _index(directory: Path) -> Iterator[bool]:
    """Lock the index of a recording; yield whether somebody else has."""
    with open_regular(directory / layout.INDEX, inside=directory) as index:
        try:
            hold(index.fileno())
        except BlockingIOError:
            yield True
        else:
            yield False


def _has_ended(ring: LeftRing, *, is_held: bool, directory: Path) -> bool:
    ended = ring.owner.has_ended()
    if ended is not None:
        return ended
    if not ring.owner.is_of_this_machine():
        _log.warning(
            "%s was not closed, and the machine that wrote it was started again since, or is another one: the last "
            "steps, which only its ring holds, cannot be told from what was lost",
            directory,
        )
        return False
    return not is_held  # in another container, say


def _recover(directory: Path, ring: LeftRing, *, may_write: bool) -> Recovered | None:
    there = directory / layout.RECOVERED
    if not (there / layout.MANIFEST).is_file():
        partial = directory / _PARTIAL
        if may_write:
            try:
                shutil.rmtree(partial, ignore_errors=True)  # of one that was killed in its turn
                partial.mkdir()
            except OSError:
                may_write = False
        if not may_write:
            kept = Recovered(Path(tempfile.mkdtemp(prefix="glassengine-")))
            weakref.finalize(kept, shutil.rmtree, kept.path, ignore_errors=True)
            return kept if _replay(directory, ring, kept.path) else None
        found = _replay(directory, ring, partial)
        if found:
            partial.rename(there)
        else:
            shutil.rmtree(partial, ignore_errors=True)
    if may_write:
        for name in (layout.RING, layout.MOVED):
            (directory / name).unlink(missing_ok=True)
    return Recovered(there) if (there / layout.MANIFEST).is_file() else None


def _replay(directory: Path, ring: LeftRing, target: Path) -> int:
    """Write the steps that are not in the index into a new recording, and return how many."""
    shards = ShardFiles(directory)
    with open_regular(directory / layout.INDEX, inside=directory) as index:
        known = set(read_index(index, shards.data_bytes).steps)
    frames = []
    if os.path.lexists(directory / layout.MOVED):
        with open_regular(directory / layout.MOVED, inside=directory) as file:
            data = read_open(file, directory / layout.MOVED, most=_MAX_MOVED_BYTES)
        frames = list(moved.frames(data))
    journaled = Journaled(ring, frames)
    count = 0
    with RecordingWriter(target, metadata={}, first_shard=max(shards.data_bytes, default=-1) + 1) as writer:
        replay = Replay(writer, ring, frames, shards)
        for step in journaled.steps():
            if step.number in known:
                continue
            try:
                replay.put(step)
            except (GlassError, ValueError, KeyError, TypeError) as error:
                _log.warning("step %d of %s cannot be recovered: %s", step.number, directory, error)
            else:
                count += 1
    _log.info("recovered %d steps of %s", count, directory)
    return count
