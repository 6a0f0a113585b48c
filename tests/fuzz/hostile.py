"""Opens files that somebody made to do harm, one after the other, and prints how each ended: one JSON object a line.

    python tests/fuzz/hostile.py [NUMBER OF RECORDS]

Address space is limited to 2 GiB beyond what is in use at the beginning, and each case to twenty seconds.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import resource
import struct
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import seeds
import torch
from fuzzer import MAX_SECONDS, begin_clock, exercise

from glassengine.errors import GlassError
from glassengine.recording.source import open_source

MAX_BYTES = 2 << 30
NAMES = ["../../x", "/etc/passwd", "nul\0nul", "\u202egpj.exe", "x" * 4096, "..", "con", "a\nb"]
CASES: dict[str, Callable[[Path, int], Path | None]] = {}


def case(make: Callable[[Path, int], Path | None]) -> Callable[[Path, int], Path | None]:
    CASES[make.__name__] = make
    return make


def frames(index: bytes) -> list[dict[str, Any]]:
    found, place = [], 0
    while place < len(index):
        length = int.from_bytes(index[place : place + 4], "little")
        found.append(document(index[place + 8 : place + 8 + length]))
        place += 8 + length
    return found


def document(payload: bytes) -> dict[str, Any]:
    """Return a payload as a document; blocks and commits may be either."""
    if payload.startswith(b"{"):
        return dict(json.loads(payload))
    kind, group, step, place, low, high = struct.unpack("<B3xIQQII", payload)
    if kind == 1:
        return {"kind": "block", "group": group, "step": step, "shard": low, "offset": place, "checksum": high}
    return {"kind": "commit", "step": step, "num_tensors": place, "num_left_out": low}


def framed(payloads: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> Iterator[bytes]:
    for payload in payloads:
        text = json.dumps(payload).encode()
        yield struct.pack("<II", len(text), zlib.crc32(text)) + text


def recording(folder: Path, change: Callable[[dict[str, Any]], None], *, complete: bool = False) -> Path:
    """A recording with every tensor record of its index changed; not complete, so that what is intact is read."""
    seeds.recording(folder)
    index = frames((folder / "index.log").read_bytes())
    for payload in index:
        if payload["kind"] in ("tensor", "block"):
            change(payload)
        for tensor in payload.get("tensors", []):
            change(tensor)
    (folder / "index.log").write_bytes(b"".join(framed(index)))
    if not complete:
        manifest = json.loads((folder / "recording.json").read_text())
        (folder / "recording.json").write_text(json.dumps({**manifest, "state": "incomplete"}))
    return folder


@case
def index_that_is_cut(folder: Path, records: int) -> Path:
    seeds.recording(folder)
    (folder / "index.log").write_bytes((folder / "index.log").read_bytes()[:-40])
    return folder


@case
def shard_that_is_cut(folder: Path, records: int) -> Path:
    seeds.recording(folder)
    shard = next(folder.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-70])
    return folder


@case
def offsets_that_overlap(folder: Path, records: int) -> Path:
    return recording(
        folder, lambda payload: payload.update(offset=64) if payload.get("offset", 0) > 64 else None, complete=True
    )


@case
def absurd_lengths(folder: Path, records: int) -> Path:
    return recording(folder, lambda payload: payload.update(shape=[2**40, 2**20], nbytes=2**62), complete=True)


@case
def absurd_offset(folder: Path, records: int) -> Path:
    return recording(
        folder, lambda payload: payload.update(offset=2**62) if "offset" in payload else None, complete=True
    )


@case
def checksum_that_does_not_match(folder: Path, records: int) -> Path:
    return recording(folder, lambda payload: payload.update(checksum=1) if "checksum" in payload else None)


@case
def record_of_two_gigabytes(folder: Path, records: int) -> Path:
    seeds.recording(folder)
    with (folder / "index.log").open("ab") as file:
        file.write(struct.pack("<II", 2**31, 0) + b"x" * 1000)
    return folder


@case
def index_of_many_records(folder: Path, records: int) -> Path:
    seeds.recording(folder)
    first = next(iter(frames((folder / "index.log").read_bytes())))
    tensor = dict(first["tensors"][0] if "tensors" in first else first)
    tensor.update(
        kind="tensor", step=7, rank=0, shape=[0], nbytes=0, dtype="float32", shard=0, offset=0, checksum=0, axes={}
    )
    many = ({**tensor, "site": f"s{number}"} for number in range(records))
    with (folder / "index.log").open("ab") as file:
        file.writelines(framed(many))
        file.writelines(framed([{"kind": "commit", "step": 7, "num_tensors": records, "num_left_out": 0}]))
    manifest = json.loads((folder / "recording.json").read_text())
    (folder / "recording.json").write_text(json.dumps({**manifest, "state": "incomplete"}))
    return folder


@case
def names_of_a_recording(folder: Path, records: int) -> Path:
    from glassengine.recording.write.writer import RecordingWriter

    with RecordingWriter(folder, metadata={}, overwrite=True) as writer:
        for name in NAMES:
            writer.write(name, 0, torch.ones(1))
        writer.commit(0)
    return folder


@case
def shards_that_are_links(folder: Path, records: int) -> Path:
    seeds.recording(folder)
    shard = next(folder.glob("shard-*"))
    shard.rename(folder.parent / "elsewhere")
    shard.symlink_to(folder.parent / "elsewhere")
    return folder


@case
def manifest_that_nests(folder: Path, records: int) -> Path:
    seeds.recording(folder)
    (folder / "recording.json").write_text('{"metadata": ' + "[" * 1_000_000)
    return folder


@case
def zip_bomb(folder: Path, records: int) -> Path:
    with (
        zipfile.ZipFile(folder / "f.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("a.npy", "w") as file,
    ):
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (2**28,)})
        file.write(head.getvalue())
        for _ in range(64):
            file.write(bytes(1 << 24))
    return folder / "f.npz"


@case
def zip_of_many_members(folder: Path, records: int) -> Path:
    with zipfile.ZipFile(folder / "f.npz", "w") as archive:
        for number in range(min(records, 120_000)):
            archive.writestr(f"{number}", b"")
    return folder / "f.npz"


@case
def zip_with_names_that_leave(folder: Path, records: int) -> Path:
    with zipfile.ZipFile(folder / "f.npz", "w") as archive:
        for name in NAMES:
            archive.writestr(f"{name}.npy", seeds.npy(np.ones(1)))
    return folder / "f.npz"


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


def with_pickle(path: Path, data: bytes) -> Path:
    content = {}
    with zipfile.ZipFile(io.BytesIO(seeds.torch_bytes({"a": seeds.X}))) as archive:
        content = {item.filename: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, member in content.items():
            archive.writestr(name, data if name.endswith("data.pkl") else member)
    return path


@case
def pickle_that_runs_code(folder: Path, records: int) -> Path:
    return with_pickle(folder / "f.pt", pickle.dumps(Evil(), protocol=2))


@case
def bare_pickle_that_runs_code(folder: Path, records: int) -> Path:
    (folder / "f.pt").write_bytes(pickle.dumps(Evil()))
    return folder / "f.pt"


@case
def object_array_that_runs_code(folder: Path, records: int) -> Path:
    np.save(folder / "f.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    return folder / "f.npy"


@case
def pickle_that_fills_memory(folder: Path, records: int) -> Path:
    return with_pickle(folder / "f.pt", b"\x80\x02}X\x01\0\0\0acbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x01\x85Rs.")


@case
def name_that_torch_searches_for_minutes(folder: Path, records: int) -> Path:
    return with_pickle(folder / "f.pt", b"\x80\x02c" + b"A" * 300_000 + b"\nx\n.")


@case
def pickle_that_unfolds(folder: Path, records: int) -> Path:
    level: Any = [torch.ones(1)]
    for _ in range(60):
        level = [level, level]
    torch.save(level, folder / "f.pt")
    return folder / "f.pt"


@case
def tensor_that_is_expanded(folder: Path, records: int) -> Path:
    torch.save({"x": torch.ones(1).expand(2**40)}, folder / "f.pt")
    return folder / "f.pt"


@case
def json_that_nests(folder: Path, records: int) -> Path:
    (folder / "f.json").write_text("[" * 10_000_000)
    return folder / "f.json"


@case
def json_of_many_items(folder: Path, records: int) -> Path:
    (folder / "f.json").write_text('{"module_path": "M", "outputs": [' + "[]," * 20_000_000 + "[]]}")
    return folder / "f.json"


@case
def json_string_without_end(folder: Path, records: int) -> Path:
    (folder / "f.json").write_text('["' + '\\"' * 20_000_000)
    return folder / "f.json"


@case
def debug_tree_that_leaves(folder: Path, records: int) -> Path:
    (folder.parent / "secret.safetensors").write_bytes(seeds.save({"data": seeds.X}))
    value = {"shape": "torch.Size([2, 3])", "dtype": "torch.float32"}
    paths = ["../secret.safetensors", "./../secret.safetensors", str(folder.parent / "secret.safetensors"), "nul\0", ""]
    (folder / "f.json").write_text(json.dumps({"module_path": "M", "outputs": [{**value, "value": p} for p in paths]}))
    return folder / "f.json"


@case
def debug_tree_with_a_link(folder: Path, records: int) -> Path:
    (folder.parent / "secret.safetensors").write_bytes(seeds.save({"data": seeds.X}))
    (folder / "data.safetensors").symlink_to(folder.parent / "secret.safetensors")
    value = {"shape": "torch.Size([2, 3])", "dtype": "torch.float32", "value": "./data.safetensors"}
    (folder / "f.json").write_text(json.dumps({"module_path": "M", "outputs": value}))
    return folder / "f.json"


@case
def printed_tensor_of_absurd_size(folder: Path, records: int) -> Path:
    value = {"shape": f"torch.Size([{2**50}])", "dtype": "torch.float32", "value": ["tensor([1., 2.])"]}
    (folder / "f.json").write_text(json.dumps({"module_path": "M", "outputs": value}))
    return folder / "f.json"


@case
def polygraphy_array_of_absurd_size(folder: Path, records: int) -> Path:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (2**50,)})
    array = {"array": base64.b64encode(head.getvalue()).decode(), "polygraphy_class": "ndarray"}
    (folder / "f.json").write_text(json.dumps([{"x": array}]))
    return folder / "f.json"


@case
def msprobe_that_leaves(folder: Path, records: int) -> Path:
    (folder.parent / "secret.pt").write_bytes(seeds.torch_bytes(seeds.X))
    one = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 3]}
    outputs = [
        {**one, "data_name": name}
        for name in ("../../secret.pt", str(folder.parent / "secret.pt"), "..", "x" * 4096 + ".pt")
    ]
    (folder / "dump_tensor_data").mkdir()
    (folder / "dump.json").write_text(
        json.dumps({"task": "tensor", "data": {"Module.m.M.forward.0": {"output": outputs}}})
    )
    return folder


@case
def safetensors_with_an_absurd_header(folder: Path, records: int) -> Path:
    (folder / "f.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    return folder / "f.safetensors"


@case
def pipe_instead_of_a_file(folder: Path, records: int) -> Path:
    import os

    os.mkfifo(folder / "f.json")
    return folder / "f.json"


def main() -> int:
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MAX_BYTES, in_use + MAX_BYTES))
    for name, make in CASES.items():
        with tempfile.TemporaryDirectory() as above:
            folder = Path(above) / "inside"
            folder.mkdir()
            path = make(folder, records)
            before = sorted(str(item) for item in Path(above).rglob("*"))
            began = time.monotonic()
            # A million records take longer than a hang is long.
            begin_clock(MAX_SECONDS if records <= 20_000 else 300)
            try:
                ended = exercise(path)
                skipped = sorted({item.reason for item in open_source(path).skipped}) if "tensors" in ended else []
            except GlassError as error:
                ended, skipped = type(error).__name__, []
            begin_clock(0)
            after = sorted(str(item) for item in Path(above).rglob("*"))
            seconds = time.monotonic() - began
            result = {"case": name, "ended": ended, "skipped": skipped, "seconds": round(seconds, 2)}
            result["new_files"] = [item for item in after if item not in before and "statistics" not in item]
            sys.stdout.write(json.dumps({**result, "ran": Path("ran").exists()}) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
