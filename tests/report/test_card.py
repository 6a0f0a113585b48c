"""A result as a picture for a link."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from glassengine.errors import UsageError
from glassengine.report.card import SIZE, write_card
from glassengine.results.notebook import verdict_rows
from tests.report.made_results import comparison

image = pytest.importorskip("PIL.Image")


def test_the_picture_has_the_size_of_a_link_and_the_color_of_the_verdict(tmp_path: Path) -> None:
    result = comparison()
    (tmp_path / "answer.json").write_text(json.dumps(result.to_dict()))
    written = write_card(tmp_path / "answer.json", tmp_path / "card.png")
    assert written.ok is result.ok and written.num_files == 1
    with image.open(tmp_path / "card.png") as picture:
        assert picture.size == SIZE
        assert len(picture.convert("RGB").crop((60, 40, 1140, 400)).getcolors(1 << 16)) > 2, "the words are drawn"


def test_the_map_has_the_worst_verdict_of_each_module() -> None:
    pair = comparison().pairs[0]
    made = [("layers.0/mul.0", "identical"), ("layers.0/add.0", "wrong"), ("layers.1/add.0", "rounding")]
    pairs = [dataclasses.replace(pair, site=site, verdict=verdict, step=0, level="x") for site, verdict in made]
    later = dataclasses.replace(pairs[0], step=3)
    other = dataclasses.replace(pairs[2], level="y", verdict="wrong")
    result = dataclasses.replace(comparison(), pairs=(*pairs, later, other), first_divergence=None)
    rows = verdict_rows(result)
    # Of the second module nothing was compared in the later step: it is not shown as right.
    assert rows == [[("layers.0", "wrong"), ("layers.1", "rounding")], [("layers.0", "identical"), ("layers.1", "")]]
    assert verdict_rows(dataclasses.replace(result, pairs=())) == []


def test_the_map_is_that_of_the_level_that_went_wrong() -> None:
    result = comparison()
    pair, first = result.pairs[0], result.first_divergence
    assert first is not None
    right = [dataclasses.replace(pair, site=f"{name}/add.0", verdict="identical", level="program") for name in "abc"]
    wrong = dataclasses.replace(pair, site="a/add.0", verdict="wrong", level="candidate")
    found = dataclasses.replace(first, level="candidate")
    result = dataclasses.replace(result, pairs=(*right, wrong), first_divergence=found)
    assert verdict_rows(result) == [[("a", "wrong")]]


def test_a_card_replaces_only_a_card(tmp_path: Path) -> None:
    (tmp_path / "answer.json").write_text(json.dumps(comparison().to_dict()))
    for _ in range(2):
        write_card(tmp_path / "answer.json", tmp_path / "new" / "card.png")
    (tmp_path / "photo.png").write_bytes(b"mine")
    with pytest.raises(UsageError, match="replaces only a card"):
        write_card(tmp_path / "answer.json", tmp_path / "photo.png")
    assert (tmp_path / "photo.png").read_bytes() == b"mine"


def test_another_document_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UsageError):
        write_card(tmp_path / "other.json", tmp_path / "card.png")
    assert not (tmp_path / "card.png").exists()
