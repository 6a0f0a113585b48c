"""A report is one page and its data: a function of the result alone, written whole, and never over something else."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

from glassengine.errors import CorruptError, UsageError
from glassengine.report.page.write import require_place, write_report
from glassengine.results import Comparison, Comparisons, Replayed, ReplayedOutput
from tests.report.made_results import HOSTILE, PORT, SOURCE, comparison, hostile, layered, pair


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Outline(html.parser.HTMLParser):
    """Elements and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def index_of(folder: Path) -> Any:
    text = (folder / "index.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="index">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def data(folder: Path, kind: str, number: int = 0) -> Any:
    text = (folder / f"data/{kind}-{number}.js").read_text(encoding="ascii")
    head = f'glassReport("{kind}",{number},'
    assert text.startswith(head) and text.endswith(");\n")
    return json.loads(text[len(head) : -3])


def test_the_page_says_the_answer_without_scripts_and_without_data(tmp_path: Path) -> None:
    written = write_report(comparison(), tmp_path / "report")
    text = (tmp_path / "report/index.html").read_text(encoding="utf-8")
    above = Outline(text[: text.index("<nav")])
    said = " ".join(part.strip() for part in above.texts if part.strip())
    assert "NOT OK" in said and "The first wrong op is model.layers.2.self_attn/scaled_dot_product_attention.0" in said
    for source in (SOURCE, PORT):
        place, code = source.split(": ", 1)
        assert place in said and code in said
    assert "the scale is 0.196078 instead of 0.176777" in said
    assert "3110 times what rounding alone explains, 41 times the rounding bound of this op" in said
    assert not written.ok and written.verdict == "wrong"
    assert written.num_tensors == 96 and written.num_files == len(files_of(tmp_path / "report"))
    assert written.total_bytes == sum(map(len, files_of(tmp_path / "report").values()))


def test_a_report_is_a_function_of_the_result(tmp_path: Path) -> None:
    result = comparison()
    for name in ("one", "two"):
        write_report(result, tmp_path / name)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("sort_keys", [False, True])
def test_a_document_and_its_result_make_the_same_report(tmp_path: Path, indent: int | None, sort_keys: bool) -> None:
    result = comparison()
    document = tmp_path / "result.json"
    document.write_text(json.dumps({"schema_version": 1, **result.to_dict()}, indent=indent, sort_keys=sort_keys))
    write_report(result, tmp_path / "memory")
    write_report(document, tmp_path / "file")
    ours, theirs = files_of(tmp_path / "memory"), files_of(tmp_path / "file")
    if sort_keys:  # what stands in the order of the document (facts) does so
        ours, theirs = ({n: c for n, c in f.items() if n.startswith("data/rows")} for f in (ours, theirs))
    assert ours == theirs


def test_numbers_that_are_not_finite_survive(tmp_path: Path) -> None:
    pairs = [pair(0, "a", "wrong", float("nan")), pair(0, "b", "wrong", float("inf")), pair(0, "c", "identical", None)]
    document = tmp_path / "result.json"
    document.write_text(json.dumps(comparison(pairs).to_dict()))
    write_report(document, tmp_path / "report")
    index = index_of(tmp_path / "report")
    assert index["first_row"] == 0
    assert [file["num_items"] for file in index["files"] if file["kind"] == "rows"] == [3]


def test_a_report_replaces_a_report_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "report"
    write_report(comparison(layered(steps=2)), target)
    write_report(comparison(layered(guilty=None), ok=True), target)
    assert "every difference is explained by rounding" in (target / "index.html").read_text().lower()
    (target / "mine.txt").write_text("kept")
    with pytest.raises(UsageError, match="a report replaces only a report"):
        write_report(comparison(), target)
    assert (target / "mine.txt").read_text() == "kept"
    (tmp_path / "page").mkdir()
    (tmp_path / "page/index.html").write_text("<!doctype html>")
    with pytest.raises(UsageError, match="replaces only a report"):
        require_place(tmp_path / "page")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="not a directory"):
        require_place(tmp_path / "file")
    with pytest.raises(UsageError, match="only files of this machine"):
        require_place("s3://bucket/report")
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".partial")] == []


def test_a_file_replaces_a_report_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "answer.html"
    written = write_report(comparison(), target)
    assert (written.report, written.num_files, written.total_bytes) == (str(target), 1, target.stat().st_size)
    first = target.read_bytes()
    write_report(comparison(), target)
    assert target.read_bytes() == first and b'id="data-rows-0"' in first
    target.write_text("mine")
    with pytest.raises(UsageError, match="replaces only a report"):
        write_report(comparison(), target)
    assert [path.name for path in tmp_path.iterdir()] == ["answer.html"]


def test_a_failed_report_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "report"
    write_report(comparison(), target)
    before = files_of(target)
    broken = tmp_path / "result.json"
    broken.write_text(json.dumps(comparison().to_dict())[:-400])
    with pytest.raises(CorruptError, match="damaged"):
        write_report(broken, target)
    assert files_of(target) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report", "result.json"]


