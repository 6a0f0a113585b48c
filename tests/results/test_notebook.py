"""What notebooks show: small, inert, and data frames and plots by packages that may be missing."""

from __future__ import annotations

import dataclasses
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.errors import UsageError
from glassengine.results import Comparison, Hint

HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(1)>\x1b[2J\u202e$x_{'


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: list[Any] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, "every tag is closed"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.add(tag)
        self.attributes += attrs
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def inert(text: str) -> None:
    tags = Tags(text)
    assert tags.found <= {"div", "strong", "table", "tr", "th", "td", "p", "svg", "rect", "title"}
    assert {name for name, _ in tags.attributes} <= {"x", "y", "width", "height", "fill", "role", "aria-label"}
    assert len(text) < 20_000 and "\x1b" not in text and "\u202e" not in text


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("dumps")
    left = {f"layers.{place}": torch.ones(4) * (place + 1) for place in range(40)}
    right = {name: tensor * (1.5 if place > 30 else 1) for place, (name, tensor) in enumerate(left.items())}
    torch.save({HOSTILE: torch.ones(2), **left}, folder / "one.pt")
    torch.save({HOSTILE: torch.full((2,), float("nan")), **right}, folder / "two.pt")
    return glass.compare(folder / "one.pt", folder / "two.pt")


def test_the_card_of_a_comparison_is_small_and_inert(found: Comparison) -> None:
    first = found.first_divergence
    assert first is not None
    evil = dataclasses.replace(first, source=HOSTILE, candidate_source=HOSTILE, hints=(Hint(HOSTILE, HOSTILE, 1.0),))
    for result in (found, dataclasses.replace(found, first_divergence=evil, not_ok_because=HOSTILE, baseline=HOSTILE)):
        text = result._repr_html_()
        inert(text)
        assert "NOT OK" in text and "layers.31" in text


def test_u6_repr_is_one_line(found: Comparison) -> None:
    text = repr(found)
    assert text.startswith(f"<Comparison NOT OK: {found.not_ok_because}; ") and len(text) < 300 and "\n" not in text
    assert repr(dataclasses.replace(found, ok=True, verdict="rounding")).startswith("<Comparison ok: rounding; ")


def test_recordings_and_engines(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()).eval()
    with glass.record(model, tmp_path / "run"):
        model(torch.ones(2, 4))
    recording = glass.Recording.open(tmp_path / "run")
    inert(recording._repr_html_())
    assert "float32[2,8]" in recording._repr_html_().replace(" ", "")
    engine = glass.build(model, inputs={"input": torch.ones(2, 4)}, backend="eager")
    inert(engine._repr_html_())
    pytest.importorskip("pandas")
    frame = recording.to_pandas(statistics=True)
    assert list(frame["site"]) == [entry.site for entry in recording.entries] and frame["max"].notna().all()
    assert list(engine.to_pandas()["name"]) == [site.name for site in engine.sites]


def test_a_data_frame_has_all_figures(found: Comparison) -> None:
    pytest.importorskip("pandas")
    frame = found.to_pandas()
    assert len(frame) == len(found.pairs) and {"site", "verdict", "max_abs_diff", "snr_db"} <= set(frame.columns)
    assert next(iter(frame.loc[frame["verdict"] == "wrong", "site"])) == HOSTILE
    assert len(dataclasses.replace(found, pairs=()).to_pandas()) == 0


def test_a_plot(found: Comparison, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    axes = found.plot()
    axes.figure.savefig(tmp_path / "plot.png")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {"wrong (9)", "wrong, not finite or of another kind (1)"} <= set(labels) and axes.get_yscale() == "log"
    ratios = tuple(dataclasses.replace(pair, noise_ratio=float(place)) for place, pair in enumerate(found.pairs))
    assert dataclasses.replace(found, pairs=ratios).plot(axes.figure.subplots()).get_ylabel() == "error / noise floor"
    axes.figure.savefig(tmp_path / "plot.png")
    # What has no ratio because it is NaN, or of another shape, stands on top; what was not measured is counted.
    nan = tuple(dataclasses.replace(pair, noise_ratio=None if pair.verdict == "wrong" else 1.0) for pair in found.pairs)
    unknown = dataclasses.replace(nan[0], verdict="identical", noise_ratio=None)
    axes = dataclasses.replace(found, pairs=(*nan, unknown)).plot(axes.figure.subplots())
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "wrong, not finite or of another kind (10)" in labels and "1 without a number" in axes.get_xlabel()
    with pytest.raises(UsageError, match="nothing to plot"):
        dataclasses.replace(found, pairs=()).plot()
    sys.modules["matplotlib.pyplot"].close("all")


@pytest.mark.parametrize(("module", "method"), [("pandas", "to_pandas"), ("matplotlib.pyplot", "plot")])
def test_without_the_package_it_says_what_to_install(
    found: Comparison, module: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=r"pip install 'glassengine\[notebook\]'"):
        getattr(found, method)()
