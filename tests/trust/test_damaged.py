"""Files that claim what no tensor can be, and attributes that hide methods: refused, or the values that they have."""

from __future__ import annotations

import collections
import io
import json
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glassengine.cli.main import main
from glassengine.errors import CorruptError
from glassengine.executable.counters import parse_metrics, read_metrics
from glassengine.reading.tensors import read_header, read_npz, read_torch, shape_from
from glassengine.recording.layout.layout import shard_name
from glassengine.recording.layout.records import entry_from, left_out_from
from glassengine.recording.source import open_source
from glassengine.recording.write.writer import RecordingWriter

SHAPES = {
    "product": (0, 1 << 62, 1 << 62),
    "product behind": (1 << 40, 1 << 40, 0),
    "dimensions": (1,) * 65,
    "no dimensions left": (0,) * 200,
    "truth": (True, 6),
    "digits": (0, 10**4299),
    "size": (0, 1 << 63),
    "negative": (-1, 0),
}


def npy(shape: tuple[int, ...]) -> bytes:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    sys.set_int_max_str_digits(limit)
    held = 24 if shape == (True, 6) else 4 if shape == (1,) * 65 else 0
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + bytes(held)


@pytest.mark.parametrize("name", SHAPES)
def test_s19_shapes_that_no_tensor_has(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = npy(SHAPES[name])
    with pytest.raises(ValueError, match=r"shape|header"):
        read_header(io.BytesIO(data))
    (tmp_path / "a.npy").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", data)
    with pytest.raises(CorruptError):
        read_npz(tmp_path / "a.npz")
    np.save(tmp_path / "b.npy", np.ones(3, dtype=np.float32))
    for file in ("a.npy", "a.npz"):
        assert main(["compare", str(tmp_path / file), str(tmp_path / "b.npy")]) in (2, 4), capsys.readouterr().err
    record = {"site": "a", "step": 0, "rank": 0, "dtype": "float32", "axes": {}, "shape": list(SHAPES[name])}
    for read in (entry_from, left_out_from):
        with pytest.raises(ValueError, match="shape"):
            read({**record, "nbytes": 0, "reason": "none", "shard": 0, "offset": 0, "checksum": 0})


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,) * 64, (1 << 40, 0), (2, 3)])
def test_s19_unusual_shapes_are_shapes(shape: tuple[int, ...], tmp_path: Path) -> None:
    assert shape_from(list(shape)) == shape
    if np.prod(shape) < 100:
        np.save(tmp_path / "a.npy", np.ones(shape, dtype=np.float32))
        assert open_source(tmp_path / "a.npy").entries[0].shape == shape


def test_s19_a_safetensors_file_that_claims_too_much(tmp_path: Path) -> None:
    for shape in SHAPES["product"], SHAPES["dimensions"]:
        size = 0 if 0 in shape else 4
        header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
        with pytest.raises(CorruptError):
            open_source(tmp_path / "a.safetensors")


@pytest.mark.parametrize("claimed", [1 << 63, (1 << 63) - 1, (1 << 64) - 1, 1 << 62, 1 << 32])
def test_s19_a_shard_whose_header_is_longer_than_the_file(claimed: int, tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", metadata={}) as writer:
        writer.write("a", 0, torch.ones(3))
        writer.commit(0)
    shard = tmp_path / "r" / shard_name(0, sealed=True)
    data = shard.read_bytes()
    shard.write_bytes(struct.pack("<Q", claimed) + data[8:])
    with pytest.raises(CorruptError, match="not on file"):
        open_source(tmp_path / "r")
    shard.write_bytes(data)
    assert torch.equal(open_source(tmp_path / "r").tensor(open_source(tmp_path / "r").entries[0]), torch.ones(3))


class Hooked:
    """A tensor that is saved with hooks, as torch's own function takes them."""

    def __init__(self, hooks: Any) -> None:
        self.hooks = hooks

    def __reduce__(self) -> tuple[Any, ...]:
        storage = torch.storage.TypedStorage(
            wrap_storage=torch.ones(2).untyped_storage(), dtype=torch.float32, _internal=True
        )
        return torch._utils._rebuild_tensor_v2, (storage, 0, (2,), (1,), True, self.hooks)


def with_attribute(value: Any, name: str) -> Any:
    vars(value)[name] = 5
    return value


def ordered(name: str) -> Callable[[], Any]:
    class Ordered(collections.OrderedDict[str, Any]):
        def __reduce__(self) -> tuple[Any, ...]:
            return collections.OrderedDict, (), {name: 5}, None, iter([("a", torch.ones(2))])

    return lambda: Ordered(a=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"a": with_attribute(torch.ones(2), "numel")},
        lambda: {"a": with_attribute(torch.ones(2), "detach")},
        lambda: {"a": [with_attribute(torch.nn.Parameter(torch.ones(2)), "element_size")]},
        lambda: (with_attribute(torch.nn.Parameter(torch.ones(2)), "untyped_storage"),),
        lambda: {"a": Hooked(collections.OrderedDict({0: torch.Size([1])}))},
        ordered("items"),
        ordered("values"),
        ordered("keys"),
    ],
)
def test_s19_attributes_hide_no_methods(make: Callable[[], Any], tmp_path: Path) -> None:
    torch.save(make(), tmp_path / "a.pt")
    source = open_source(tmp_path / "a.pt")
    (entry,) = source.entries
    found = source.tensor(entry)
    assert entry.shape == (2,) and torch.equal(found.detach(), torch.ones(2)) and not found._backward_hooks
    value = torch.nn.Parameter(torch.arange(3.0))
    torch.save({"a": value, "b": [collections.OrderedDict(c=value)]}, tmp_path / "b.pt")
    plain = read_torch(tmp_path / "b.pt")
    assert isinstance(plain["a"], torch.nn.Parameter) and plain["b"][0]["c"] is plain["a"]


REPORT = "Metric: T\n  TotalSamples: 1\n  Accumulator: {}\n  Percentiles: 50%={}\nCounter: C\n  Value: 3\n"


@pytest.mark.parametrize("text", ["1e999us", "9" * 400 + "us", "9" * 400 + "KB", "1e999", "nan", "9" * 5000, "1e999%"])
def test_s19_numbers_of_a_report_of_metrics(text: str, tmp_path: Path) -> None:
    for given in (REPORT.format(text, "1"), REPORT.format("1", text)):
        with pytest.raises(CorruptError):
            parse_metrics(given)
    assert str(parse_metrics(REPORT.format("01s023ms004.567us", "1.50us")))


@pytest.mark.parametrize("value", ["1e999", "-1e999", "NaN", '"x"', "[]", "1" + "0" * 400])
@pytest.mark.parametrize("key", ["accumulator", "rate", "total_samples", "percentiles"])
def test_s19_numbers_of_a_report_as_json(key: str, value: str, tmp_path: Path) -> None:
    report = parse_metrics(REPORT.format("01s023ms004.567us", "1.50us")).to_dict()
    assert str(read_metrics(json.dumps(report)))
    report["metrics"][0][key] = {"50": "HERE"} if key == "percentiles" else "HERE"
    with pytest.raises(CorruptError):
        read_metrics(json.dumps(report).replace('"HERE"', value))
