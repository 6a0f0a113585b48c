"""Loads an engine of one process or of several ranks, which is to its user an engine like any other.

In a process of its own an engine of several ranks starts them on this machine; where torchrun has started as many
processes as it has ranks, each of them is one, and all run the same generation.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from glassengine import environment
from glassengine.engine import files
from glassengine.engine.manifest import Manifest, read_manifest, without_caches
from glassengine.engine.run.children import Children
from glassengine.engine.run.engine import Engine, open_engine, read_engine
from glassengine.engine.run.member import Member, join, mesh_of, part_of
from glassengine.engine.session.loaded import STEP_INPUTS
from glassengine.engine.session.record import tokens_of
from glassengine.engine.session.session import Session
from glassengine.errors import UsageError
from glassengine.executable.run.executable import Executable
from glassengine.program.parallel.placements import ShardPlacement, whole_of
from glassengine.results.engines import Generation
from glassengine.sites import SiteTable


def load(
    directory: str | Path, *, verify: bool = False, trust: bool = False, model: str | Path | None = None
) -> Engine:
    """Load an engine; one of several ranks starts them, or is one of them under torchrun.

    Args:
        directory: What `build` made.
        verify: Hash files of every size, not only small ones.
        trust: Load native code although this user did not build it here. It can do all that the user can.
        model: Where to take weights from that are not in the engine, as `build` takes it; None takes the checkpoint
            that the engine names, which must be a directory with a configuration and weights in safetensors.

    Raises:
        UsageError: There is no such directory, or it brings native code that is not trusted.
        CorruptError: It is damaged, half written, edited, or of a newer schema.
        BackendError: It was built for another processor or other versions; says which.
    """
    found = read_engine(directory, verify=verify)
    if found.manifest.mesh:
        return load_parallel(found.directory, found.manifest, found.names["sites"], trust=trust)
    return open_engine(found, trust=trust, model=model)


class ParallelEngine(Engine):
    """An engine whose steps run on several ranks, which keep the caches.

    `start` returns what runs a step; it is called when the first session is made.
    """

    def __init__(
        self, directory: Path, manifest: Manifest, sites: SiteTable, start: Callable[[], Children | Member]
    ) -> None:
        super().__init__(directory, without_caches(manifest), Executable(f"{manifest.name}/ranks", _no_session), sites)
        self._start = start
        self._numbers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    @functools.cached_property
    def ranks(self) -> Children | Member:
        """What runs a step: the processes of all ranks, or the part of this one."""
        return self._start()

    def runner(self, session: object, batch_size: int, length: int) -> Callable[..., Any]:
        """Return what runs a step on all ranks, which keep the caches until the session is gone."""
        number = self._numbers[session] = self.ranks.open(batch_size, length)
        weakref.finalize(session, self.ranks.close, number).atexit = False
        step = functools.partial(self.ranks.step, number)
        return Executable(self.executable.name, step, graph=self.executable.graph, backend=self.manifest.backend).run

    @contextlib.contextmanager
    def recorder(
        self, path: str | Path, session: Session, rows: Sequence[Sequence[int]], *, overwrite: bool
    ) -> Iterator[Callable[[Session], None]]:
        """Yield what records a step of `session` that just ran, each rank in `rank<r>` of the directory."""
        number = self._numbers[session]
        self.ranks.record(number, str(path), rows, overwrite)

        def end_step(session: Session) -> None:
            self.ranks.end_step(number, session.step, tokens_of(session, rows), session.read(STEP_INPUTS))

        try:
            yield end_step
        except BaseException as error:
            self.ranks.end_record(number, type(error).__name__)
            raise
        self.ranks.end_record(number, None)

    def generate(self, *prompts: Any, seed: int | None = None, **options: Any) -> Generation:
        """Generate as `Engine.generate` does; under torchrun all ranks take the seed of the first."""
        ranks = self.ranks
        return super().generate(*prompts, seed=ranks.agreed(seed) if isinstance(ranks, Member) else seed, **options)

    @functools.cached_property
    def _weights(self) -> dict[str, torch.Tensor]:
        """The weights of the whole program, put together from those of the ranks."""
        mesh, placements = mesh_of(self.manifest), self.manifest.placements
        weights: dict[str, torch.Tensor] = {}
        for stage in range(mesh.pipeline):
            own = range(stage * mesh.tensor, (stage + 1) * mesh.tensor)
            parts = [files.load_weights(part_of(self.directory, rank) / files.WEIGHTS) for rank in own]
            for name in parts[0].keys() - weights.keys():
                cut = placements.get(name)
                shards = [part[name] for part in parts]
                weights[name] = shards[0] if cut is None else whole_of(shards, ShardPlacement(cut.axis, cut.blocks))
        return weights


def _no_session(inputs: Any) -> Any:
    raise UsageError(
        "an engine of several ranks runs in sessions", hint="engine.generate(PROMPT) or engine.session(...)"
    )


def load_parallel(directory: Path, manifest: Manifest, sites: SiteTable, *, trust: bool) -> ParallelEngine:
    """Load an engine of several ranks: as one of them under torchrun, else with processes of its own.

    Raises:
        UsageError: torchrun has started another number of processes.
        BackendError: A rank could not start; names it.
    """
    mesh, here = mesh_of(manifest), environment.num_ranks()
    if here == 1:
        return ParallelEngine(directory, manifest, sites, lambda: Children(directory, mesh, trust=trust))
    if here != mesh.size:
        raise UsageError(
            f"the engine {manifest.name!r} has another number of ranks than this run",
            got=f"{here} processes" if here else "RANK without WORLD_SIZE",
            expected=f"{mesh.size}: {mesh}",
            hint=f"torchrun --nproc-per-node {mesh.size} -m glassengine run {directory}; or without torchrun",
        )
    return ParallelEngine(directory, manifest, sites, lambda: member_of(directory, trust=trust, rendezvous=None))


def member_of(directory: Path, *, trust: bool, rendezvous: str | None) -> Member:
    """Return what this process does as a rank of an engine; its part is loaded, and its groups are joined."""
    rank, manifest = environment.rank(), read_manifest(directory).manifest
    part = open_engine(read_engine(part_of(directory, rank)), trust=trust)
    join(mesh_of(manifest), rank, manifest.device, rendezvous)
    return Member(part, manifest, rank)
