"""One rank of an engine: its part, the process groups it is in, and what it exchanges with others in a step.

Collectives within a layer are ops of its program. Between stages tensors are handed on from a rank to the one at the
same place of the next stage, and the logits of the last stage go to every rank.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from glassengine import environment
from glassengine.engine.manifest import Manifest
from glassengine.engine.session.loaded import LoadedEngine
from glassengine.engine.session.record import RankRecorder
from glassengine.engine.session.session import KVCache
from glassengine.errors import BackendError, UsageError
from glassengine.program.parallel.placements import TENSOR_GROUP, Mesh
from glassengine.program.parallel.stages import HANDED

_NAME: Any = TENSOR_GROUP


def part_of(engine: Path, rank: int) -> Path:
    """Return the directory of what one rank runs."""
    return engine / f"rank-{rank:05d}"


def mesh_of(manifest: Manifest) -> Mesh:
    """Return the ranks of an engine."""
    return Mesh(**manifest.mesh)


def join(mesh: Mesh, rank: int, device: str, rendezvous: str | None = None) -> None:
    """Join the process groups of an engine; every rank calls this once.

    `rendezvous` is a file in which ranks of one machine meet; None takes what torchrun has set.

    Raises:
        BackendError: This torch has no collectives.
        UsageError: The process is in a group of another size.
    """
    if not dist.is_available():
        raise BackendError("this torch has no collectives", hint="install a torch with torch.distributed")
    if device == "cuda":
        torch.cuda.set_device(environment.local_rank())
    if not dist.is_initialized():
        options: dict[str, Any] = {"init_method": f"file://{rendezvous}"} if rendezvous else {}
        dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=mesh.size, **options)
    if dist.get_world_size() != mesh.size:
        raise UsageError(
            "the process group has another size than the engine",
            got=f"{dist.get_world_size()} processes",
            expected=f"{mesh.size}: {mesh}",
        )
    for stage in range(mesh.pipeline):
        # Every rank makes every group, as torch wants it.
        ranks = list(range(stage * mesh.tensor, (stage + 1) * mesh.tensor))
        group = dist.new_group(ranks)
        if rank in ranks:
            torch._C._distributed_c10d._register_process_group(_NAME, group)


@contextlib.contextmanager
def placeholder_group(mesh: Mesh, rank: int) -> Iterator[None]:
    """Register a group that exchanges nothing, for compilers that ask how large it is."""
    if mesh.tensor == 1 or not dist.is_available():
        yield
        return
    group = dist.ProcessGroup(torch._C._distributed_c10d.HashStore(), mesh.place(rank), mesh.tensor)
    torch._C._distributed_c10d._register_process_group(_NAME, group)
    try:
        yield
    finally:
        torch._C._distributed_c10d._unregister_process_group(_NAME)


class Member:
    """What a rank does.

    `part` is what it runs, `manifest` that of the whole engine.
    """

    def __init__(self, part: LoadedEngine, manifest: Manifest, rank: int) -> None:
        self.part, self.whole, self.rank, self.mesh = part, manifest, rank, mesh_of(manifest)
        self.stage, self.last = self.mesh.stage(rank), self.mesh.pipeline - 1
        self._caches: dict[int, KVCache] = {}
        self._recorders: dict[int, RankRecorder] = {}
        self._numbers = itertools.count()
        ports = part.manifest.inputs
        self._received = [entry for entry in ports if entry.name.startswith(HANDED)]
        self._given = [entry.name for entry in ports if not entry.name.startswith(HANDED)]
        self._sent = [entry.name for entry in part.manifest.outputs if entry.name.startswith(HANDED)]

    def agreed(self, seed: int | None) -> int:
        """Return the seed of the first rank; without one, a seed that it draws."""
        drawn = torch.tensor(secrets.randbits(31) if seed is None else seed, device=self.whole.device)
        dist.broadcast(drawn, 0)
        return int(drawn)

    def open(self, batch_size: int, length: int) -> int:
        """Begin a session; return its number, the same on every rank that opens sessions in the same order."""
        number = next(self._numbers)
        self._caches[number] = KVCache(self.part.manifest, batch_size, length)
        return number

    def close(self, number: int) -> None:
        """End a session."""
        self._caches.pop(number, None)
        self.end_record(number, "a session that was left")

    def record(self, number: int, path: str, rows: Sequence[Sequence[int]], overwrite: bool) -> None:
        """Record the steps of a session from now on, into `rank<r>` of a directory."""
        self._recorders[number] = RankRecorder(Path(path), self.part, self.rank, rows, overwrite=overwrite)

    def end_step(
        self, number: int, step: int, tokens: Sequence[Sequence[int]], given: Mapping[str, torch.Tensor]
    ) -> None:
        """Record what was made since the last step, in which the ranks were `given` this."""
        self._recorders[number].end_step(step, tokens, {**given, **self._caches[number].tensors})

    def end_record(self, number: int, failed: str | None) -> None:
        """End the recording of a session, if there is one."""
        recorder = self._recorders.pop(number, None)
        if recorder is not None:
            recorder.end(failed)

    def step(self, number: int, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one step of a session; return its logits [B, S, V].

        `inputs` are those of all ranks: tokens, mask, positions and slots.
        """
        cache = self._caches[number]
        batch, sequence = inputs["input_ids"].shape
        sizes = {"batch": batch, "sequence": sequence, "cache": inputs["attention_mask"].shape[1]}
        fed = {name: cache.tensors[name] if name in cache.tensors else inputs[name] for name in self._given}
        with torch.inference_mode():
            for entry in self._received:
                shape = [_size(size, sizes) for size in entry.shape]
                tensor = torch.empty(shape, dtype=getattr(torch, entry.dtype), device=self.whole.device)
                dist.recv(tensor, self.rank - self.mesh.tensor)
                fed[entry.name] = tensor
            outputs = self.part.executable.run(fed)
            if number in self._recorders:
                self._recorders[number].note(fed, outputs)
            cache.update(outputs)
            for name in self._sent:
                dist.send(outputs[name].contiguous().to(self.whole.device), self.rank + self.mesh.tensor)
            return {"logits": self._logits(outputs, batch, sequence)}

    def _logits(self, outputs: Mapping[str, torch.Tensor], batch: int, sequence: int) -> torch.Tensor:
        if self.last == 0:
            return outputs["logits"]
        if self.stage == self.last:
            logits = outputs["logits"].contiguous().to(self.whole.device)
        else:
            entry = next(entry for entry in self.whole.outputs if entry.name == "logits")
            shape = (batch, sequence, int(entry.shape[-1]))
            logits = torch.empty(shape, dtype=getattr(torch, entry.dtype), device=self.whole.device)
        dist.broadcast(logits, self.last * self.mesh.tensor)
        return logits


def _size(size: int | str, sizes: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    return math.prod(int(factor) if factor.isdecimal() else sizes[factor] for factor in size.split("*"))
