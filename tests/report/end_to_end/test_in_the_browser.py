"""The page in a real browser, from the disk: the answer above everything, and nothing in a name that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.compare.series import compare_series
from glassengine.report.page.write import write_report
from tests.report.browser import Tab, chromium
from tests.report.made_results import HOSTILE, TEXTS, comparison, hostile, layered, pair
from tests.report.test_without_tensors import engines, runs

Open = Callable[..., Tab]
GUILTY = "model.layers.2.self_attn/scaled_dot_product_attention.0"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def tab(browser: Any) -> Iterator[Open]:
    tabs: list[Tab] = []

    def open_tab(folder: Path, **more: Any) -> Tab:
        tabs.append(Tab(browser, folder, **more))
        return tabs[-1]

    yield open_tab
    for one in tabs:
        one.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_report(comparison(), folder / "report")
    return folder / "report"


def bottom(page: Any, selector: str) -> float:
    box = page.locator(selector).first.bounding_box()
    return float(box["y"] + box["height"])


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (400, "dark"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1280, "dark"), (400, "light"))),
    ],
)
def test_the_guilty_line_is_on_the_first_screen_above_everything_else(
    tab: Open, report: Path, width: int, scheme: str
) -> None:
    found = tab(report, width=width, scheme=scheme)
    page = found.ready()
    for selector in (
        "h1 .mark",
        "h1 .sentence",
        ".sources figure:nth-child(1) pre",
        ".sources figure:nth-child(2) pre",
    ):
        assert bottom(page, selector) < 800
    assert bottom(page, ".hint") < 800
    assert GUILTY in page.locator("h1").inner_text()
    # Nothing is wider than the screen, and the browser has no complaint.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert found.messages == []
    assert {url.partition(":")[0] for url in found.requests} == {"file"}
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)" if scheme == "light" else "rgb(15, 19, 24)"
    )


def test_modules_stand_in_order_of_execution_and_names_show_their_ends(tab: Open, tmp_path: Path) -> None:
    names = [f"model.encoder.layers.{number}.attention.self.query/linear.0" for number in range(4)]
    # A level that sees only some of the modules does not put these first.
    program = [pair(0, name, "identical", 0.0, level="program") for name in names[1:3]]
    own = [pair(0, name, "wrong", 1e3) for name in (*names[:2], names[3])]
    write_report(comparison([*program, *own]), tmp_path / "report")
    page = tab(tmp_path / "report").ready()
    modules = page.locator(".map tbody th").all_inner_texts()
    assert [name for name in modules if "query" in name] == [name.partition("/")[0] for name in names]
    page.locator(".row").first.click()
    page.locator("#detail .name").wait_for()
    page.locator(".rows").press("ArrowDown")
    shown = page.locator(".row code").all_inner_texts()
    assert shown and all(text.startswith("\u2026") and text.endswith("query/linear.0") for text in shown)


def test_filters_order_and_search_are_in_the_address(tab: Open, report: Path) -> None:
    page = tab(report).ready()
    kept = page.locator("#kept")
    assert kept.inner_text() == "96 of 96 tensors"
    assert GUILTY in page.locator(".row").first.inner_text()
    page.locator("[data-verdict=wrong]").click()
    assert kept.inner_text() == "60 of 96 tensors"
    page.get_by_label("without what is passed on").check()
    assert kept.inner_text() == "4 of 96 tensors"
    page.get_by_label("dtype").select_option("int64")
    assert kept.inner_text() == "0 of 96 tensors"
    page.get_by_label("dtype").select_option("")
    page.get_by_label("step").last.select_option("2")
    assert kept.inner_text() == "1 of 96 tensors"
    page.reload()
    assert page.locator("#kept").inner_text() == "1 of 96 tensors"
    page.evaluate("location.hash = 'q=layers%5C.%5B01%5D&order=run'")
    assert page.locator("#kept").inner_text() == "32 of 96 tensors"
    page.locator("#search").fill("([")
    assert "not a regular expression" in page.locator("#kept").inner_text()


def test_the_map_shows_where_an_error_entered_and_leads_to_its_tensors(tab: Open, report: Path) -> None:
    page = tab(report).ready()
    rows = page.locator(".map tbody tr")
    names = rows.locator("th").all_inner_texts()
    guilty = rows.nth(names.index("model.layers.2.self_attn"))
    assert [cell.inner_text() for cell in guilty.locator("button").all()] == ["\u25cf"] * 4
    assert "s5" in (guilty.locator("button").first.get_attribute("class") or "")
    later = rows.nth(names.index("model.layers.3.mlp")).locator("button").first
    assert later.inner_text() == "\u25cb" and "inherited" in (later.get_attribute("class") or "")
    before = rows.nth(names.index("model.layers.1.mlp")).locator("button").first
    assert (before.get_attribute("class") or "") == "floor"
    heads = page.locator(".map thead th").all_inner_texts()
    assert [head.split("\n") for head in heads[:3]] == [
        ["module"],
        ["prefill", TEXTS[0]],
        ["decode 1", TEXTS[1].strip()],
    ]
    guilty.locator("button").nth(1).click()
    assert "module=model.layers.2.self_attn" in page.url and "step=1" in page.url
    assert page.locator("#kept").inner_text() == "2 of 96 tensors"
    assert GUILTY in page.locator("#detail .name").inner_text()


def test_the_keyboard_reaches_everything(tab: Open, report: Path) -> None:
    page = tab(report).ready()
    page.keyboard.press("f")
    assert GUILTY in page.locator("#detail .name").inner_text()
    first = page.locator("#detail").inner_text()
    assert "0, 3, 1" in first and "candidate 0.27" in first and "baseline 0.25" in first and "3110" in first
    assert "float32[1, 7, 8]" in first
    assert "Axis 1, size 7" in first and "largest at index 3; 1 of 7 indices differ" in first and "12,345 ulp" in first
    inputs = page.locator("#detail h3", has_text="Inputs").locator("+ .links button")
    assert [one.get_attribute("title") for one in inputs.all()] == ["model.layers.2.self_attn.q_proj/linear.0"]
    page.keyboard.press("j")
    page.wait_for_function("old => document.querySelector('#detail').innerText !== old", arg=first)
    page.locator(".rows").focus()
    page.keyboard.press("End")
    page.wait_for_function("document.querySelector('.row[aria-selected=true]')")
    assert page.locator(".row[aria-selected=true]").get_attribute("aria-rowindex") == "97"
    page.keyboard.press("Escape")
    assert page.locator("#detail").inner_text() == ""
    page.keyboard.press("/")
    page.keyboard.type("down_proj")
    assert page.locator("#kept").inner_text() == "24 of 96 tensors"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()


def test_nothing_in_a_name_runs_or_turns_the_text(tab: Open, tmp_path: Path) -> None:
    write_report(hostile(), tmp_path / "report")
    for width in (1280, 400):
        found = tab(tmp_path / "report", width=width)
        page = found.ready()
        page.keyboard.press("f")
        page.locator("#detail .name").wait_for()
        for summary in page.locator("main > section > details > summary").all():
            summary.click()
        page.locator("#skipped-body details summary").click()
        page.locator("#skipped-body code").first.wait_for()
        for row in range(len(HOSTILE)):
            page.evaluate("row => { location.hash = `row=${row}`; }", row)
            page.wait_for_timeout(30)
        assert page.evaluate("window.hacked") is None
        assert page.locator("img, iframe, object, body > svg, #answer svg").count() == 0
        shown = page.evaluate("document.body.innerText")
        assert not set("\u202e\u2066\u200b\x1b\ufeff") & set(shown) and "\\u{202e}" in shown
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert bottom(page, "h1") < 400
        assert found.messages == [] and all(url.startswith("file:") for url in found.requests)


def test_the_policy_stops_what_is_not_the_page_own(tab: Open, report: Path) -> None:
    page = tab(report).ready()
    blocked = page.evaluate(
        """async () => {
            const found = [];
            document.addEventListener("securitypolicyviolation", (event) => found.push(event.effectiveDirective));
            const tries = [
                () => { document.body.innerHTML = "<b>x</b>"; },
                () => { const one = document.createElement("script"); one.src = "data/rows-0.js"; },
                () => { const one = document.createElement("img"); one.src = "https://example.org/x.png"; },
            ];
            let thrown = 0;
            for (const act of tries) try { act(); } catch { thrown += 1; }
            const fetched = await fetch("https://example.org/").then(() => 1, () => 0);
            await new Promise((done) => setTimeout(done, 50));
            return [thrown, fetched, found];
        }"""
    )
    assert blocked[:2] == [2, 0] and {"img-src", "connect-src"} <= set(blocked[2])


def test_without_its_data_the_page_still_answers_and_says_what_is_missing(tab: Open, tmp_path: Path) -> None:
    write_report(comparison(), tmp_path / "report")
    (tmp_path / "report/index.html").rename(tmp_path / "index.html")
    page = tab(tmp_path).page
    page.locator("#progress").wait_for()
    assert "the folder data belongs beside index.html" in page.locator("#progress").inner_text()
    assert GUILTY in page.locator("h1").inner_text()


def test_one_file_shows_the_same_and_copies_its_answer(tab: Open, tmp_path: Path) -> None:
    write_report(comparison(), tmp_path / "alone" / "index.html", made="2026-11-28: glass check a b")
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["index.html"]
    page = tab(tmp_path / "alone").page
    assert page.locator("#kept").inner_text() == "96 of 96 tensors"
    page.locator(".row").first.click()
    page.locator("#detail .name").wait_for()
    assert "examples/tiny-llama | port.py:model" in page.title()
    assert "2026-11-28: glass check a b" in page.locator(".compared").inner_text()
    page.locator("#copy").click()
    page.get_by_text("Copied").wait_for()
    assert "- candidate: `port.py:40`" in page.locator("#copy").get_attribute("data-text")


def test_values_show_the_head_and_the_elements(tab: Open, tmp_path: Path) -> None:
    x = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[:, 3] *= 1.01
    torch.save({"layers.0": x, "layers.1": x}, tmp_path / "x.pt")
    torch.save({"layers.0": x, "layers.1": y}, tmp_path / "y.pt")
    records = tmp_path / "x.pt", tmp_path / "y.pt"
    write_report(glass.compare(*records), tmp_path / "report", recordings=records)
    found = tab(tmp_path / "report")
    page = found.ready()
    page.keyboard.press("f")
    page.locator("#detail h3").first.wait_for()
    text = page.locator("#detail").inner_text()
    assert "Worst elements" in text and "Errors in ulp" in text
    assert "Axis 1, size 4" in text and "largest at index 3; 1 of 4 indices differ" in text
    # Two records do not say which of two wrong tensors inherited its error.
    assert (
        "introduced" not in page.locator("main").inner_text()
        and "inherited" not in page.locator(".legend").inner_text()
    )
    worst = float(y.flatten()[(y - x).abs().argmax()])
    assert f"{worst:.9g}" in text
    assert found.messages == []


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_axe_finds_nothing(tab: Open, report: Path, scheme: str) -> None:
    package = pytest.importorskip("axe_playwright_python", reason="axe-core is not installed")
    found = tab(report, scheme=scheme)
    page = found.ready()
    page.keyboard.press("f")
    page.locator("#detail .name").wait_for()
    page.evaluate((Path(package.__path__[0]) / "axe.min.js").read_text(encoding="utf-8"))
    violations = page.evaluate("async () => (await axe.run()).violations")
    assert [(v["id"], [n["html"][:200] for n in v["nodes"][:3]]) for v in violations] == []


def test_a_result_without_tensors_or_divergence_is_a_page_too(tab: Open, tmp_path: Path) -> None:
    write_report(comparison([], ok=False, not_ok_because="nothing was judged", too_little=True), tmp_path / "none")
    write_report(comparison(layered(guilty=None)), tmp_path / "right")
    for name, sentence in (("none", "Too little was judged: nothing was judged."), ("right", "Every difference is")):
        found = tab(tmp_path / name)
        assert sentence in found.ready().locator("h1").inner_text() and found.messages == []


def test_paper_shows_the_answer_in_light_colors(tab: Open, report: Path) -> None:
    found = tab(report, scheme="dark")
    page = found.ready()
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("nav").is_hidden() and page.locator(".row").count() == 96
    assert len(page.pdf()) > 10_000
    # Nothing is cut off at the edge of a sheet.
    page.set_viewport_size({"width": 794, "height": 1123})
    assert page.evaluate("document.documentElement.scrollWidth") <= 794


@pytest.mark.slow
def test_a_page_without_tensors_has_tables_and_curves(tab: Open, tmp_path: Path) -> None:
    package = pytest.importorskip("axe_playwright_python", reason="axe-core is not installed")
    one, two = runs(tmp_path)
    write_report(compare_series(one, two), tmp_path / "series", recordings=[one, two])
    write_report(engines(), tmp_path / "engines")
    for name, marks, scheme in (("series", "svg polyline", "light"), ("engines", "td .chip.wrong", "dark")):
        found = tab(tmp_path / name, scheme=scheme, width=400)
        page = found.page
        assert page.locator(marks).count() and page.evaluate("document.documentElement.scrollWidth") <= 400
        page.evaluate((Path(package.__path__[0]) / "axe.min.js").read_text(encoding="utf-8"))
        violations = page.evaluate("async () => (await axe.run()).violations")
        assert [(v["id"], [n["html"][:200] for n in v["nodes"][:3]]) for v in violations] == []
        assert found.messages == []
