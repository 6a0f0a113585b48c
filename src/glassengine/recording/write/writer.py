"""Writes a recording: bytes first, then the index records of a step, then its commit record.

A step is *completed* when its commit record is on file. Killing the process at any moment leaves a recording whose
completed steps are readable, because nothing that was committed is ever written again.

Methods raise UsageError where a name, step or tensor cannot be recorded, where a step is committed already, and where a
file cannot be written: the message then says what is safe.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from torch import Tensor

from glassengine.errors import GlassError, UsageError
from glassengine.reading.files import open_regular
from glassengine.recording.layout import layout, records
from glassengine.recording.layout.description import Description, Facts, Group, Groups
from glassengine.recording.layout.index import read_index
from glassengine.recording.layout.layout import LeftOut, LightTable, Location
from glassengine.recording.layout.records import append_tokens, token_frames
from glassengine.recording.layout.shard_files import ShardFiles
from glassengine.recording.layout.tensors import Descriptions, bytes_of, identity
from glassengine.recording.write.destination import (
    SPOOL_BYTES,
    Spool,
    Uploads,
    begun,
    make_directory,
    manifest_of,
    reason_of,
    save_manifest,
)
from glassengine.recording.write.shard import Shards
from glassengine.stores.places import RemotePath, place
from glassengine.writing import crc32


class RecordingWriter:
    """Writes tensors into a new recording directory; a context manager.

    Leaving the block by an exception closes the recording marked incomplete; the steps committed so far are readable.
    A tensor written under several sites of one step is stored once. Memory: the tensors of the open steps are kept
    alive until their commit (their storage could otherwise be reused and be taken for the same tensor), and one tensor
    is copied when it is not contiguous or not on the CPU. Its shards are numbered from `first_shard` on.

    Attributes:
        path: Its directory.
        target: Where it is to be read.
        metadata: The same facts about the recording, stored now and once more by `close`. What changes from step to
            step belongs into the commit: the token ids are collected here from there.
        failure: Why a file could not be written, if one could not; nothing more is.
    """

    def __init__(
        self, path: str | Path, *, metadata: Mapping[str, Any], overwrite: bool = False, first_shard: int = 0
    ) -> None:
        # Files are opened later, too, and the program may change its working directory.
        self.target = self.path = Path(path).absolute()
        self.metadata = dict(metadata)
        self._steps = Steps(self.metadata)
        self.open_steps: Set[int] = self._steps.open.keys()
        self._shards = Shards(self.path, first_shard)
        self._groups = Groups()
        self.group = self._groups.of
        self._descriptions = Descriptions()
        self.failure: str | None = None
        self._closed = False
        manifest = self._steps.manifest("writing")
        make_directory(self.path, overwrite)
        try:
            self._index = begun(self.path, manifest)
        except OSError as error:
            raise UsageError("cannot write the recording", got=reason_of(error, self.path)) from error
        self._shards.begin(lambda: self._index.has_name)

    @property
    def place(self) -> tuple[int, int]:
        """Shard that is being written, and the bytes in it so far."""
        return self._shards.place

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self.close(None if error is None else f"stopped by {type(error).__name__}")

    def write(self, site: str, step: int, tensor: Tensor, *, rank: int = 0, **facts: Unpack[Facts]) -> None:
        """Store the values of `tensor` as they are now."""
        description = self._descriptions.of(site, tensor, **facts)
        self._require_open()
        self._begin(description, step, rank)
        tensor = tensor.detach()
        data = bytes_of(tensor)
        checksum = crc32(data)
        same = self._steps.open[step].identities
        place = identity(tensor)
        original, location, _ = same.get(place, (None, None, None))
        # The checksum catches a buffer that was refilled in between: kernels do that behind the version counter's back.
        if original is not None and location is not None and location.checksum == checksum and data.nbytes:
            self.alias(description, step, rank, original, location)
            return
        same[place] = (description, self.store(description, step, rank, [data], checksum), tensor)
        self.flush()

    def store(
        self, description: Description, step: int, rank: int, pieces: Iterable[memoryview], checksum: int | None
    ) -> Location:
        """Take the bytes of a tensor and return where they will be.

        Args:
            description: What the tensor is.
            step: A step that is not committed.
            rank: Process that has the tensor.
            pieces: The bytes. With a checksum they must not change before `flush`, and without before the next one.
            checksum: Their CRC-32, or None: then each piece is written before the next one is asked for.
        """
        self._begin(description, step, rank)
        try:
            shard = self._shards.for_next(description)
            offset, found = shard.align(), 0
            try:
                for data in pieces:
                    shard.append(data)
                    if checksum is None:
                        found = crc32(data, found)
                        shard.flush()
            except BaseException:
                shard.disown(offset)
                raise
        except OSError as error:
            raise self._failed(error) from error
        location = Location(shard.number, offset, found if checksum is None else checksum)
        shard.add(description, step, rank, location)
        self._note(description, step, rank, location)
        return location

    def store_block(self, group: Group, step: int, data: memoryview, checksum: int) -> Location:
        """Take the bytes of several small tensors that are contiguous as `layout.block_starts` defines.

        Returns where they will be.
        """
        self._require_open()
        opened = self._steps.opened(group.descriptions[0].site, step)
        if not opened.is_new(group.names):
            for description in group.descriptions:
                self._begin(description, step, group.rank)
        try:
            shard = self._shards.for_next(group)
        except OSError as error:
            raise self._failed(error) from error
        location = Location(shard.number, shard.align(), checksum)
        shard.append(data)
        shard.add_block(group, step, location)
        opened.add(group)
        opened.frames.append(group.block_frame(step, location))
        return location

    def alias(self, description: Description, step: int, rank: int, original: Description, location: Location) -> None:
        """Note that a tensor has the bytes of `original`, which this step has at `location`."""
        self._begin(description, step, rank)
        try:
            shard = self._shards.for_next(description, original)
        except OSError as error:
            raise self._failed(error) from error
        shard.add_alias(description, original, step, rank, layout.shard_name(location.shard, sealed=True))
        self._note(description, step, rank, location)

    def leave_out(self, item: LeftOut) -> None:
        """Note a tensor of an open step whose values are not recorded."""
        self._require_open()
        opened = self._steps.opened(item.site, item.step)
        opened.frames.append(records.left_out_frame(item))
        opened.num_left_out += 1

    def leave_out_block(self, group: Group, step: int, reason: str, table: LightTable) -> None:
        """Note small tensors of an open step that are measured, as `table` says, and not recorded."""
        self._require_open()
        opened = self._steps.opened(group.descriptions[0].site, step)
        opened.groups.append(group)
        opened.frames.append(records.measured_frame(group.number, step, reason, table))
        opened.num_left_out += len(group.descriptions)

    def commit(self, step: int, *, token_ids: Sequence[Sequence[int]] = (), stopped: str | None = None) -> None:
        """Complete `step`: from now on it survives the end of the process.

        Args:
            step: A step that is not committed.
            token_ids: What each row of the batch was given in this step, without padding; `metadata["token_ids"]` is
                the concatenation over the committed steps.
            stopped: What ended the step before it was through, if something did; the recording then is incomplete.
        """
        self.end_step(step, token_ids=token_ids, stopped=stopped)
        self.flush()

    def end_step(self, step: int, *, token_ids: Sequence[Sequence[int]] = (), stopped: str | None = None) -> None:
        """Let the next `flush` complete `step`; the arguments are those of `commit`."""
        self._require_open()
        self._steps.end(step, token_ids, stopped)

    def flush(self) -> None:
        """Write the bytes that were taken, then the records of the steps that have ended."""
        ended = self._steps.take()
        try:
            self._shards.flush()
            if ended:
                self._index.append([step.frames for step in ended])
        except OSError as error:
            raise self._failed(error) from error
        self._steps.note_written(ended)

    def close(self, reason: str | None = None) -> None:
        """Seal the recording; it is complete when every step that was written to was committed."""
        if self._closed:
            return
        self._closed = True
        self._steps.incomplete = self.failure or reason or self._steps.incomplete
        if self._steps.open and self._steps.incomplete is None:
            self._steps.incomplete = f"written but not committed: step {', '.join(map(str, sorted(self._steps.open)))}"
        self._steps.open.clear()
        try:
            if self.failure is None:
                self.flush()
            self._shards.seal()
            self._shards.require()
            self._index.require()
            save_manifest(self.path, self._steps.manifest("incomplete" if self._steps.incomplete else "complete"))
        except OSError as error:
            problem = None if self.failure is not None else self._failed(error)
            self._steps.incomplete = self._steps.incomplete or self.failure
            with contextlib.suppress(OSError):
                self._shards.seal()
            with contextlib.suppress(OSError):
                if self._index.has_name:  # or the directory is another one by now
                    save_manifest(self.path, self._steps.manifest("incomplete"))
            if problem is not None:
                raise problem from error
        finally:
            self.abandon()

    @property
    def is_behind(self) -> bool:
        """Whether less is taken than is written; never of a directory, in which the writer waits."""
        return False

    def hurry(self, patience_s: float) -> None:
        """Write what is left as fast as can be: the process ends."""

    def deliver(self, patience_s: float | None = None) -> GlassError | None:
        """Bring the recording, which is closed, to its target, where that is not its directory; return why not."""
        return None

    def abandon(self) -> None:
        """Close the files and write nothing: they belong to another process."""
        self._closed = True
        self._index.close()
        self._shards.close()

    def _note(self, description: Description, step: int, rank: int, location: Location) -> None:
        opened = self._steps.open[step]
        opened.add_name(description.site, rank)
        if not description.nbytes:
            opened.frames.append(description.frame(step, rank, location))
            return
        group = self._groups.alone(description, rank)
        opened.groups.append(group)
        opened.frames.append(group.block_frame(step, location))

    def _begin(self, description: Description, step: int, rank: int) -> OpenStep:
        """Open `step`, unless a tensor of that name cannot be part of it."""
        if step not in self._steps.open:
            self._require_open()
        return self._steps.begun(description.site, step, rank)

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("the recording is closed", got=str(self.path))
        if self.failure is not None:
            raise UsageError("the recording cannot continue", got=self.failure)

    def _failed(self, error: OSError) -> UsageError:
        self.failure = reason_of(error, self.path)
        safe = safe_steps(self.path, self._steps.num_written * self._index.has_name)
        hint = f"{safe}; free some space or record fewer sites or steps"
        return UsageError("the recording cannot be written", got=self.failure, hint=hint)


@dataclass
class OpenStep:
    """What was written of a step that is not committed."""

    frames: list[bytes] = field(default_factory=list)
    names: Set[tuple[str, int]] = frozenset()
    groups: list[Group] = field(default_factory=list)
    num_left_out: int = 0
    # Place and bytes of a tensor -> what is stored, and the tensor itself: its storage cannot be reused meanwhile.
    identities: dict[object, tuple[Description, Location, Tensor]] = field(default_factory=dict)
    # Whether `names` is not shared: those of a group that is all of a step stay the group's.
    _owns_names: bool = False

    def is_new(self, names: Set[tuple[str, int]]) -> bool:
        """Return whether the step has none of these (site, rank)."""
        return not self.names or self.names.isdisjoint(names)

    def add(self, group: Group) -> None:
        """Note that the tensors of a group were written."""
        self.groups.append(group)
        if self.names:
            self._keys().update(group.names)
        else:
            self.names = group.names

    def add_name(self, site: str, rank: int) -> None:
        """Note that a tensor was written."""
        self._keys().add((site, rank))

    def _keys(self) -> set[tuple[str, int]]:
        if not self._owns_names:
            self.names, self._owns_names = set(self.names), True
        assert isinstance(self.names, set)
        return self.names


@dataclass(slots=True)
class EndedStep:
    """A step whose records are to be written once its bytes are."""

    number: int
    frames: bytes
    num_tensors: int
    token_ids: Sequence[Sequence[int]]
    stopped: str | None


class Steps:
    """The steps of a recording: those that are open, were committed, and wait to be written.

    Attributes:
        open: Steps that are not committed, by number.
        num_written: Number of steps whose records were written.
        incomplete: Why the recording is incomplete, if it is.
    """

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.open: dict[int, OpenStep] = {}
        self.num_written = 0
        self.incomplete: str | None = None
        # The token ids of written steps are appended to it.
        self._metadata = metadata
        self._committed: set[int] = set()
        self._num_tensors = 0
        self._described: set[int] = set()
        self._waiting: list[EndedStep] = []

    def opened(self, site: str, step: int) -> OpenStep:
        """Return a step for a tensor of `site`; it is opened if it is not."""
        what = f"the tensor {site[:200]!r} cannot be recorded"
        if step < 0:
            raise UsageError(what, got=f"step {step}", expected="numbers from 0 on")
        if step in self._committed:
            raise UsageError(what, got=f"step {step}, which is committed", expected="a step that is still open")
        return self.open.setdefault(step, OpenStep())

    def begun(self, site: str, step: int, rank: int) -> OpenStep:
        """Return a step that has no tensor of `site` yet."""
        opened = self.open.get(step) or self.opened(site, step)
        if (site, rank) in opened.names:
            what = f"the tensor {site[:200]!r} cannot be recorded"
            raise UsageError(what, got=f"the same site twice in step {step}", hint="give the second call its own name")
        return opened

    def end(self, number: int, token_ids: Sequence[Sequence[int]], stopped: str | None) -> None:
        """Commit a step: its records are made, and wait until they are taken."""
        if number in self._committed:
            raise UsageError("a step is committed twice", got=f"step {number}")
        step = self.open.pop(number, None) or OpenStep()
        # A step that is never committed must not be the one that describes a group others use.
        new = {group.number: group for group in step.groups if group.number not in self._described}
        frames = [group.frame() for group in new.values()]
        frames += [*step.frames, *token_frames(number, token_ids)]
        frames.append(records.commit_frame(number, len(step.names), step.num_left_out, stopped))
        self._described |= new.keys()
        self._waiting.append(EndedStep(number, b"".join(frames), len(step.names), token_ids, stopped))
        self._committed.add(number)

    def take(self) -> list[EndedStep]:
        """Return the steps that wait to be written; they no longer wait."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def note_written(self, steps: Sequence[EndedStep]) -> None:
        """Count steps whose records are on file."""
        for step in steps:
            self.num_written += 1
            self._num_tensors += step.num_tensors
            if step.stopped is not None and self.incomplete is None:
                self.incomplete = f"step {step.number} was stopped by {step.stopped}"
            if step.token_ids:
                append_tokens(self._metadata.setdefault("token_ids", []), enumerate(step.token_ids))

    def manifest(self, state: str) -> bytes:
        """Return the manifest of the recording in `state`."""
        counts = {"num_steps": self.num_written, "num_tensors": self._num_tensors}
        return manifest_of(state, self.incomplete, **counts, metadata=self._metadata)