def test_no_text_of_a_result_becomes_markup_or_code(tmp_path: Path) -> None:
    write_report(hostile(), tmp_path / "report")
    text = (tmp_path / "report/index.html").read_text(encoding="utf-8")
    outline = Outline(text)
    assert {tag for tag, _ in outline.elements} & {"img", "svg", "iframe", "object", "base", "form"} == {"form"}
    assert sum(tag == "script" for tag, _ in outline.elements) == 2
    assert not [name for _, attributes in outline.elements for name in attributes if name.startswith("on")]
    for character in ("\u202e", "\u2066", "\x1b", "\x00", "\ufeff", "\u200b"):
        assert character not in text
    for path in (tmp_path / "report/data").iterdir():
        assert path.read_bytes().isascii()
        assert json.dumps(data(tmp_path / "report", *path.stem.rsplit("-", 1)[:1]))
    assert set(data(tmp_path / "report", "sites")) == set(HOSTILE)


def test_the_policy_of_the_page_allows_its_own_script_and_nothing_else(tmp_path: Path) -> None:
    import base64
    import hashlib

    write_report(comparison(), tmp_path / "report")
    text = (tmp_path / "report/index.html").read_text(encoding="utf-8")
    (policy,) = [a["content"] for _, a in Outline(text).elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'") and "unsafe" not in policy
    script = text[text.rindex("<script>") + len("<script>") : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}' 'self' file:;" in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg\b)", text)
    assert "innerHTML" not in text and "outerHTML" not in text and "insertAdjacent" not in text


def test_several_candidates_have_a_report_each(tmp_path: Path) -> None:
    right = dataclasses.replace(comparison(layered(guilty=None)), candidate="right")
    wrong = dataclasses.replace(comparison(), candidate="wrong")
    many = Comparisons("base", False, "wrong", (right, wrong), False)
    document = tmp_path / "many.json"
    document.write_text(json.dumps(many.to_dict()))
    for result, name in ((many, "memory"), (document, "file")):
        written = write_report(result, tmp_path / name)
        assert not written.ok and written.num_tensors == 192
    assert files_of(tmp_path / "memory") == files_of(tmp_path / "file")
    overview = (tmp_path / "file/index.html").read_text()
    assert "1 of 2 candidates are ok" in overview
    assert overview.index('href="2/index.html"') < overview.index('href="1/index.html"')
    assert "The first wrong op is" in (tmp_path / "file/2/index.html").read_text()
    # A report of one takes the place of the folders of several.
    write_report(right, tmp_path / "file")
    assert sorted(path.name for path in (tmp_path / "file").iterdir()) == ["data", "index.html"]


def test_a_replay_has_a_report_with_and_without_a_comparison(tmp_path: Path) -> None:
    output = ReplayedOutput("y", "float32", (2, 3), False, 4, 0.5, "NaN")
    nonfinite = {"op": "aten.log", "node": "log_1", "module": "head", "source": "net.py:9: y = x.log()", "kinds": "NaN",
                 "num_elements": 3, "total_elements": 6}  # fmt: skip
    bare = Replayed("snap", "net", 4, "nonfinite", "inductor", "eager", False, (output,), first_nonfinite=nonfinite)
    judged = Replayed("snap", "net", 4, "every", "inductor", "inductor", False, (output,), comparison=comparison())
    for number, result in enumerate((bare, judged)):
        document = tmp_path / f"{number}.json"
        document.write_text(json.dumps(result.to_dict()))
        write_report(result, tmp_path / f"m{number}")
        write_report(document, tmp_path / f"f{number}")
        assert files_of(tmp_path / f"m{number}") == files_of(tmp_path / f"f{number}")
    text = (tmp_path / "m0/index.html").read_text()
    assert "aten.log made the first NaN" in text and "net.py:9" in text and "3 of 6 elements" in text
    assert "The first wrong op is" in (tmp_path / "m1/index.html").read_text()


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        ("{}", UsageError, "not of a comparison"),
        ('{"error": {"what": "x"}}', UsageError, "ended with an error"),
        ("[1]", CorruptError, "damaged"),
        ("", CorruptError, "damaged"),
        ('{"pairs": 3}', CorruptError, "damaged"),
        ('{"pairs": [{"step": "x"}]}', CorruptError, "damaged"),
        ('{"schema_version": 99}', CorruptError, "newer version"),
        ('{"counts": 1, "first_divergence": null}', CorruptError, "damaged"),
        ("{} {}", CorruptError, "something follows"),
    ],
)
def test_other_documents_are_refused(tmp_path: Path, content: str, error: type[Exception], words: str) -> None:
    document = tmp_path / "x.json"
    document.write_text(content)
    with pytest.raises(error, match=re.escape(words)):
        write_report(document, tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_recordings_must_be_those_of_the_result(tmp_path: Path) -> None:
    import torch

    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    result: Comparison = comparison()
    with pytest.raises(UsageError, match="not those of the result"):
        write_report(result, tmp_path / "report", recordings=[tmp_path / "a.pt"] * 3)
