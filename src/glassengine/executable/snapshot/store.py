"""Snapshots on their way to the disk: limits kept, failures survived, omissions counted and logged."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from glassengine import spans
from glassengine.executable.snapshot.policy import Policy
from glassengine.executable.snapshot.tensors import obstacle
from glassengine.executable.snapshot.writer import SnapshotWriter, Taken

logger = logging.getLogger("glassengine")


class SnapshotStore:
    """Writes the snapshots of one policy; safe for several threads.

    Attributes:
        policy: Where they go, and their limits.
        written: Those of this process, in order.
        left_out: Reason -> how many snapshots, or parts of snapshots, it cost.
        num_bytes: Disk space they take; what they share counts once.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.written: list[Path] = []
        self.left_out: Counter[str] = Counter()
        self.num_bytes = 0
        self._writer = SnapshotWriter(policy.directory, redact=policy.redact)
        self._lock = threading.Lock()
        self._summarized = 0
        atexit.register(self.close)

    def write(self, taken: Taken) -> Path | None:
        """Write a snapshot and return where it is, or None where it was left out."""
        with self._lock:
            reason = self._forbidden(taken)
            if reason is not None:
                self._leave_out(reason)
                return None
            path: Path | None = None
            with self._surviving(), spans.span("snapshot", taken.name):
                path = self._writer.write(taken)
                self.written.append(path)
                self.num_bytes += _own_bytes(path)
            return path

    def add(self, path: Path, *, outputs: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> bool:
        """Add outputs and facts to a snapshot; return whether they could be written."""
        with self._lock:
            with self._surviving(), spans.span("snapshot", path.name):
                self._writer.add(path, outputs=outputs, facts=facts or {})
                self.num_bytes += sum(tensor.nbytes for tensor in outputs.values() if obstacle(tensor) is None)
                return True
            return False

    def close(self) -> None:
        """Log what was left out, once."""
        atexit.unregister(self.close)
        with self._lock:
            total = sum(self.left_out.values())
            if total == self._summarized:
                return
            self._summarized = total
            reasons = "; ".join(f"{count}: {reason}" for reason, count in self.left_out.items())
            logger.warning("%d snapshots in %s, left out %s", len(self.written), self.policy.directory, reasons)

    def _forbidden(self, taken: Taken) -> str | None:
        policy = self.policy
        if policy.max_snapshots is not None and len(self.written) >= policy.max_snapshots:
            return f"max_snapshots={policy.max_snapshots}"
        size = self._writer.num_bytes(taken)
        if policy.max_bytes is not None and self.num_bytes + size > policy.max_bytes:
            return f"max_bytes={policy.max_bytes}"
        try:
            above = next(path for path in (policy.directory, *policy.directory.parents) if path.exists())
            free = shutil.disk_usage(above).free
        except OSError:
            return None  # writing will say why
        if free - size < policy.min_free_bytes:
            return f"less than min_free_bytes={policy.min_free_bytes} would be free on the disk"
        return None

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._leave_out(error.strerror or str(error))
        except Exception as error:
            # What cannot be read off a device in trouble must not hide the trouble.
            logger.debug("a snapshot failed", exc_info=True)
            self._leave_out(f"{type(error).__name__}: {str(error)[:300]}")

    def _leave_out(self, reason: str) -> None:
        if reason not in self.left_out:
            logger.warning("a snapshot in %s is left out: %s", self.policy.directory, reason)
            self._summarized += 1
        self.left_out[reason] += 1


def _own_bytes(directory: Path) -> int:
    """Return the bytes of the files that no other snapshot shares."""
    found = [entry.stat() for entry in os.scandir(directory)]
    return sum(entry.st_size for entry in found if entry.st_nlink == 1)
