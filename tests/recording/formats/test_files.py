"""`.safetensors` files in a store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from glassengine.errors import CorruptError
from glassengine.recording.formats.files import SafetensorsObject
from glassengine.recording.source import open_source
from glassengine.stores import objects
from glassengine.stores import objects as ranges
from glassengine.stores.places import RemotePath

URL = "memory://dumps/a.safetensors"
TENSORS = {
    "whole": torch.arange(3_000_000, dtype=torch.float32),
    "half": torch.randn(3, 4).half(),
    "empty": torch.empty(0, 2),
    "one": torch.tensor(5),
}


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    from fsspec.implementations.memory import MemoryFileSystem

    ranges._blocks.cache_clear()
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    save_file(TENSORS, tmp_path / "a.safetensors", {"by": "me"})
    data = (tmp_path / "a.safetensors").read_bytes()
    objects.write(data, URL)
    return data


def test_the_tensors_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(URL)
    assert isinstance(source, SafetensorsObject) and str(source.path) == URL and source.metadata == {"by": "me"}
    asked: list[int] = []
    read = objects.read
    monkeypatch.setattr(objects, "read", lambda url, start, stop: asked.append(stop - start) or read(url, start, stop))
    for entry in source.entries:
        if entry.site != "whole":
            assert torch.equal(source.tensor(entry), TENSORS[entry.site])
    assert sum(asked) <= 2 * ranges.BLOCK_BYTES
    (whole,) = (entry for entry in source.entries if entry.site == "whole")
    assert torch.equal(source.tensor(whole), TENSORS["whole"])


def test_a_file_that_changes(stored: bytes) -> None:
    source = open_source(URL)
    objects.write(stored[:-4] + b"1234", URL)
    with pytest.raises(CorruptError, match="it was replaced"):
        source.tensor(source.entries[-1])


@pytest.mark.parametrize("size", [0, 5, 8, 300])
def test_a_file_that_is_cut(stored: bytes, size: int) -> None:
    objects.write(stored[:size], URL)
    with pytest.raises(CorruptError, match=r"memory://dumps/a\.safetensors"):
        SafetensorsObject(RemotePath(URL))


def test_a_header_that_lies(stored: bytes) -> None:
    objects.write((1 << 40).to_bytes(8, "little") + stored[8:], URL)
    with pytest.raises(CorruptError, match="does not fit"):
        SafetensorsObject(RemotePath(URL))
    objects.write(stored.replace(b'"whole":{"dtype":"F32"', b'"whole":{"dtype":"F64"'), URL)
    with pytest.raises(CorruptError, match="not a safetensors file"):
        SafetensorsObject(RemotePath(URL))
