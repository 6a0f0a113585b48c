"""Loads an engine of one process, or of several ranks as processes: to its user it is an engine like any other.

In a process of its own an engine of several ranks starts them on this machine; where torchrun has started as many
processes as it has ranks, each of them is one, and all run the same generation.

They are given everything through a connection that closes when this process ends, however it ends; then they end, too.
A message is a JSON document, and tensors as safetensors. Ranks do not hear Ctrl-C of the terminal themselves. When one
of them fails, all are ended, and the error names it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import select
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save

from glassengine import environment, starting
from glassengine.engine import files
from glassengine.engine.manifest import Manifest, read_manifest, without_caches
from glassengine.engine.run.engine import Engine, open_engine, read_engine
from glassengine.engine.run.member import Member, join, mesh_of, part_of
from glassengine.engine.session.loaded import STEP_INPUTS
from glassengine.engine.session.record import tokens_of
from glassengine.engine.session.session import Session
from glassengine.errors import BackendError, GlassError, UsageError
from glassengine.executable.run.executable import Executable
from glassengine.program.parallel.placements import Mesh, ShardPlacement, whole_of
from glassengine.reading.files import open_regular, printable
from glassengine.results.engines import Generation
from glassengine.sites import SiteTable
from glassengine.stores.places import place

_GRACE_S = 2.0
_MOST_WORDS = 2000
MODULE = "glassengine.engine.run.rank"
Message = tuple[dict[str, Any], dict[str, torch.Tensor]]
"""A JSON document, and tensors."""
_HEAD = struct.Struct("<QQ")
_MOST_JSON, _MOST_DATA = 1 << 20, 1 << 40
# Memory is taken as bytes come, not as a message says: twice of it at most, and this.
_PIECE = 1 << 20


class Children:
    """The ranks of an engine, each a process.

    Raises:
        BackendError: A rank could not start; names it.
    """

    def __init__(self, directory: Path, mesh: Mesh, *, trust: bool) -> None:
        self.mesh = mesh
        self._folder = Path(tempfile.mkdtemp(prefix="glassengine-ranks-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._ended = False
        self.stop = weakref.finalize(self, _end, self._processes, self._connections, self._folder)
        for rank in range(mesh.size):
            ours, theirs = socket.socketpair()
            with theirs, (self._folder / f"{rank}.err").open("wb") as words:
                self._connections.append(ours)
                self._processes.append(
                    starting.start(
                        starting.python(MODULE, str(theirs.fileno())),
                        pass_fds=(theirs.fileno(),),
                        env=starting.surroundings(environment.of_rank(rank, mesh.size)),
                        stdin=subprocess.DEVNULL,
                        stdout=words,
                        stderr=words,
                        start_new_session=True,
                    )
                )
        meeting = str(self._folder / "meeting")
        self._call("join", directory=str(directory.absolute()), trust=trust, rendezvous=meeting)

    def open(self, batch_size: int, length: int) -> int:
        """Begin a session; return its number."""
        document, _ = self._call("open", of_first=True, batch_size=batch_size, length=length)
        return int(document["number"])

    def record(self, number: int, path: str, rows: Sequence[Sequence[int]], overwrite: bool) -> None:
        """Record the steps of a session from now on, each rank into `rank<r>` of a directory.

        Raises:
            BackendError: A rank cannot; names it.
        """
        path = str(place(path).absolute())
        self._call("record", number=number, path=path, rows=[list(row) for row in rows], overwrite=overwrite)

    def end_step(
        self, number: int, step: int, tokens: Sequence[Sequence[int]], given: Mapping[str, torch.Tensor]
    ) -> None:
        """Have all ranks record what they made since the last step; see `Member.end_step`."""
        self._call("end_step", given, number=number, step=step, tokens=[list(row) for row in tokens])

    def end_record(self, number: int, failed: str | None) -> None:
        """End the recordings of a session; nothing where the ranks have ended already."""
        if not self._ended and self.stop.alive:
            self._call("end_record", number=number, failed=failed)

    def close(self, number: int) -> None:
        """End a session; nothing where the ranks have ended already."""
        if not self._ended and self.stop.alive:
            with contextlib.suppress(OSError):
                for connection in self._connections:
                    send(connection, {"do": "close", "number": number})

    def step(self, number: int, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one step of a session on all ranks; return its logits.

        Raises:
            BackendError: A rank failed; names it.
        """
        try:
            return self._call("step", inputs, of_first=True, number=number)[1]
        except BaseException:
            # Ranks in the middle of a step would answer the next question with this one's answer.
            self._ended = True
            self.stop()
            raise

    def _call(
        self, do: str, tensors: Mapping[str, torch.Tensor] | None = None, *, of_first: bool = False, **arguments: Any
    ) -> Message:
        """Let all ranks do something; return the answer of the first one, once it or all of them have answered."""
        if self._ended:
            raise BackendError("the ranks of this engine have ended", hint="load it again")
        for rank, connection in enumerate(self._connections):
            try:
                send(connection, {"do": do, **arguments}, tensors)
            except OSError:
                self._fail(rank, None)
        waiting: set[int] = {0} if of_first else set(range(self.mesh.size))
        answers: dict[int, Message] = {}
        while waiting:
            ready, _, _ = select.select(self._connections, [], [])
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    message = receive(connection)
                except OSError:
                    message = None
                if message is None or "error" in message[0]:
                    self._fail(rank, message and message[0]["error"])
                answers[rank] = message
                waiting.discard(rank)
        return answers[0]

    def _fail(self, rank: int, error: Mapping[str, Any] | None) -> NoReturn:
        """End all ranks, and raise what the first one that failed says or left behind.

        Raises:
            BackendError: Always.
        """
        # The others lose their peer and fail, too; their messages may be read first.
        time.sleep(0.2)
        ended = [number for number, process in enumerate(self._processes) if process.poll() not in (None, 0)]
        errors = {} if error is None else {rank: error}
        for connection in select.select(self._connections, [], [], 0)[0]:
            with contextlib.suppress(OSError):
                message = receive(connection)
                if message is not None and "error" in message[0]:
                    errors.setdefault(self._connections.index(connection), message[0]["error"])
        silent = [number for number in ended if number not in errors]
        rank = silent[0] if silent else min(errors, key=lambda number: float(errors[number]["at"]), default=rank)
        status = self._processes[rank].poll()
        words = _last_words(self._folder / f"{rank}.err")
        self._ended = True
        self.stop()
        if first := errors.get(rank):
            raise BackendError(f"rank {rank}: {first['what']}", got=first["got"], hint=first["hint"] or None)
        how = f"killed by signal {-status}" if status is not None and status < 0 else f"exit status {status}"
        last = printable(words.splitlines()[-1]) if words else "no message"
        raise BackendError(
            f"rank {rank} of the engine ended", got=f"{how}: {last}", hint="all other ranks were ended, too"
        )


