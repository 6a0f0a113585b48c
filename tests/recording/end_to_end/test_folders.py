"""Directories of foreign files: steps, ranks, what is passed over, and what an attacker may leave in them."""

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import save_file

from glassengine.errors import CorruptError
from glassengine.recording.formats.folders import NpyFolder, StepFolder
from glassengine.recording.source import TensorSource, open_source


def keys(source: TensorSource) -> list[tuple[int, int, str]]:
    return [(entry.step, entry.rank, entry.site) for entry in source.entries]


def reasons(source: TensorSource) -> dict[str, str]:
    return {item.site: item.reason for item in source.skipped}


def save_steps(path: Path, steps: Mapping[int, torch.Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for step, tensor in steps.items():
        torch.save({"logits": tensor}, path / f"step{step}.pt")
    return path


def test_step_files(tmp_path: Path) -> None:
    steps = {step: torch.full((2, 3), float(step)) for step in (10, 9, 8)}
    save_steps(tmp_path, steps)
    save_steps(tmp_path / "rank1", {step: tensor + 0.5 for step, tensor in steps.items()})
    source = open_source(tmp_path)
    assert isinstance(source, StepFolder)
    assert keys(source) == [(step, rank, "logits") for step in (8, 9, 10) for rank in (0, 1)]
    for entry in source.entries:
        assert source.tensor(entry)[0, 0] == entry.step + 0.5 * entry.rank
    assert (source.complete, source.skipped) == (True, [])


def test_a_missing_step_makes_it_incomplete(tmp_path: Path) -> None:
    save_steps(tmp_path, {0: torch.ones(1), 1: torch.ones(1), 3: torch.ones(1)})
    assert not open_source(tmp_path).complete
    save_steps(tmp_path, {2: torch.ones(1)})
    assert open_source(tmp_path).complete
    save_steps(tmp_path / "rank1", {2: torch.ones(1)})
    assert not open_source(tmp_path).complete


def test_other_files_beside_step_files_are_listed(tmp_path: Path) -> None:
    save_steps(tmp_path, {0: torch.ones(1)})
    save_steps(tmp_path / "earlier-001", {5: torch.ones(1)})
    save_steps(tmp_path / "outside", {7: torch.ones(1)})
    (tmp_path / "step0.txt").write_text("logits")
    save_file({"logits": torch.zeros(1)}, tmp_path / "step0.safetensors")
    np.save(tmp_path / "logits-step0.npy", np.ones(1))
    np.save(tmp_path / "ids-step0.npy", np.ones(1))
    (tmp_path / "graph.txt").write_text("graph")
    (tmp_path / "step9.pt").symlink_to(tmp_path / "outside" / "step7.pt")
    (tmp_path / "rank3").symlink_to(tmp_path / "outside")
    os.mkfifo(tmp_path / "step8.pt")
    torch.save({"x": "text"}, tmp_path / "step1.pt")
    source = open_source(tmp_path)
    assert keys(source) == [(0, 0, "logits")]
    assert reasons(source) == {
        "graph.txt": "not a file of a step: step<i>.pt",
        "*.npy": "2 arrays of their own: where there are files of whole steps, those are read",
        "outside": "a directory of another kind",
        "rank3": "a link, which could leave the directory",
        "step0.safetensors": "step 0 is read from step0.pt",
        "step8.pt": "not a file of a step: step<i>.pt",
        "step9.pt": "a link, which could leave the directory",
        "x": "not a tensor: str",
    }


def test_a_step_file_that_is_cut_or_changes(tmp_path: Path) -> None:
    save_steps(tmp_path, {0: torch.ones(1000), 1: torch.ones(1000)})
    source = open_source(tmp_path)
    torch.save({"logits": torch.ones(3)}, tmp_path / "step0.pt")
    with pytest.raises(CorruptError, match=r"changed while it was being read(.|\n)*step0\.pt"):
        source.tensor(source.entries[0])
    (tmp_path / "step1.pt").write_bytes((tmp_path / "step1.pt").read_bytes()[:-100])
    with pytest.raises(CorruptError, match=r"step1\.pt"):
        open_source(tmp_path)


def test_one_step_file_is_open_at_a_time(tmp_path: Path) -> None:
    save_steps(tmp_path, {step: torch.ones(1) for step in range(200)})
    before = len(list(Path("/proc/self/fd").iterdir()))
    source = open_source(tmp_path)
    assert len(source.entries) == 200
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


def test_arrays_of_a_native_dump(tmp_path: Path) -> None:
    for rank, where in enumerate(("PP_0/TP_0", "PP_0/TP_1", "PP_1/TP_0", "PP_1/TP_1")):
        directory = tmp_path / "tllm_debug" / where
        directory.mkdir(parents=True)
        for step in (0, 10, 9):
            for name in ("layers.10.mlp", "layers.9.mlp"):
                np.save(directory / f"{name}-step{step}.npy", np.full(2, rank * 100 + step))
                (directory / f"{name}-step{step}.txt").write_text("1 2")
    source = open_source(tmp_path)
    assert isinstance(source, NpyFolder)
    names = ("layers.9.mlp", "layers.10.mlp")
    assert keys(source) == [(step, rank, name) for step in (0, 9, 10) for rank in range(4) for name in names]
    assert not source.skipped
    for entry in source.entries:
        assert source.tensor(entry).tolist() == [entry.rank * 100 + entry.step] * 2
    assert keys(open_source(tmp_path / "tllm_debug")) == keys(source)
    assert {rank for _, rank, _ in keys(open_source(tmp_path / "tllm_debug" / "PP_1"))} == {0, 1}


def test_arrays_of_the_executor_count_from_one(tmp_path: Path) -> None:
    for iteration in (1, 2):
        directory = tmp_path / "PP_1" / "TP_1" / f"iteration_{iteration}"
        directory.mkdir(parents=True)
        np.save(directory / "logits.npy", np.ones(1))
    assert keys(open_source(tmp_path)) == [(1, 0, "logits"), (2, 0, "logits")]


def test_files_that_are_no_array_are_listed(tmp_path: Path) -> None:
    np.save(tmp_path / "a-step1.npy", np.ones(1))
    np.save(tmp_path / "a-b-step12.npy", np.ones(1))
    np.save(tmp_path / "plain.npy", np.ones(1))
    np.save(tmp_path / "object-step0.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "a-step1.txt").write_text("1")
    (tmp_path / "notes.txt").write_text("1")
    (tmp_path / "sub").mkdir()
    (tmp_path / "earlier-002").mkdir()
    (tmp_path / "link-step0.npy").symlink_to(tmp_path / "plain.npy")
    source = open_source(tmp_path)
    assert keys(source) == [(0, 0, "plain"), (1, 0, "a"), (12, 0, "a-b")]
    assert reasons(source) == {
        "link-step0.npy": "a link, which could leave the directory",
        "notes.txt": "not an .npy file",
        "object-step0.npy": "an object array is a pickle, and reading it would run code",
        "sub": "a directory of another kind",
    }


def test_names_and_dtypes_beside_the_arrays_are_given_back(tmp_path: Path) -> None:
    np.save(tmp_path / "a.b-step0.npy", np.float32([1.5, 2.0]))
    np.save(tmp_path / "ids-step0.npy", np.int64([1]))
    names = {"a.b": {"name": "../a/b", "dtype": "bfloat16"}, "ids": {"name": "ids", "dtype": "bfloat16"}}
    (tmp_path / "npy-names.json").write_text(json.dumps({"schema_version": 1, "files": names}))
    source = open_source(tmp_path)
    assert [(entry.site, entry.dtype) for entry in source.entries] == [("../a/b", "bfloat16"), ("ids", "int64")]
    assert torch.equal(source.tensor(source.entries[0]), torch.tensor([1.5, 2.0], dtype=torch.bfloat16))
    assert source.tensor(source.entries[1]).tolist() == [1]
    assert not source.skipped


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 1, "files": {"a": 1}}', '{"schema_version": 2}'])
def test_names_that_are_damaged(tmp_path: Path, text: str) -> None:
    np.save(tmp_path / "a-step0.npy", np.ones(1))
    (tmp_path / "npy-names.json").write_text(text)
    with pytest.raises(CorruptError, match=r"npy-names\.json"):
        open_source(tmp_path)


@settings(max_examples=40, deadline=None)
@given(array=hnp.arrays(st.sampled_from(["<f4", ">f8", "<i2", "?", "<c8"]), hnp.array_shapes(min_dims=0, min_side=0)))
def test_an_npy_file_round_trips(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray) -> None:
    path = tmp_path_factory.mktemp("npy") / "x.npy"
    for written in (array, np.asfortranarray(array)):
        np.save(path, written)
        source = open_source(path)
        (entry,) = source.entries
        assert (entry.site, entry.step, entry.shape) == ("tensor", 0, written.shape)
        assert np.array_equal(source.tensor(entry).numpy(), written, equal_nan=array.dtype.kind in "fc")


def test_a_mapped_array_is_never_written_to(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    source = open_source(tmp_path / "x.npy")
    source.tensor(source.entries[0]).zero_()
    assert np.load(tmp_path / "x.npy").tolist() == [1, 1, 1]


def header(text: str, *, claimed: int | None = None, version: int = 2) -> bytes:
    data = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<I", claimed or len(data)) + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY\x01",
        b"PK\x03\x04",
        header("{'descr':'<f8','fortran_order':False,'shape':(4,)}") + bytes(31),
        header("{'descr':'<f8','fortran_order':False,'shape':(1099511627776,)}") + bytes(32),
        header("{'descr':'<f8','fortran_order':False,'shape':(-4,)}") + bytes(32),
        header("{'descr':'<f8','fortran_order':False,'shape':(4,)}", claimed=1 << 31) + bytes(32),
        header("{'descr':'<f8','fortran_order':False,'shape':(4,)}", version=9) + bytes(32),
        header("{'descr':__import__('os').abort(),'fortran_order':False,'shape':(4,)}") + bytes(32),
    ],
)
def test_hostile_arrays(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(CorruptError, match=r"x\.npy"):
        open_source(tmp_path / "x.npy")
    with pytest.raises(CorruptError, match=r"x\.npy"):
        open_source(tmp_path)
