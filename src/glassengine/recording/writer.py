"""Writes a recording: bytes first, then the index records of a step, then its commit record.

A step is *completed* when its commit record is on file. Killing the process at any moment leaves a recording whose
completed steps are readable, because nothing that was committed is ever written again.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from glassengine import blocks
from glassengine.errors import GlassError, UsageError
from glassengine.recording import layout
from glassengine.recording.layout import Entry, Location
from glassengine.recording.shard import Shard, write_all

SHARD_BYTES = 1 << 31


class RecordingWriter:
    """Writes tensors into a new recording directory; a context manager.

    Leaving the block by an exception closes the recording marked incomplete; the steps committed so far are readable.
    A tensor written under several sites of one step is stored once. Memory: the tensors of the open steps are kept
    alive until their commit (their storage could otherwise be reused and be taken for the same tensor), and one tensor
    is copied when it is not contiguous or not on the CPU.

    Attributes:
        metadata: JSON-ready facts about the recording, stored now and once more by `close`. What changes from step to
            step belongs into the commit: the token ids are collected here from there.

    Raises:
        UsageError: The directory cannot be written, or exists and `overwrite` is false, or holds other files.
    """

    def __init__(self, path: str | Path, *, metadata: Mapping[str, Any], overwrite: bool = False) -> None:
        self.path = Path(path)
        self.metadata = dict(metadata)
        self._steps: list[int] = []
        self._pending: dict[int, dict[tuple[str, int], Entry]] = {}
        self._identities: dict[int, dict[tuple[Any, ...], tuple[Entry, Tensor]]] = {}
        self._shard: Shard | None = None
        self._next_shard = 0
        self._num_tensors = 0
        self._failure: str | None = None
        self._closed = False
        manifest = self._manifest("writing")
        self._make_directory(overwrite)
        try:
            self._index = (self.path / layout.INDEX).open("xb", buffering=0)
            self._save(manifest)
        except OSError as error:
            raise UsageError("cannot write the recording", got=_reason(error, self.path)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._failure is None:
            self._failure = f"stopped by {type(error).__name__}"
        self.close()

    def write(
        self,
        site: str,
        step: int,
        tensor: Tensor,
        *,
        rank: int = 0,
        axes: Mapping[str, int] | None = None,
        node: str | None = None,
    ) -> None:
        """Store the values of `tensor` as they are now.

        Args:
            site: Site name; any text up to 16 KiB.
            step: 0 is the prefill; not yet committed.
            tensor: Dense; any strides, device and dtype of `layout.STORED`.
            rank: Process that has the tensor.
            axes: Position of the "batch", "sequence" and "cache" dimensions.
            node: Name of the graph node that made it.

        Raises:
            UsageError: The name, step or tensor cannot be recorded.
            GlassError: The file cannot be written; the message says what is safe.
        """
        self._require_open()
        self._check(site, step, rank, tensor)
        tensor = tensor.detach()
        try:
            data = _bytes_of(tensor)
            entry = Entry(
                site=site,
                step=step,
                rank=rank,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                axes=dict(axes or {}),
                node=node,
                nbytes=data.nbytes,
            )
            entry = self._store(entry, data, tensor)
        except OSError as error:
            raise self._failed(error) from error
        self._pending.setdefault(step, {})[site, rank] = entry

    def commit(self, step: int, *, token_ids: Sequence[Sequence[int]] = ()) -> None:
        """Complete `step`: from now on it survives the end of the process.

        Args:
            step: A step that is not committed.
            token_ids: What each row of the batch was given in this step, without padding; `metadata["token_ids"]` is
                the concatenation over the committed steps.

        Raises:
            UsageError: The step is committed already.
            GlassError: The file cannot be written; the message says what is safe.
        """
        self._require_open()
        if step in self._steps:
            raise UsageError("a step is committed twice", got=f"step {step}")
        entries = list(self._pending.get(step, {}).values())
        frames = [layout.frame(layout.entry_payload(entry)) for entry in entries]
        frames += [layout.frame(payload) for payload in layout.token_payloads(token_ids)]
        frames.append(layout.frame({"kind": "commit", "step": step, "num_tensors": len(entries)}))
        try:
            write_all(self._index, b"".join(frames))
        except OSError as error:
            raise self._failed(error) from error
        self._steps.append(step)
        if token_ids:
            rows = self.metadata.setdefault("token_ids", [])
            layout.append_tokens(rows, enumerate(token_ids))
        self._num_tensors += len(entries)
        self._pending.pop(step, None)
        self._identities.pop(step, None)

    def close(self) -> None:
        """Seal the recording; it is complete when every step that was written to was committed.

        Raises:
            GlassError: The file cannot be written; the message says what is safe.
        """
        if self._closed:
            return
        self._closed = True
        if self._pending and self._failure is None:
            self._failure = f"written but not committed: step {', '.join(map(str, sorted(self._pending)))}"
        self._pending.clear()
        self._identities.clear()
        try:
            self._seal_shard()
            self._save(self._manifest("incomplete" if self._failure else "complete"))
        except OSError as error:
            # Without the last manifest the recording stays readable and says "writing", which reads as incomplete.
            if self._failure is None:
                raise self._failed(error) from error
        finally:
            self._index.close()
            if self._shard is not None:
                self._shard.close()

    def _store(self, entry: Entry, data: memoryview, tensor: Tensor) -> Entry:
        """Write `data` unless this step has it already, and return `entry` with its location."""
        checksum = zlib.crc32(data)
        same = self._identities.setdefault(entry.step, {})
        identity = _identity(tensor)
        original = same[identity][0] if identity in same and data.nbytes else None
        # The checksum catches a buffer that was refilled in between: kernels do that behind the version counter's back.
        if original is not None and original.location is not None and original.location.checksum == checksum:
            self._shard_for(entry, original).add_alias(entry, original)
            return dataclasses.replace(entry, location=original.location)
        shard = self._shard_for(entry)
        entry = dataclasses.replace(entry, location=Location(shard.number, shard.append(data), checksum))
        shard.add(entry)
        same[identity] = (entry, tensor)
        return entry

    def _shard_for(self, *entries: Entry) -> Shard:
        if self._shard is not None and (self._shard.size >= SHARD_BYTES or not self._shard.has_room(*entries)):
            self._seal_shard()
        if self._shard is None:
            self._shard = Shard(self.path, self._next_shard)
            self._next_shard += 1
        return self._shard

    def _seal_shard(self) -> None:
        if self._shard is not None:
            self._shard.seal()
            self._shard = None

    def _check(self, site: str, step: int, rank: int, tensor: Tensor) -> None:
        what = f"the tensor {site[:200]!r} cannot be recorded"
        if len(site.encode(errors="surrogatepass")) > layout.MAX_NAME_BYTES:
            raise UsageError(what, got="a longer name", expected=f"at most {layout.MAX_NAME_BYTES} bytes")
        if step < 0 or rank < 0:
            raise UsageError(what, got=f"step {step}, rank {rank}", expected="numbers from 0 on")
        if step in self._steps:
            raise UsageError(what, got=f"step {step}, which is committed", expected="a step that is still open")
        if (site, rank) in self._pending.get(step, {}):
            raise UsageError(what, got=f"the same site twice in step {step}", hint="give the second call its own name")
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "a quantized tensor" if tensor.is_quantized else f"layout {tensor.layout}"
            raise UsageError(what, got=kind, expected="a dense tensor", hint="record .to_dense() or .dequantize()")
        if tensor.is_meta:
            raise UsageError(what, got="a meta tensor, which has no values")
        if str(tensor.dtype).removeprefix("torch.") not in layout.STORED:
            raise UsageError(what, got=str(tensor.dtype), expected=list(layout.STORED))

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("the recording is closed", got=str(self.path))
        if self._failure is not None:
            raise GlassError("the recording cannot go on", got=self._failure)

    def _failed(self, error: OSError) -> GlassError:
        self._failure = _reason(error, self.path)
        safe = f"{len(self._steps)} completed steps are safe" if self._steps else "no step was completed"
        return GlassError(
            "the recording cannot be written",
            got=self._failure,
            hint=f"{safe}; free some space or record fewer sites or steps",
        )

    def _manifest(self, state: str) -> bytes:
        document = {
            "schema_version": layout.SCHEMA_VERSION,
            "format": "glassengine recording",
            "state": state,
            "reason": self._failure,
            "num_steps": len(self._steps),
            "num_tensors": self._num_tensors,
        }
        for key, value in self.metadata.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise UsageError("recording metadata is not JSON", got=f"{key!r}: {error}") from error
        return json.dumps({**document, "metadata": self.metadata}, indent=1).encode()

    def _save(self, manifest: bytes) -> None:
        aside = self.path / f"{layout.MANIFEST}.tmp"
        aside.write_bytes(manifest)
        aside.replace(self.path / layout.MANIFEST)

    def _make_directory(self, overwrite: bool) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            names = [item.name for item in self.path.iterdir()]
            if not names:
                return
            if layout.MANIFEST not in names:
                raise UsageError(
                    "the output directory holds other files", got=str(self.path), hint="name a new or empty directory"
                )
            if not overwrite:
                raise UsageError("the recording exists already", got=str(self.path), hint="replace it with --overwrite")
            # The manifest goes last, so that a half-removed recording can still be overwritten.
            for name in sorted(filter(_is_ours, names), key=lambda name: name == layout.MANIFEST):
                (self.path / name).unlink()
        except OSError as error:
            raise UsageError("cannot write the recording", got=_reason(error, self.path)) from error


def _is_ours(name: str) -> bool:
    own = (layout.MANIFEST, f"{layout.MANIFEST}.tmp", layout.INDEX)
    return name in own or re.fullmatch(r"shard-\d{5}\.(part|safetensors)", name) is not None


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Return what tells two live tensors of one step apart; equal for views that have the same bytes."""
    place = (str(tensor.device), tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return place if tensor.is_contiguous() else (*place, tensor.dtype, tensor.shape, tensor.stride())


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of `tensor` in row-major order; a copy only where the tensor is elsewhere or not contiguous."""
    flat = blocks.flat(tensor.to("cpu").resolve_conj().resolve_neg())
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # a buffer at run time


def _reason(error: OSError, path: Path) -> str:
    return f"{error.strerror or error} ({error.filename or path})"
