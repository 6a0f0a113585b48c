"""Archives of numpy and files of torch: what they unfold to is bounded before memory is taken."""

from __future__ import annotations

import io
import resource
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glassengine.errors import CorruptError
from glassengine.reading import arrays, tensors
from glassengine.reading.arrays import MAX_UNFOLDED_BYTES, read_npz
from glassengine.reading.tensors import check_unfolded, read_torch


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def zeros(path: Path, num_bytes: int) -> Path:
    """Write a compressed archive of one array of zeros, which is never in memory."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (num_bytes,)})
    piece = bytes(1 << 20)
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("x.npy", "w", force_zip64=True) as file,
    ):
        file.write(header.getvalue())
        for begin in range(0, num_bytes, len(piece)):
            file.write(piece[: num_bytes - begin])
    return path


def test_s4_a_compressed_archive_above_the_bound_is_refused_before_it_unfolds(tmp_path: Path) -> None:
    path = zeros(tmp_path / "x.npz", MAX_UNFOLDED_BYTES)  # and its header is beyond
    assert path.stat().st_size < 8 << 20
    before = peak()
    with pytest.raises(CorruptError, match="unfold to"):
        read_npz(path)
    assert peak() - before < 64 << 20


def test_up_to_the_bound_it_unfolds_and_what_is_stored_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "MAX_UNFOLDED_BYTES", 1 << 20)
    header = 128
    assert read_npz(zeros(tmp_path / "most.npz", (1 << 20) - header))["x"].nbytes == (1 << 20) - header
    with pytest.raises(CorruptError, match="save them uncompressed"):
        read_npz(zeros(tmp_path / "more.npz", (1 << 20) - header + 1))
    np.savez(tmp_path / "stored.npz", x=np.zeros(3 << 20, np.uint8))
    assert read_npz(tmp_path / "stored.npz")["x"].nbytes == 3 << 20


def nested(num_values: int, depth: int = 1) -> Any:
    value: Any = [0] * num_values
    for _ in range(depth):
        value = {"a": value}
    return value


def test_s4_values_and_depth_of_a_file_are_bounded(tmp_path: Path) -> None:
    most = tensors._MAX_LEAVES - 2  # a dict and a list
    check_unfolded(nested(most), "x.pt")
    for bad in (nested(most + 1), nested(1, depth=tensors._MAX_DEPTH), [nested(most // 2)] * 3):
        with pytest.raises(CorruptError, match="nests too deeply or holds too much"):
            check_unfolded(bad, "x.pt")
    check_unfolded(nested(1, depth=tensors._MAX_DEPTH - 1), "x.pt")
    # One list that is named many times is one in the file, and 2^40 when it is walked.
    value: Any = [torch.ones(1)]
    for _ in range(40):
        value = [value, value]
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(CorruptError, match="nests too deeply or holds too much"):
        check_unfolded(read_torch(tmp_path / "x.pt"), "x.pt")
