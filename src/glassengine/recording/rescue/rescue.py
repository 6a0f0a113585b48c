"""Recovers the steps that had ended when the process of a recording was killed, and that only its ring holds.

They become a recording of their own in `recovered/`, once; or, where nothing can be written, in a directory that lives
as long as its reader. The ring of a process that still runs is left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from glassengine.errors import GlassError, UsageError
from glassengine.reading.files import open_regular, read_open
from glassengine.recording.layout import layout
from glassengine.recording.layout.recovery import IndexContents, read_index
from glassengine.recording.layout.shard_files import ShardFiles, Shards
from glassengine.recording.layout.tokens import append_tokens
from glassengine.recording.rescue.journaled import Journaled, JournaledStep
from glassengine.recording.ring.file import LeftRing
from glassengine.recording.write import moved
from glassengine.writing.files import hold, remove_tree

_MAX_MOVED_BYTES = 1 << 30
_PARTIAL = f"{layout.RECOVERED}.part"

# Of no shard that the index names, also not of one that is gone.
_FIRST_SHARD = (layout.MAX_SHARD_NUMBER + 1) // 2

_Frame = tuple[int, int, bytes]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovered:
    """Where recovered steps are.

    Attributes:
        path: A recording whose shards have numbers of their own; one in a temporary directory goes with this.
    """

    path: Path

    def added_to(self, contents: IndexContents, shards: Shards) -> IndexContents:
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
    """Return the steps of a recording that are not in its index, recovering them from its ring now if need be.

    To be called before the index is read: what the writer brings to it meanwhile leaves the ring.
    """
    there = directory / layout.RECOVERED
    try:
        if not os.path.lexists(directory / layout.RING):
            return Recovered(there) if (there / layout.MANIFEST).is_file() else None
        with open_regular(directory / layout.RING, inside=directory) as file:
            ring = LeftRing.read(file)
            if ring is None or ring.is_stopped:
                return Recovered(there) if (there / layout.MANIFEST).is_file() else None
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
    """Lock the index of a recording; yield whether another process has."""
    with open_regular(directory / layout.INDEX, inside=directory) as index:
        try:
            hold(index.fileno())
        except BlockingIOError:
            yield True
        else:
            yield False


def num_left(directory: Path) -> int | None:
    """Return how many steps only the ring of a recording holds; None where that cannot be read now."""
    if not (directory / layout.INDEX).exists():
        return 0
    try:
        with open_regular(directory / layout.RING, inside=directory) as file:
            ring = LeftRing.read(file)
            return 0 if ring is None else len(_missing(directory, ring, ShardFiles(directory))[0])
    except (GlassError, OSError, ValueError) as error:
        _log.warning("steps in the ring of %s cannot be read: %s", directory, error)
        return None


def with_left(error: Exception, num_steps: int | None) -> Exception:
    """Return an error that says, too, how many steps are in the ring, as `num_left` has it."""
    if num_steps == 0 or not isinstance(error, UsageError):
        return error
    said = f"in {layout.RING}: {num_steps or 'possibly some'} more, recovered when the recording is opened"
    hint = said if error.hint is None else f"{error.hint}; {said}"
    return UsageError(error.what, got=error.got, expected=error.expected, hint=hint)


def _has_ended(ring: LeftRing, *, is_held: bool, directory: Path) -> bool:
    if ring.is_left and ring.owner.is_of_this_machine():
        return True
    ended = ring.owner.has_ended()
    if ended is not None:
        return ended
    if not ring.owner.is_of_this_machine():
        _log.warning(
            "%s was not closed, and the machine that wrote it was started again since, or is another one: the last "
            "steps, in its ring only, may be incomplete",
            directory,
        )
        return False
    return not is_held  # in another container, say


def _recover(directory: Path, ring: LeftRing, *, may_write: bool) -> Recovered | None:
    there = directory / layout.RECOVERED
    is_there = (there / layout.MANIFEST).is_file()
    if not is_there and not (may_write and _recover_into(there, directory, ring)):
        # Until there is room: the ring stays.
        kept = Recovered(Path(tempfile.mkdtemp(prefix="glassengine-")))
        weakref.finalize(kept, remove_tree, kept.path)
        return kept if _replay(directory, ring, kept.path) else None
    if may_write:
        for name in (layout.RING, layout.MOVED):
            (directory / name).unlink(missing_ok=True)
    return Recovered(there) if (there / layout.MANIFEST).is_file() else None


def _recover_into(there: Path, directory: Path, ring: LeftRing) -> bool:
    """Write the steps that only the ring holds, if any, into a directory; return whether that went well."""
    partial = directory / _PARTIAL
    try:
        remove_tree(partial)  # of one that was killed in its turn
        partial.mkdir()
        if _replay(directory, ring, partial):
            partial.rename(there)
    except (GlassError, OSError) as error:
        _log.warning("recovered steps of %s cannot be kept: %s", directory, error)
        return False
    finally:
        remove_tree(partial)
    return True


def _missing(directory: Path, ring: LeftRing, shards: ShardFiles) -> tuple[list[JournaledStep], list[_Frame]]:
    """Return the steps that are not in the index, and what `ring.log` says."""
    with open_regular(directory / layout.INDEX, inside=directory) as index:
        known = set(read_index(index, shards.data_bytes).steps)
    frames: list[_Frame] = []
    if os.path.lexists(directory / layout.MOVED):
        with open_regular(directory / layout.MOVED, inside=directory) as file:
            data = read_open(file, directory / layout.MOVED, most=_MAX_MOVED_BYTES)
        frames = list(moved.frames(data))
    return [step for step in Journaled(ring, frames).steps() if step.number not in known], frames


def _replay(directory: Path, ring: LeftRing, target: Path) -> int:
    """Write the steps that are not in the index into a new recording, and return how many.

    Raises:
        UsageError: They cannot be written.
    """
    from glassengine.recording.rescue.replayed import Replay
    from glassengine.recording.write.writer import RecordingWriter

    shards = ShardFiles(directory)
    steps, frames = _missing(directory, ring, shards)
    count = 0
    first = max(_FIRST_SHARD, max(shards.data_bytes, default=-1) + 1)
    with RecordingWriter(target, metadata={}, first_shard=first) as writer:
        replay = Replay(writer, ring, frames, shards)
        for step in steps:
            try:
                replay.put(step)
            except (GlassError, ValueError, KeyError, TypeError) as error:
                if writer.failure is not None or isinstance(error.__cause__, OSError):
                    raise  # it may be there the next time
                _log.warning("step %d of %s cannot be recovered: %s", step.number, directory, error)
            else:
                count += 1
    _log.info("recovered %d steps of %s", count, directory)
    return count