def _last_words(path: Path) -> str:
    """Return the end of what a rank has printed, which can be any amount; nothing where that cannot be read."""
    with contextlib.suppress(OSError, GlassError), open_regular(path, inside=path.parent) as file:
        file.seek(max(path.stat().st_size - _MOST_WORDS, 0))
        return file.read(_MOST_WORDS).decode(errors="replace").strip()
    return ""


def _end(processes: list[subprocess.Popen[bytes]], connections: list[socket.socket], folder: Path) -> None:
    for connection in connections:
        connection.close()
    until = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(max(until - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def send(
    connection: socket.socket, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Send one message.

    Raises:
        OSError: The other side is gone.
    """
    text = json.dumps(document).encode()
    data = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}) if tensors else b""
    connection.sendall(_HEAD.pack(len(text), len(data)) + text)
    connection.sendall(data)


def receive(connection: socket.socket) -> Message | None:
    """Return the next message; None where the other side has closed the connection.

    Raises:
        OSError: The connection broke, or something else than a message came.
    """
    head = _exactly(connection, _HEAD.size)
    if head is None:
        return None
    text_size, data_size = _HEAD.unpack(head)
    if text_size > _MOST_JSON or data_size > _MOST_DATA:
        raise OSError("a message of a rank has an impossible size")
    text, data = _exactly(connection, text_size), _exactly(connection, data_size)
    if text is None or data is None:
        return None
    try:
        document = json.loads(text)
        if not isinstance(document, dict):
            raise TypeError("not an object")
        return document, load_tensors(bytes(data)) if data else {}
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise OSError(f"a message of a rank is damaged: {error}") from error


def _exactly(connection: socket.socket, size: int) -> bytearray | None:
    found, done = bytearray(), 0
    while done < size:
        if done == len(found):
            found.extend(bytes(min(size - done, max(done, _PIECE))))
        with memoryview(found) as view, view[done:] as rest:
            count = connection.recv_into(rest)
        if not count:
            return None
        done += count
    return found


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
