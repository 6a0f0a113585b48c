"""Documents are refused with the path of the field, whatever is wrong with them, and never by a traceback."""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glassengine.errors import CorruptError
from glassengine.reading import documents as streamed
from glassengine.reading.documents import MAX_DEPTH, Size, StreamedDocument, converted, parsed, read_document


class Place(msgspec.Struct):
    name: str
    shape: list[Size]


class Listing(msgspec.Struct):
    schema_version: int
    sites: list[Place] = []
    extra: dict[str, Any] = {}


GOOD = '{"schema_version": 1, "sites": [{"name": "a", "shape": [2, 3], "unknown": null}], "more": [{}]}'


def test_a_document_is_read_with_its_types(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(GOOD)
    found = read_document(tmp_path / "a.json", Listing, most=1000, inside=tmp_path, version=1)
    assert found == Listing(1, [Place("a", [2, 3])])
    assert parsed(b"\xef\xbb\xbf" + GOOD.encode(), Listing, "a") == found
    assert parsed(GOOD, Listing, "a", nonfinite=True, unique=True) == found


def test_the_field_is_named() -> None:
    with pytest.raises(CorruptError, match=r"(?s)the listing is damaged.*a\.json: .*\$\.sites\[0\]\.shape\[1\]"):
        parsed(GOOD.replace("3", '"3"'), Listing, "a.json", what="the listing")


@pytest.mark.parametrize("loose", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"schema_version": "1"}',
        '{"schema_version": true}',
        '{"schema_version": 1',
        '{"schema_version": 1, "sites": [{"name": "a", "shape": [-1]}]}',
        '{"schema_version": 1, "sites": [{"name": "a", "shape": [4611686018427387905]}]}',
        '{"schema_version": 1, "extra": {"a": "\\ud800"}}',
        '{"schema_version": 1, "extra": {"\\udc00": 1}}',
        '{"schema_version": 1, "extra": {"a": ' + "1" * 5000 + "}}",
        '{"schema_version": ' + "1" * 5000 + "}",
        '{"schema_version": 1, "extra": {"a": ' + "[" * 200 + "]" * 200 + "}}",
        '{"schema_version": 1, "extra": {"a": ' + "[" * 200_000,
        '{"schema_version": 1, "unknown": ' + '{"a":' * 200_000,
        '{"schema_version": 1} {}',
        "{'schema_version': 1}",
        '{"schema_version": 1}\0',
    ],
)
def test_s11_no_document_ends_in_a_traceback(text: str, loose: bool) -> None:
    with pytest.raises(CorruptError) as caught:
        parsed(text, Listing, "a.json", nonfinite=loose)
    assert len(str(caught.value)) < 1000


def test_bytes_that_are_no_text_and_texts_that_are_no_bytes() -> None:
    for data in (b'{"schema_version": 1, "extra": {"a": "\xff"}}', '{"schema_version": 1, "extra": {"a": "\ud800"}}'):
        for loose in (False, True):
            with pytest.raises(CorruptError):
                parsed(data, Listing, "a.json", nonfinite=loose)


def test_s11_what_is_no_number_is_one_only_where_others_write_it() -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        text = f'{{"schema_version": 1, "extra": {{"limit": {number}}}}}'
        for unique in (False, True):
            with pytest.raises(CorruptError):
                parsed(text, Listing, "a", unique=unique)
        assert not math.isfinite(parsed(text, Listing, "a", nonfinite=True).extra["limit"])


def test_a_version_from_the_future_comes_before_what_it_changed() -> None:
    with pytest.raises(CorruptError, match=r"(?s)newer version.*schema version 3.*at most 2"):
        parsed('{"schema_version": 3, "sites": 5}', Listing, "a", version=2)
    for wrong in ("0", "-1", "1.5", '"1"', "null"):
        with pytest.raises(CorruptError, match="schema_version"):
            parsed(f'{{"schema_version": {wrong}}}', Listing, "a", version=2)
    with pytest.raises(CorruptError, match="schema_version"):
        parsed("{}", Listing, "a", version=2)


def test_a_key_that_is_there_twice() -> None:
    text = '{"schema_version": 1, "extra": {"a": 1, "b": 2, "a": 3}}'
    assert parsed(text, Listing, "a").extra["a"] == 3
    with pytest.raises(CorruptError, match="'a' appears twice"):
        parsed(text, Listing, "a", unique=True)


def test_depth_is_counted_outside_of_texts() -> None:
    deep = "[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2)
    assert parsed(f'{{"schema_version": 1, "extra": {{"a": {deep}}}}}', Listing, "a").extra["a"]
    texts = "".join(f', "t{number}": "[[[[{{{{\\"[["' for number in range(60))
    assert parsed(f'{{"schema_version": 1{texts}}}', Listing, "a").schema_version == 1
    with pytest.raises(CorruptError, match="nests more than"):
        parsed(f'{{"schema_version": 1, "extra": {{"a": [{deep}]}}}}', Listing, "a")


@pytest.mark.parametrize(
    "text", ['"' + '\\"' * 500_000, "[" * 500 + '"' * 500_001, "[[]," * 200_000, '{"' + "\\" * 1_000_000]
)
def test_s4_the_time_grows_with_the_length_only(text: str) -> None:
    started = time.perf_counter()
    with pytest.raises(CorruptError):
        parsed("[" * 101 + text, Listing, "a")
    assert time.perf_counter() - started < 60


def test_values_at_hand_are_judged_alike() -> None:
    assert converted({"name": "a", "shape": [1]}, Place, "here") == Place("a", [1])
    with pytest.raises(CorruptError, match=r"\$\.shape"):
        converted({"name": "a", "shape": 1}, Place, "here")


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
