"""Brings to a store what a recording left on this machine: its process was killed, or the store did not answer."""

from __future__ import annotations

import logging
from pathlib import Path

from glassengine.errors import GlassError, UsageError
from glassengine.recording.layout import layout
from glassengine.recording.read.reader import Recording
from glassengine.recording.recovery import recovered
from glassengine.recording.ring import journal
from glassengine.recording.write.uploads import Spool, directory_of, upload_rest, uploaded
from glassengine.results.recorded import Uploaded
from glassengine.stores import objects
from glassengine.stores.places import RemotePath, place

_log = logging.getLogger(__name__)


def upload(source: str | Path, target: str | Path | None = None) -> Uploaded:
    """Bring a recording of this machine to a store, or the rest of one that was being recorded there.

    What is there already is left as it is, `recording.json` is written last, and nothing is removed here but what
    waited for that store.

    Args:
        source: The URL of a recording whose process was killed on this machine; or a directory, with `target`.
        target: Where the recording in a directory goes: a URL that nothing is at.

    Raises:
        UsageError: Nothing waits for that place here, the process that records still runs, or the store cannot be used.
    """
    if target is not None:
        there, directory = place(target), place(source)
        if (
            not isinstance(there, RemotePath)
            or isinstance(directory, RemotePath)
            or not (directory / layout.MANIFEST).is_file()
        ):
            got = f"{source} to {target}"
            raise UsageError("a recording of this machine goes to a store", got=got, expected="DIR URL")
        if objects.listed(str(there)):
            raise UsageError("there is something already", got=str(there), hint="name a place that is empty")
        recovered(directory)
        return _uploaded(there, upload_rest(directory, there, lambda function: function()))
    there = place(source)
    if not isinstance(there, RemotePath) or not directory_of(there).exists():
        raise UsageError(
            "nothing waits here to be uploaded to that place",
            got=str(there),
            hint="a recording of this machine goes there by: glass upload DIR URL",
        )
    spool = Spool(there)
    try:
        _recover(spool.directory, spool.target)
        num_files = upload_rest(spool.directory, spool.target, lambda function: function())
    except BaseException:
        spool.close(remove=False)
        raise
    is_left = (spool.directory / layout.RING).exists()
    spool.close(remove=not is_left)
    if is_left:
        _log.warning("steps that only the ring in %s holds were not recovered", spool.directory)
    return _uploaded(spool.target, num_files)


def _uploaded(target: RemotePath, num_files: int) -> Uploaded:
    opened = Recording.open(target)
    return Uploaded(str(target), num_files, len(opened.steps), opened.complete)


def _recover(directory: Path, target: RemotePath) -> None:
    """Recover the steps that only the ring holds; bytes of theirs may be in shards that were uploaded."""
    if not (directory / layout.RING).exists():
        return
    try:
        for name in _shards_of_open_steps(directory) & uploaded(directory):
            aside = directory / f"{name}.fetched"
            objects.fetch(str(target / name), aside)
            aside.replace(directory / name)
    except (GlassError, OSError, ValueError) as error:
        _log.warning("shards that steps in the ring of %s need cannot be fetched: %s", directory, error)
    recovered(directory)


def _shards_of_open_steps(directory: Path) -> set[str]:
    moved = journal.read_evicted(directory)
    places = [journal.PLACE.unpack(said) for _, kind, said in moved if kind == journal.AT]
    return {layout.shard_name(shard, sealed=True) for shard, *_ in places if shard <= layout.MAX_SHARD_NUMBER}
