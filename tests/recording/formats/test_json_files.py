"""JSON of others: long strings stay in the file, everything is bounded."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glassengine.errors import CorruptError
from glassengine.recording.formats import json_files as json_file
from glassengine.recording.formats.json_files import JsonFile, LongText

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=10), children, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(value=VALUES, ascii_only=st.booleans())
def test_a_json_file_is_read_as_written(value: Any, ascii_only: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("json") / "x.json"
    path.write_text(json.dumps(value, ensure_ascii=ascii_only), encoding="utf-8", errors="surrogatepass")
    assert JsonFile(path).document == value


def test_a_long_string_stays_in_the_file(tmp_path: Path) -> None:
    size = 20_000_000
    path = tmp_path / "x.json"
    path.write_text(json.dumps({'a"\\': ["short", "x" * size, 'quoted"\\' * 9000], "b": "y" * size}))
    tracemalloc.start()
    file = JsonFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    short, long, quoted = file.document['a"\\']
    assert short == "short" and isinstance(long, LongText) and long.num_bytes == size
    assert file.read(long, size - 3) == b"xxx" and file.read(long, 5, 2) == b"xx" and file.read(long, size) == b""
    assert json.loads(b'"' + file.read(quoted) + b'"') == 'quoted"\\' * 9000
    assert file.read(file.document["b"], 0, 4) == b"yyyy"


def test_a_document_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "MAX_BYTES", 1000)
    monkeypatch.setattr(json_file, "MAX_ITEMS", 50)
    (tmp_path / "x.json").write_text(json.dumps(["x" * 100] * 20))
    with pytest.raises(CorruptError, match="too large"):
        JsonFile(tmp_path / "x.json")
    (tmp_path / "x.json").write_text(json.dumps([1] * 60))
    with pytest.raises(CorruptError, match="too many items"):
        JsonFile(tmp_path / "x.json")
    (tmp_path / "x.json").write_text(json.dumps(["x" * 40_000] * 2))
    assert len(JsonFile(tmp_path / "x.json").document) == 2