class StoredWriter(RecordingWriter):
    """A `RecordingWriter` whose recording goes to a store.

    Closing seals what is written here; `deliver` then waits until all of it is in the store.

    Attributes:
        target: Where the recording goes; `path` is where it is until then.
    """

    def __init__(
        self,
        target: RemotePath,
        *,
        metadata: Mapping[str, Any],
        overwrite: bool = False,
        spool_bytes: int | None = None,
    ) -> None:
        self._process = os.getpid()
        self._spool = Spool.begun(target, overwrite=overwrite)
        try:
            super().__init__(self._spool.directory, metadata=metadata)
            try:
                most = SPOOL_BYTES if spool_bytes is None else spool_bytes
                self._uploads = self._shards.uploads = Uploads(self.path, target, most)
            except BaseException:
                super().abandon()
                raise
        except BaseException:
            self._spool.close(remove=True)
            raise
        self.target: Path = target

    @property
    def is_behind(self) -> bool:
        """Whether the store takes less than is written."""
        return self._uploads.is_behind

    def hurry(self, patience_s: float) -> None:
        """Wait no more for a store that does not keep up."""
        self._uploads.hurry(patience_s)

    def deliver(self, patience_s: float | None = None) -> GlassError | None:
        """Wait until the recording, which is closed, is in the store; return why it is not.

        Args:
            patience_s: How long the store may not answer; as while it was written where None.
        """
        problem = self._uploads.finish(patience_s)
        if problem is None and (self.path / layout.RING).exists():
            hint = f"glass upload {self.target}"
            problem = UsageError("not everything was uploaded", got=f"{self.path}: steps in its ring", hint=hint)
        self._spool.close(remove=problem is None)
        return problem

    def abandon(self) -> None:
        """Close the files; in a process that was forked, also the lock, which is its parent's."""
        super().abandon()
        if os.getpid() != self._process:
            self._spool.close(remove=False)


def new_writer(
    path: str | Path, *, metadata: Mapping[str, Any], overwrite: bool, spool_bytes: int | None
) -> RecordingWriter:
    """Return what writes a recording to a path, here or in a store."""
    where = place(path)
    if isinstance(where, RemotePath):
        return StoredWriter(where, metadata=metadata, overwrite=overwrite, spool_bytes=spool_bytes)
    return RecordingWriter(where, metadata=metadata, overwrite=overwrite)


def safe_steps(directory: Path, moved: int) -> str:
    """Say how many steps of a recording can be read; `moved` where its directory has another name by now."""
    count = 0 if directory.exists() else moved
    with contextlib.suppress(OSError, GlassError, ValueError):
        shards = ShardFiles(directory)
        with open_regular(directory / layout.INDEX, inside=directory) as index:
            count = len(read_index(index, shards.data_bytes).steps)
    return f"{count} completed steps are safe" if count else "no completed step is safe"
