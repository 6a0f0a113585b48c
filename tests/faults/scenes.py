"""What writes: each scene makes one thing in a folder, and `left` says what is wrong with what a fault has left there.

A scene is a user's program: what it does itself must go on to its end, where the document of the thing promises so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import glassengine as glass

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))

X = torch.arange(8, dtype=torch.float32).reshape(2, 4) / 8
STEPS = 3


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out(torch.relu(self.fc(x))))


def small() -> Small:
    torch.manual_seed(0)
    return Small().eval()


@dataclass(frozen=True)
class Scene:
    """One thing that is written.

    Attributes:
        prepare: Makes what is needed beside it, in a folder without faults.
        run: Writes into the folder where calls fail; the second folder is the prepared one.
        left: Returns what is wrong with what is there, "" for nothing; the last argument says whether `run` ended well.
        never_fails: Whether the thing may cost time but never raises.
    """

    prepare: Callable[[Path], object]
    run: Callable[[Path, Path], object]
    left: Callable[[Path, Path, bool], str]
    never_fails: bool = False


def record(folder: Path, shared: Path) -> None:
    module = small()
    done = 0
    with glass.record(module, folder / "r"):
        for step in range(STEPS):
            module(X + step)
            done += 1
        # A fault of the recording is told when it ends; the program within goes on.
        (shared / "reached").write_text(str(done))


def recorded(folder: Path, shared: Path, well: bool) -> str:
    if not (folder / "r" / "recording.json").exists():
        return "it ended well, and there is no recording" if well else ""
    opened = glass.Recording.open(folder / "r")
    if well and (not opened.complete or len(opened.steps) != STEPS):
        return f"it ended well, with {opened.steps}, complete: {opened.complete}, {opened.incomplete_because}"
    module = small()
    for step in opened.steps:
        if not torch.equal(opened.tensor("fc", step), module.fc(X + step)):
            return f"step {step} has other values"
    return ""


def engine(backend: str) -> Callable[[Path, Path], object]:
    return lambda folder, shared: glass.build(small(), folder / "engine", backend=backend, inputs={"x": X})


def built(folder: Path, shared: Path, well: bool) -> str:
    if not (folder / "engine").exists():
        return "it ended well, and there is no engine" if well else ""
    if not well and not any((folder / "engine").iterdir()):
        return ""
    found = glass.load(str(folder / "engine")).forward(inputs={"x": X}).outputs
    (output,) = found.values()
    return "" if torch.allclose(output, small()(X), atol=1e-6) else "other values"


def artifacts(folder: Path, shared: Path) -> None:
    glass.build(small(), shared / "engine", backend="eager", inputs={"x": X}, artifacts=folder / "a", overwrite=True)


def artifacts_written(folder: Path, shared: Path, well: bool) -> str:
    if not (folder / "a" / "manifest.json").exists():
        return "it ended well, and there are no artifacts" if well else ""
    glass.compare_artifacts(folder / "a", folder / "a")
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
        if path.is_dir() and not any(path.iterdir()):
            continue
        opened = glass.open_dump(path)
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
    with glass.snapshots(folder / "s", contents="inputs outputs"):
        for step in range(2):
            loaded.forward(inputs={"x": X + step})
        (shared / "reached").write_text("2")


def snapshots_written(folder: Path, shared: Path, well: bool) -> str:
    if not (folder / "s").exists():
        return ""
    for path in (folder / "s").iterdir():
        snapshot = glass.Snapshot.open(path)
        snapshot.arguments()
    return ""


def pack(folder: Path, shared: Path) -> int:
    from glassengine.cli.main import main

    snapshot = next((shared / "s").iterdir())
    return main(["snapshot", "pack", str(snapshot), "-o", str(folder / "packed.safetensors")])


def packed(folder: Path, shared: Path, well: bool) -> str:
    if not (folder / "packed.safetensors").exists():
        return "it ended well, and nothing is there" if well else ""
    glass.Snapshot.open(folder / "packed.safetensors").arguments()
    return ""


def one_snapshot(shared: Path) -> None:
    one_engine(shared)
    snapshots(shared, shared)


def profile(folder: Path, shared: Path) -> None:
    loaded = glass.load(str(shared / "engine"))
    with glass.profile(folder / "p"):
        loaded.forward(inputs={"x": X})
        (shared / "reached").write_text("1")


def profiled(folder: Path, shared: Path, well: bool) -> str:
    if not (folder / "p").exists():
        return ""
    if any((folder / "p").iterdir()):
        glass.read_profiles(folder / "p")
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


SCENES = {
    "record": Scene(nothing, record, recorded),
    "build": Scene(nothing, engine("eager"), built),
    "build_onnxruntime": Scene(nothing, engine("onnxruntime"), built),
    "artifacts": Scene(nothing, artifacts, artifacts_written),
    "cache": Scene(nothing, cache, cached, never_fails=True),
    "export_pt": Scene(one_recording, export("pt"), exported),
    "export_npz": Scene(one_recording, export("npz"), exported),
    "export_tree": Scene(one_recording, export("debug-tree"), exported),
    "snapshots": Scene(one_engine, snapshots, snapshots_written),
    "pack": Scene(one_snapshot, pack, packed),
    "profile": Scene(one_engine, profile, profiled),
    "json": Scene(one_recording, document, document_written),
}
