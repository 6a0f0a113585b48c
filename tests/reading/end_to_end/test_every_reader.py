"""What instead of a file of ours: links, pipes, devices, large and damaged files, for each reader."""

from __future__ import annotations

import json
import os
import pickle
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glassengine.backends.onnx import backend as onnx_backend
from glassengine.backends.protocol.io import read_io
from glassengine.compare.matching.maps import load_map
from glassengine.engine.build.requests import read_requests
from glassengine.engine.files import load_weights
from glassengine.engine.manifest import read_manifest
from glassengine.engine.prompts import read_chat, read_input_ids, read_prompt_file
from glassengine.engine.run.generate import _from_file
from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.executable.counters import read_metrics
from glassengine.executable.profile_trace import read_profiles
from glassengine.plugins.tensorrt_rtx.backend import read_listing as read_network
from glassengine.program import load_inputs
from glassengine.program.loading.adapters import read_adapter
from glassengine.program.loading.checkpoint_files import read_tensors, weight_files
from glassengine.program.representation import artifacts
from glassengine.program.representation.listing import read_listing
from glassengine.program.representation.stored import load_graph, load_names
from glassengine.reading.tensors import MAX_UNFOLDED_BYTES, check_unfolded, read_torch
from glassengine.results.stored import read_result

Reader = Callable[[Path], Any]

OWNED: dict[str, tuple[str, Reader]] = {
    "engine": ("engine.json", read_manifest),
    "names": ("program.json", load_names),
    "graph": ("program.pt2", load_graph),
    "weights": ("weights.safetensors", lambda folder: load_weights(folder / "weights.safetensors")),
    "artifacts": ("manifest.json", artifacts.read_manifest),
    "listing": ("graph.json", lambda folder: read_listing(folder / "graph.json")),
    "io": ("io.json", read_io),
    "complex": ("complex.json", lambda folder: onnx_backend._with_complex(lambda inputs: {}, folder)),
    "network": ("network.json", read_network),
    "profile": ("profile.json", read_profiles),
}
"""Files of directories that a format owns: name -> what opens it, in a directory."""

GIVEN: dict[str, tuple[str, Reader]] = {
    "map": ("map.json", lambda folder: load_map(folder / "map.json")),
    "aliases": ("names.json", lambda folder: read_requests([f"@{folder / 'names.json'}"])),
    "chat": ("chat.json", lambda folder: read_chat(folder / "chat.json")),
    "prompts": ("prompts.txt", lambda folder: read_prompt_file(folder / "prompts.txt")),
    "ids": ("ids.json", lambda folder: read_input_ids(folder / "ids.json")),
    "settings": ("generation_config.json", lambda folder: _from_file(folder / "generation_config.json")),
    "metrics": ("report.txt", lambda folder: read_metrics(folder / "report.txt")),
    **{
        f"inputs{ending}": (f"inputs{ending}", lambda folder, ending=ending: load_inputs(f"{folder}/inputs{ending}"))  # type: ignore[misc]
        for ending in (".pt", ".npz", ".json", ".safetensors")
    },
    "index": ("model.safetensors.index.json", lambda folder: weight_files(str(folder))),
    "checkpoint": ("pytorch_model.bin", lambda folder: read_tensors([folder / "pytorch_model.bin"])),
    "adapter": ("adapter_config.json", read_adapter),
    "result": ("result.json", lambda folder: read_result(folder / "result.json", lambda _: lambda *_: None)),
}
"""Files that the user names, or that lie where he says and may be links."""

ALL = {**OWNED, **GIVEN}


@pytest.mark.parametrize("name", ALL)
def test_s6_no_reader_waits_for_a_pipe_or_reads_a_device(name: str, tmp_path: Path) -> None:
    file, read = ALL[name]
    for make in (os.mkfifo, lambda path: Path(path).symlink_to("/dev/zero"), os.mkdir):
        started = time.perf_counter()
        make(tmp_path / file)
        with pytest.raises(GlassError):
            read(tmp_path)
        assert time.perf_counter() - started < 60
        (tmp_path / file).rmdir() if make is os.mkdir else (tmp_path / file).unlink()


@pytest.mark.parametrize("name", OWNED)
def test_s7_no_reader_leaves_the_directory_of_its_format(name: str, tmp_path: Path) -> None:
    file, read = OWNED[name]
    outside = tmp_path / "outside"
    outside.write_text("{}")
    (tmp_path / "owned").mkdir()
    (tmp_path / "owned" / file).symlink_to(outside)
    with pytest.raises(CorruptError, match=r"not a plain file|cannot be read"):
        read(tmp_path / "owned")


@pytest.mark.parametrize("name", ALL)
def test_s4_no_reader_takes_the_memory_that_a_file_claims(name: str, tmp_path: Path) -> None:
    file, read = ALL[name]
    with (tmp_path / file).open("wb") as opened:
        opened.truncate(1 << 40)
    started = time.perf_counter()
    with pytest.raises(GlassError):
        read(tmp_path)
    assert time.perf_counter() - started < 60


