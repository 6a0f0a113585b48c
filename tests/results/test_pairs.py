"""Pairs in little memory are the pairs that were put in, also as a document."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from glassengine.cli.documents import json_pieces, write_json
from glassengine.results import Figures, Packed, Pair, counts_of
from glassengine.results.base import plain
from glassengine.results.pairs import tally_of

FIGURES = Figures(8, 8, 1e-7, 2e-7, 3e-7, math.inf, 1e-7, 1.0, math.nan, (3, 1), 3.1, 3.2, 0, 0, 1e-6, 1e-5)


def pairs(count: int) -> list[Pair]:
    verdicts = ("identical", "rounding", "wrong")
    return [
        Pair(i // 7, f"layer.{i % 7}\u202e", "é", "name", 1.0, verdicts[i % 3], "tolerance", FIGURES if i % 3 else None)
        for i in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 255, 256, 700])
def test_packed_pairs_are_those_that_were_put_in(count: int) -> None:
    given, packed = pairs(count), Packed()
    for pair in given:
        packed.append(pair)
    assert list(map(repr, packed)) == list(map(repr, given)) and len(packed) == count
    assert [repr(packed[i]) for i in reversed(range(count))] == [repr(pair) for pair in reversed(given)]
    assert repr(packed[2:5]) == repr(tuple(given[2:5]))
    assert packed.flagged() == [i for i, pair in enumerate(given) if pair.verdict == "wrong"]
    assert tally_of(packed) == tally_of(given)
    with pytest.raises(IndexError):
        packed[count]


def test_one_of_many_is_replaced() -> None:
    packed = Packed()
    for pair in pairs(300):
        packed.append(dataclasses.replace(pair, figures=None))
    packed[2] = dataclasses.replace(packed[2], verdict="rounding", inherited=True)
    known = list(packed)
    assert known[2].inherited and 2 not in packed.flagged() and packed == known
    numbers = {"unmatched_baseline": 0, "unmatched_candidate": 0, "not_recorded": 0}
    assert counts_of(packed, **numbers) == counts_of(known, **numbers)


def test_a_document_is_the_same_item_by_item(tmp_path: Path) -> None:
    packed = Packed()
    for pair in pairs(300):
        packed.append(pair)
    document = {"a": {"b": [1, "\u202e"]}, "none": Packed(), "pairs": packed, "c": math.inf}
    whole = json.dumps(plain(document), indent=2, ensure_ascii=False) + "\n"
    assert "".join(json_pieces(document)) == whole.replace("\u202e", "\\u202e")
    write_json(document, str(tmp_path / "x.json"))
    assert json.loads((tmp_path / "x.json").read_bytes()) == {"schema_version": 1, **plain(document)}
    assert max(map(len, json_pieces(document))) < 2000
