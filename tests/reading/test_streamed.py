from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glassengine.errors import CorruptError
from glassengine.reading import streamed
from glassengine.reading.streamed import StreamedDocument

TEXT = st.text('ab 019"\\/{}[]:,\b\n\t\x00\x7f\xe9\u2028\U0001d11e')
"""What JSON writes in its own way, and letters of one to four bytes."""

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(-1e300, 1e300) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def opened(text: str | bytes, **more: Any) -> StreamedDocument:
    return StreamedDocument(io.BytesIO(text.encode() if isinstance(text, str) else text), "x.json", **more)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(TEXT, st.lists(VALUES, max_size=4), max_size=5), st.sampled_from([None, 1]), st.integers(1, 9))
def test_pieces_are_what_the_whole_is(document: dict[str, list[Any]], indent: int | None, block: int) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed, "_BLOCK", block)
        found = opened(text)
        assert {key: list(found.elements()) for key in found.members()} == document
        found.end()


def test_a_member_that_is_not_read_is_passed_over() -> None:
    found = opened('{"a": [1, {"b": 2}], "c": "d", "e": 5}')
    assert [key for key in found.members() if key != "c" or found.value() == "d"] == ["a", "c", "e"]
    found.end()


def test_objects_of_an_array_are_read_member_by_member() -> None:
    found = opened('{"many": [{"a": 1}, {"a": 2}]}')
    for _ in found.members():
        assert [[(key, one.value()) for key in one.members()] for one in found.objects()] == [[("a", 1)], [("a", 2)]]


@pytest.mark.parametrize(
    "text",
    ["", "[", '{"a"', '{"a": 1', '{"a": 1,}', '{"a": 1 "b"}', '{1: 2}', '{"a": [1,]}', '{"a": [1 2]}', '{"a": NaN}',
     '{"a": Infinity}', b'{"\xff": 1}', '{"a": ' + "[" * 100_000, '{"a": truth}', '{"a": [1}'],
)  # fmt: skip
def test_damage_is_an_error(text: str | bytes) -> None:
    with pytest.raises(CorruptError, match="damaged"):
        found = opened(text)
        for _ in found.members():
            if found.peek() == "[":
                list(found.elements())
        found.end()


def test_no_value_takes_more_memory_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "_BLOCK", 64)
    found = opened('{"a": "' + "x" * 9999 + '"}', most=1000)
    with pytest.raises(CorruptError, match="more than 1,000 characters"):
        list(found.members())