HOSTILE = (
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"5",
    b"{",
    b"[" * 200_000,
    b'{"a":' * 200_000,
    b'{"schema_version": ' + b"9" * 5000 + b"}",
    b'{"schema_version": NaN, "format": Infinity}',
    b'{"schema_version": "1", "format": 5, "nodes": 3, "weight_map": [], "base_model_name_or_path": 7}',
    b'{"schema_version": 1, "format": "\\ud800"}',
    b'{"schema_version": 1, "format": "glass-profile", "weight_map": {"a": "\\u0000"}}',
)


@pytest.mark.parametrize("name", [name for name, (file, _) in ALL.items() if file.endswith((".json", ".txt"))])
def test_s11_no_document_ends_in_a_traceback(name: str, tmp_path: Path) -> None:
    file, read = ALL[name]
    for content in HOSTILE:
        (tmp_path / file).write_bytes(content)
        try:
            read(tmp_path)
        except GlassError as error:
            assert len(str(error)) < 4000  # what is left is a document that says little, or plain text


class Large:
    def __reduce__(self) -> Any:
        return bytearray, (3_500_000_000,)


def test_s4_a_pickle_does_not_fill_memory(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(tmp_path / "inputs.pt", "w") as bad:
        for member in good.infolist():
            data = pickle.dumps({"x": Large()}, 2) if member.filename.endswith(".pkl") else good.read(member)
            bad.writestr(member.filename, data)
    with pytest.raises(UsageError, match="a bytearray"):
        load_inputs(str(tmp_path / "inputs.pt"))
    # A name that only looks like it is one.
    torch.save({"bytearray of pixels": torch.ones(2)}, tmp_path / "named.pt")
    assert load_inputs(str(tmp_path / "named.pt"))[0]["bytearray of pixels"].sum() == 2
    torch.save({"x": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert load_inputs(str(tmp_path / "old.pt"))[0]["x"].sum() == 2
    old = (tmp_path / "old.pt").read_bytes()
    (tmp_path / "old.pt").write_bytes(old.replace(b"OrderedDict", b"bytearray\n."))
    with pytest.raises(GlassError):
        read_torch(tmp_path / "old.pt", old=True)


def test_s4_an_archive_of_zeros_is_not_unfolded(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "inputs.npz", x=np.arange(6.0).reshape(2, 3), y=np.array(5))
    assert load_inputs(str(tmp_path / "inputs.npz"))[0]["x"].shape == (2, 3)
    header = b"\x93NUMPY\x01\x00\x76\x00{'descr': '|u1', 'fortran_order': False, 'shape': (%d,), }" % (3 << 30)
    with (
        zipfile.ZipFile(tmp_path / "inputs.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as bad,
        bad.open("x.npy", "w", force_zip64=True) as member,
    ):
        member.write(header.ljust(127) + b"\n")
        for _ in range(MAX_UNFOLDED_BYTES // (1 << 24) + 1):
            member.write(bytes(1 << 24))
    with pytest.raises(UsageError, match="save them uncompressed"):
        load_inputs(str(tmp_path / "inputs.npz"))
    with zipfile.ZipFile(tmp_path / "inputs.npz", "w") as bad:
        bad.writestr("x.npy", header.ljust(127) + b"\n" + bytes(10))
    with pytest.raises(UsageError, match="claims 3,221,225,472 bytes"):
        load_inputs(str(tmp_path / "inputs.npz"))
    np.savez(tmp_path / "inputs.npz", x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(UsageError, match="would run code"):
        load_inputs(str(tmp_path / "inputs.npz"))


def test_s4_a_tensor_that_repeats_one_number_is_not_a_large_input(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1).expand(1 << 40)}, tmp_path / "inputs.pt")
    with pytest.raises(UsageError, match="repeats too much"):
        load_inputs(str(tmp_path / "inputs.pt"))
    nested: Any = torch.ones(1)
    for _ in range(70):
        nested = {"a": nested}
    with pytest.raises(CorruptError, match="nests too deeply"):
        check_unfolded(nested, "inputs.pt")
    torch.save({"x": torch.ones(1, 1).expand(64, 64), "pair": (torch.ones(1), [torch.ones(2)])}, tmp_path / "inputs.pt")
    assert load_inputs(str(tmp_path / "inputs.pt"))[0]["x"].shape == (64, 64)


def test_inputs_of_json_are_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "inputs.json"
    path.write_text(json.dumps([{"x": [[1, 2]], "scale": 0.5, "more": {"y": [float("nan")]}, "list": [{"z": [1]}]}]))
    (step,) = load_inputs(str(path))
    assert step["x"].tolist() == [[1, 2]] and step["scale"] == 0.5 and step["more"]["y"].isnan().all()
    assert step["list"][0]["z"].tolist() == [1]


def test_s7_a_profile_that_is_a_link_leads_out_of_the_directory_of_profiles(tmp_path: Path) -> None:
    summary = {"format": "glass-profile", "schema_version": 1, "wall_us": 1.0, "num_steps": 0, "kinds": {}, "paths": {}}
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "profile.json").write_text(json.dumps({**summary, "flame": {}, "steps_us": []}))
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "profile-000001").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptError, match="cannot be read"):
        read_profiles(tmp_path / "profiles")
    (tmp_path / "named").symlink_to(tmp_path / "elsewhere")  # a link that the user names is one that he wants
    assert read_profiles(tmp_path / "named")[0].data["num_steps"] == 0
