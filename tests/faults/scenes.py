"""What writes: each scene makes one thing in a folder, and `left` says what is wrong with what a fault has left there.

A scene is a user's program: what it does itself must go on to its end, where the document of the thing promises so.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import glassengine as glass
from glassengine import commands
from glassengine.recording import background as worker
from glassengine.recording.background import BackgroundWriter
from glassengine.recording.ring.ring import Flag

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
from kinds import X, small

STEPS = 3


@dataclass(frozen=True)
class Scene:
    """One thing that is written.

    Attributes:
        prepare: Makes what is needed beside it, in a folder without faults.
        run: Writes into the folder where calls fail; the second folder is the prepared one.
        left: Returns what is wrong with what is there, "" for nothing; the last argument says whether `run` ended well.
        before: Puts into the folder what `run` finds there.
        never_fails: Whether the thing may cost time but never raises.
        goes_on: Whether the user's program goes on after a fault, which is told when the thing ends.
        keeps: Pattern of temporary files that stay on purpose after an error, for whoever reads or writes there next.
        keeps_lasting: The same where nothing can be written any more.
        may_end: Pattern of calls, with their files, after which it ends with an error that others survive.
    """

    prepare: Callable[[Path], object]
    run: Callable[[Path, Path], object]
    left: Callable[[Path, Path, bool], str]
    before: Callable[[Path, Path], object] | None = None
    never_fails: bool = False
    goes_on: bool = False
    keeps: str = ""
    keeps_lasting: str = ""
    may_end: str = ""


def record(folder: Path, shared: Path, waits: bool = False) -> None:
    module = small()
    safe = 0
    recorder = glass.record(module, folder / "r", overwrite=True)
    with recorder:
        writer = recorder._writer
        assert writer is not None
        for step in range(STEPS):
            module(X + step)
            if waits:
                recorder.wait()
            # A forward that had ended before anything failed is there afterwards; without a ring on disk once it was
            # waited for.
            has_ring = writer._ring.file is not None
            safe += writer.failure is None and (has_ring or waits)
        # A fault of the recording is told when it ends; the program within goes on.
        (shared / "reached").write_text(str(safe))


def record_and_wait(folder: Path, shared: Path) -> None:
    record(folder, shared, waits=True)


def recorded(folder: Path, shared: Path, well: bool) -> str:
    safe = int((shared / "reached").read_text()) if (shared / "reached").exists() else 0
    if not (folder / "r" / "recording.json").exists():
        return "no recording found" if well or safe else ""
    if not (folder / "r" / "index.log").exists() and not well and not safe:
        return ""  # one that was to be replaced, and of which a file could not be taken away
    opened = glass.Recording.open(folder / "r")
    if well and (not opened.complete or len(opened.steps) != STEPS):
        return f"it ended well, with {opened.steps}, complete: {opened.complete}, {opened.incomplete_because}"
    if not well and opened.complete and safe:
        return "it is called complete, and its writer was told that it is not"
    if left := {path.name for path in (folder / "r").iterdir()} & {"ring.part", "ring.log", "recovered.part"}:
        return f"it was opened, and {left} are there"
    if opened.steps[:safe] != list(range(safe)):
        return f"of {safe} steps that had ended there are {opened.steps}: {opened.incomplete_because}"
    module = small()
    for step in opened.steps:
        if not torch.equal(opened.tensor("fc", step), module.fc(X + step)):
            return f"step {step} has other values"
    return ""


def killed(shared: Path) -> None:
    """A recording whose process was killed, with a small ring."""
    if (child := os.fork()) == 0:
        worker.RING_BYTES = 1 << 20
        BackgroundWriter.__init__.__kwdefaults__["ring_bytes"] = 1 << 20  # type: ignore[index]
        module = small()
        with glass.record(module, shared / "r") as recorder:
            module(X)
            recorder.wait()
            consumer = recorder._writer._consumer  # type: ignore[union-attr]
            consumer._wake = Flag()  # it sleeps from now on
            for step in range(1, STEPS):
                module(X + step)
            os._exit(0)
    os.waitpid(child, 0)


def copied(folder: Path, shared: Path) -> None:
    for path in shared.iterdir():
        if path.is_dir():
            shutil.copytree(path, folder / path.name)


def recover(folder: Path, shared: Path) -> None:
    opened = glass.Recording.open(folder / "r")
    if opened.steps != list(range(STEPS)):
        raise glass.GlassError("not all steps are there", got=str(opened.steps))


def recovered(folder: Path, shared: Path, well: bool) -> str:
    recover(folder, shared)
    return recorded(folder, shared, False)


def summarize(folder: Path, shared: Path) -> None:
    opened = glass.Recording.open(folder / "r")
    for entry in opened.entries:
        opened.summary(entry)
        opened.sketch(entry)


def not_summarized(folder: Path, shared: Path) -> None:
    copied(folder, shared)
    (folder / "r" / "statistics.log").unlink(missing_ok=True)


def summarized(folder: Path, shared: Path, well: bool) -> str:
    before, now = glass.Recording.open(shared / "r"), glass.Recording.open(folder / "r")
    for entry in now.entries:
        if now.summary(entry) != before.summary(entry) or now.sketch(entry) != before.sketch(entry):
            return f"other statistics of {entry.site}"
    return ""


def engine(backend: str) -> Callable[[Path, Path], object]:
    return lambda folder, shared: glass.build(
        small(), folder / "engine", backend=backend, inputs={"x": X}, overwrite=True
    )


def built(folder: Path, shared: Path, well: bool) -> str:
    if not (folder / "engine").exists():
        return "it ended well, and there is no engine" if well else ""
    if not well and not any((folder / "engine").iterdir()):
        return ""
    found = glass.load(str(folder / "engine")).forward(inputs={"x": X}).outputs
    (output,) = found.values()
    return "" if torch.allclose(output, small()(X), atol=1e-6) else "other values"


def built_anew(folder: Path, shared: Path, well: bool) -> str:
    if not (folder / "engine" / "engine.json").exists():
        return "the engine that was there is gone"
    return built(folder, shared, well)


def artifacts(folder: Path, shared: Path) -> None:
    glass.build(small(), shared / "engine", backend="eager", inputs={"x": X}, artifacts=folder / "a", overwrite=True)


def artifacts_written(folder: Path, shared: Path, well: bool) -> str:
    if not (folder / "a" / "manifest.json").exists():
        return "it ended well, and there are no artifacts" if well else ""
    try:
        commands.compare_artifacts(folder / "a", folder / "a")
    except glass.GlassError as error:
        # Of a build that failed there is what its manifest got to.
        return f"they cannot be compared: {error}" if well else ""
    return ""


def cache(folder: Path, shared: Path) -> None:
    import readers

    for _ in range(2):
        assert readers.use_cache(folder, shared) == 0


def cached(folder: Path, shared: Path, well: bool) -> str:
    import readers

    return "" if readers.use_cache(folder, shared) == 0 else "the cache cannot be used"


def export(format: str) -> Callable[[Path, Path], object]:
    ends = {"pt": "x.pt", "npz": "x.npz"}
    return lambda folder, shared: glass.export(
        shared / "r",
        folder / ends.get(format, "x"),
        format=format if format not in ends else None,  # type: ignore[arg-type]
    )


def exported(folder: Path, shared: Path, well: bool) -> str:
    files = [path for path in folder.rglob("*") if path.is_file()]
    if well and not files:
        return "it ended well, and nothing is there"
    for path in folder.iterdir():
        if path.is_dir() and not any(path.glob("[!.]*")):
            continue
        opened = glass.open(path)
        for entry in opened.entries:
            opened.tensor(entry)
    return ""


def one_recording(shared: Path) -> None:
    module = small()
    with glass.record(module, shared / "r"):
        module(X)


def one_engine(shared: Path) -> None:
    glass.build(small(), shared / "engine", backend="eager", inputs={"x": X}, overwrite=True)


def snapshots(folder: Path, shared: Path) -> None:
    loaded = glass.load(str(shared / "engine"))
    with glass.snapshots.take(folder / "s", contents="inputs outputs"):
        for step in range(2):
            loaded.forward(inputs={"x": X + step})
        (shared / "reached").write_text("2")


def snapshots_written(folder: Path, shared: Path, well: bool) -> str:
    if not (folder / "s").exists():
        return ""
    for path in (folder / "s").glob("[!.]*"):
        snapshot = glass.snapshots.Snapshot.open(path)
        snapshot.arguments()
    return ""


def pack(folder: Path, shared: Path) -> int:
    from glassengine.cli.main import main

    snapshot = next((shared / "s").iterdir())
    return main(["snapshot", "pack", str(snapshot), "-o", str(folder / "packed.safetensors")])


def packed(folder: Path, shared: Path, well: bool) -> str:
    if not (folder / "packed.safetensors").exists():
        return "it ended well, and nothing is there" if well else ""
    glass.snapshots.Snapshot.open(folder / "packed.safetensors").arguments()
    return ""


def one_snapshot(shared: Path) -> None:
    one_engine(shared)
    snapshots(shared, shared)


def profile(folder: Path, shared: Path) -> None:
    loaded = glass.load(str(shared / "engine"))
    with glass.profiler.profile(folder / "p"):
        loaded.forward(inputs={"x": X})
        (shared / "reached").write_text("1")


def profiled(folder: Path, shared: Path, well: bool) -> str:
    taken = list((folder / "p").glob("*/profile.json"))
    if not taken:
        return "it ended well, and there is no profile" if well else ""
    data = glass.profiler.read(folder / "p")[0].data
    levels = [data["flame"]]
    for level in levels:
        for name, entry in level.items():
            if not 0 <= entry["total_us"] <= 2 * data["wall_us"]:
                return f"{name} took {entry['total_us']} us of {data['wall_us']}"
            levels.append(entry["children"])
    return ""


def document(folder: Path, shared: Path) -> int:
    from glassengine.cli.main import main

    return main(["compare", str(shared / "r"), str(shared / "r"), "--json", str(folder / "c.json")])


def document_written(folder: Path, shared: Path, well: bool) -> str:
    import json

    path = folder / "c.json"
    if not path.exists():
        return "it ended well, and nothing is there" if well else ""
    json.loads(path.read_text())
    return ""


def nothing(shared: Path) -> None:
    """Need nothing."""


# Steps that could not be written, until it is opened; and those that were, in a file that could not be sealed.
RING, SHARD = r"^r/ring\.part$", r"^r/shard-\d+\.part$"
SCENES = {
    "record": Scene(nothing, record, recorded, goes_on=True, keeps=RING, keeps_lasting=SHARD),
    "record_and_wait": Scene(nothing, record_and_wait, recorded, goes_on=True, keeps=RING, keeps_lasting=SHARD),
    "record_again": Scene(
        one_recording, record, recorded, before=copied, goes_on=True, keeps=RING, keeps_lasting=SHARD
    ),
    "recover": Scene(killed, recover, recovered, before=copied, keeps=r"r/((recovered\.part/)?shard-\d+|ring)\.part"),
    "statistics": Scene(one_recording, summarize, summarized, before=not_summarized),
    "build": Scene(nothing, engine("eager"), built),
    "build_again": Scene(one_engine, engine("eager"), built_anew, before=copied),
    "build_onnxruntime": Scene(nothing, engine("onnxruntime"), built),
    "artifacts": Scene(nothing, artifacts, artifacts_written),
    "cache": Scene(nothing, cache, cached, never_fails=True),
    "export_pt": Scene(one_recording, export("pt"), exported),
    "export_npz": Scene(one_recording, export("npz"), exported),
    "export_tree": Scene(one_recording, export("debug-tree"), exported),
    "snapshots": Scene(one_engine, snapshots, snapshots_written, goes_on=True),
    "pack": Scene(one_snapshot, pack, packed),
    "profile": Scene(
        one_engine,
        profile,
        profiled,
        goes_on=True,
        # torch's profiler opens its file once, and takes its times from a clock that is set.
        may_end=r"^clock|^create .*/trace\.json\.tmp",
    ),
    "json": Scene(one_recording, document, document_written),
}
