"""Lines of helpers: which of the frames that made an op a program keeps.

`torch.export` keeps those of functions called `forward`. A model that is written with methods and functions has one
line there for all of them, so the frames that the innermost `forward` called are kept too, as far as they are of its
folder: what a library makes of a call is not where the user wrote it.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator
from pathlib import Path

from torch.fx.proxy import TracerBase

NOT_THE_USERS = ("/glassengine/program/", "/torch/")


def is_users(file: str) -> bool:
    """Whether a frame of `file` is the user's: neither torch's nor that of an export."""
    return not any(part in file for part in NOT_THE_USERS)


def with_helpers(kept: traceback.StackSummary, frames: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames `kept` of `frames`, outermost first, with the helpers of the innermost `forward`."""
    places = [place for place, frame in enumerate(frames) if frame.name == "forward" and is_users(frame.filename)]
    if not places:
        return kept
    forward, called = frames[places[-1]], frames[places[-1] + 1 :]
    helpers = [frame for frame in called if _folder(frame.filename) == _folder(forward.filename)]
    return traceback.StackSummary.from_list([*kept, *helpers])


@functools.lru_cache(maxsize=4096)
def _folder(file: str) -> Path:
    return Path(file).parent


@contextlib.contextmanager
def helper_lines() -> Iterator[None]:
    """Let what is traced in the block keep the lines of helpers."""
    # One step of export takes that from its tracer alone, without an option.
    own = TracerBase._filter_traceback_frames

    def kept(self: TracerBase, frames: traceback.StackSummary) -> traceback.StackSummary:
        return with_helpers(own(self, frames), frames)

    TracerBase._filter_traceback_frames = kept  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        TracerBase._filter_traceback_frames = own  # type: ignore[method-assign]
