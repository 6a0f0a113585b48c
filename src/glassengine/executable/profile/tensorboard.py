"""Scalars of a profile for TensorBoard: what its own library reads, where that is installed."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glassengine.writing.files import aside


def write(directory: Path, summary: Mapping[str, Any]) -> bool:
    """Write `step_ms` for every step and `total_ms/<kind>` for every kind of span; return whether it could be done.

    Args:
        directory: Of the profile, a run to TensorBoard.
        summary: What `profile_trace.summarize` returns.

    Raises:
        OSError: They cannot be written.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:  # TensorBoard is an extra
        return False
    # Not by its SummaryWriter, a thread of which writes: what goes wrong there is a traceback of that thread.
    written, now = io.BytesIO(), time.time()
    records = RecordWriter(written)
    records.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())

    def add(tag: str, value: float, step: int) -> None:
        found = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        records.write(Event(wall_time=now, step=step, summary=found).SerializeToString())

    for step, length in enumerate(summary["steps_us"]):
        add("step_ms", length / 1e3, step)
    for kind, found in sorted(summary["kinds"].items()):
        add(f"total_ms/{kind}", found["total_us"] / 1e3, 0)
    name = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}.0"
    with aside(directory / name) as path:
        path.write_bytes(written.getvalue())
    return True
