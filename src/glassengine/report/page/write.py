"""Writes a report: a page that opens from disk, with the answer in it and the data beside it.

    index.html       everything above the data, as plain HTML: it says its answer without scripts and without data
    data/*.js        rows, names, details, in pieces that are read when they are needed
    1/, 2/, ...      of several candidates, a report each; then index.html lists them

or one file, NAME.html, with the data in it, compressed.

The page may load nothing but these: its Content-Security-Policy names the hashes of its own style and script, and the
only scripts that it adds are files of `data/`. What is written depends on the result, and the records given, alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from glassengine.errors import UsageError
from glassengine.reading.files import open_regular, printable
from glassengine.report import words
from glassengine.report.head import Cell, Chip, Head, head_of, markdown, table
from glassengine.report.page.data import FOLDER, MOST_TENSORS, DataFolder, ListFiles, PageRows, PageValues, compressed
from glassengine.report.page.redact import MOST_BYTES, MOST_PAIRS, first_pairs, redacted, redacted_text
from glassengine.report.without_tensors import head_of_apart, with_rollout
from glassengine.results import Comparison, Comparisons, Replayed, sentences, worst
from glassengine.results.report import ReportPage, StepLabel, WrittenReport
from glassengine.results.stored import Apart, OnPair, Stored, read_result, without_pairs
from glassengine.writing import local, remove_tree

PAGE = "index.html"
SCRIPTS = ("copy", "core", "names", "scale", "rows", "map", "course", "table", "detail", "plots", "main")
_BEGINNING = b"<!doctype html>\n<!-- A report of Glass Engine"
_SINGLE = (".html", ".htm")
_OWN = re.compile(rf"{re.escape(PAGE)}|{FOLDER}|[1-9]\d*")
_SKIPPED_PER_FILE, _READS_PER_FILE = 1 << 13, 1 << 14
_LONGEST_TEXT = 200
_NO_VALUES = "The result has no values. With two recordings: glass report RESULT -o DIR --recordings BASELINE CANDIDATE"
_SOME_VALUES = f"Values are shown of the {MOST_TENSORS} worst tensors that both recordings have in one layout."

Result = Comparison | Comparisons | Replayed | Apart


def require_place(directory: str | Path) -> Path:
    """Return where a report goes; before any work is done, refuse what is no place for one.

    Raises:
        UsageError: It is in a store, or it is or holds something else than a report.
    """
    target = local(directory)
    if is_single(target):
        if target.exists() and not _is_report(target):
            raise UsageError("a report replaces only a report", got=str(target), expected="a new file, or a report")
        return target
    if target.is_dir() and (names := sorted(item.name for item in target.iterdir())):
        others = [name for name in names if not _OWN.fullmatch(name)]
        if others or not _is_report(target / PAGE):
            raise UsageError(
                "a report replaces only a report",
                got=f"{target}, which holds {', '.join(map(printable, (others or names)[:3]))}",
                expected="a new or empty directory, or one with a report",
            )
    elif target.exists() and not target.is_dir():
        raise UsageError("not a directory", got=str(target))
    return target


def is_single(target: str | Path) -> bool:
    """Whether a report is one file."""
    return Path(target).suffix in _SINGLE and not Path(target).is_dir()


def _is_report(page: Path) -> bool:
    if not page.is_file():
        return False
    with open_regular(page) as file:
        return file.read(len(_BEGINNING)) == _BEGINNING


def write_report(
    result: Result | str | Path,
    directory: str | Path,
    *,
    recordings: Sequence[str | Path] = (),
    made: str = "",
    redact: bool = False,
) -> WrittenReport:
    """Write the report of a result.

    Args:
        result: What check, check_training, compare or replay has returned, or the file of its `--json`.
        directory: Where, or NAME.html for one file; a report that is there is replaced.
        recordings: Baseline and candidates that were compared, for the values of the worst tensors; none: no values.
        made: When and by which command, for its head.
        redact: Leave texts, paths and values out, and tensors until the report is below 1 MB.

    Raises:
        UsageError: The directory holds something else, there is no report of this kind of result, or it is not of so
            many recordings.
        CorruptError: The document or a recording is damaged.
    """
    target = require_place(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    for most in MOST_PAIRS if redact else (None,):
        written = _write(result, target, recordings, redacted_text(made) if redact else made, most)
        if written.total_bytes < MOST_BYTES:
            break
    return written


def _write(
    result: Result | str | Path, target: Path, recordings: Sequence[str | Path], made: str, most: int | None
) -> WrittenReport:
    """Write it; `most` redacted tensors, or all as they are."""
    new = target.parent / f".{target.name}.{os.getpid()}.partial"
    remove_tree(new)
    try:
        written = _pages(result, new, target, recordings, made, most)
        if is_single(target):
            return _put_single(new, target, written)
        _put(new, target)
    finally:
        remove_tree(new)
    return written


def _put(new: Path, target: Path) -> None:
    if not target.exists():
        new.replace(target)
        return
    for name in sorted(item.name for item in target.iterdir()):
        there = target / name
        remove_tree(there) if there.is_dir() and not there.is_symlink() else there.unlink()
    # The page last: without it the data of a run that was killed are not shown.
    for item in sorted(new.iterdir(), key=lambda item: item.name == PAGE):
        shutil.move(item, target / item.name)


def _put_single(new: Path, target: Path, written: WrittenReport) -> WrittenReport:
    """Write the page with its data in it, as blocks that no browser runs."""
    blocks = [
        f'<script type="application/gzip" id="data-{path.stem}">{compressed(path)}</script>\n'
        for path in sorted(new.glob(f"{FOLDER}/*.js"))
    ]
    head, end, tail = (new / PAGE).read_text(encoding="utf-8").rpartition("<script>")
    (new / PAGE).write_text(head + "".join(blocks) + end + tail, encoding="utf-8")
    (new / PAGE).replace(target)
    return replace(written, report=str(target), num_files=1, total_bytes=target.stat().st_size)


def _pages(
    result: Result | str | Path,
    new: Path,
    target: Path,
    recordings: Sequence[str | Path],
    made: str,
    most: int | None,
) -> WrittenReport:
    rows: dict[int, PageRows] = {}

    def taker(number: int) -> OnPair:
        rows[number] = PageRows(DataFolder(new / str(number)))
        return rows[number].add if most is None else first_pairs(rows[number].add, most)

    shown = read_result(result, taker) if isinstance(result, (str, Path)) else without_pairs(result, taker)
    if most is not None:
        if recordings or shown[0].apart is not None:
            raise UsageError("--redact is for a result of tensors, without recordings", hint="glass report RESULT")
        shown = [redacted(one) for one in shown]
    if len(shown) > 1 and is_single(target):
        raise UsageError("a file holds the report of one candidate", got=f"{len(shown)}", expected="a directory")
    values: list[PageValues] = []
    pages: list[tuple[Head, ReportPage | None]]
    if (apart := shown[0].apart) is not None:
        (new / "0").mkdir(parents=True)
        pages = [(head_of_apart(apart, recordings), None)]
    else:
        for number in range(len(shown)):
            if number not in rows:
                taker(number)
        values = [PageValues(recordings[0], candidate) for candidate in recordings[1:]]
        if values and len(values) != len(shown):
            expected = f"the baseline's and {len(shown)} more"
            raise UsageError("the recordings are not those of the result", got=f"{len(values) + 1}", expected=expected)
        pages = [_page(one, rows[at], values[at] if values else None) for at, one in enumerate(shown)]
    several = len(shown) > 1
    for number, (head, page) in enumerate(pages):
        up = "../index.html" if several else ""
        (new / str(number) / PAGE).write_text(page_text(head, page, up=up, made=made), encoding="utf-8")
    if several:
        for number in reversed(range(len(shown))):
            (new / str(number)).rename(new / str(number + 1))
        (new / PAGE).write_text(page_text(_overview([head for head, _ in pages])), encoding="utf-8")
    else:
        for item in (new / "0").iterdir():
            item.rename(new / item.name)
        (new / "0").rmdir()
    verdicts = [one.comparison.verdict for one in shown if one.comparison is not None]
    every = [path for path in new.rglob("*") if path.is_file()]
    return WrittenReport(
        report=str(target / PAGE),
        ok=all(head.ok for head, _ in pages),
        verdict=worst(verdicts) if verdicts else None,
        num_tensors=sum(map(len, rows.values())),
        num_with_values=sum(len(page.valued_rows) for _, page in pages if page is not None),
        without_values=dict(sum((one.without for one in values), Counter())),
        num_files=len(every),
        total_bytes=sum(path.stat().st_size for path in every),
    )


def _page(shown: Stored, rows: PageRows, values: PageValues | None) -> tuple[Head, ReportPage | None]:
    """Write the data of one page, and return what goes into it; no index where there are no tensors."""
    result, folder = shown.comparison, rows.folder
    if result is not None and result.reads:
        rows.leave_out_regions(result.reads)
    columns = rows.close()
    first = rows.row_of(None if result is None else result.first_divergence)
    pair = None if first is None else rows.pair(first)
    skipped = ListFiles(folder, "skipped", _SKIPPED_PER_FILE)
    for item in () if result is None else result.skipped:
        skipped.add({key: value for key, value in item.to_dict().items() if value is not None})
    skipped.close()
    if result is not None and result.reads:
        # Of each site in the order of their places, the places of the sites that its op reads.
        inputs = ListFiles(folder, "inputs", _READS_PER_FILE)
        for site in rows.sites:
            places = (rows.place_of(name) for name in result.reads.get(site, ()))
            inputs.add([place for place in places if place is not None])
        inputs.close()
    valued: tuple[int, ...] = ()
    if values is not None:
        wanted = dict.fromkeys([*([] if first is None else [first]), *rows.flagged(MOST_TENSORS)])
        valued = values.write(folder, ((row, rows.pair(row)) for row in wanted))
    # Of a language model what the first case reads in each step.
    texts = next((case.texts for case in result.inputs if case.texts), ()) if result is not None else ()
    page = ReportPage(
        files=tuple(folder.kinds.values()),
        columns=columns,
        names={
            name: tuple(map({"level": words.level, "judged_by": words.judged_by}.get(name, str), found))
            for name, found in rows.names.items()
        },
        steps=tuple(StepLabel(at, texts[at][:_LONGEST_TEXT] if at < len(texts) else "") for at in rows.steps),
        generates=result is not None and result.generates,
        knows_inherited=result is not None and result.calibration is None,
        first_row=first,
        valued_rows=valued,
        why_no_values=_NO_VALUES if values is None else _SOME_VALUES,
    )
    head = head_of(shown, pair)
    if result is not None and result.rollout is not None:
        head = with_rollout(head, result.rollout)
    return head, page if len(rows) or skipped.num_items else None


def page_text(
    head: Head,
    page: ReportPage | None = None,
    *,
    up: str = "",
    made: str = "",
) -> str:
    """Return a page; without an index that of what has no tensors."""
    environment = Environment(
        loader=PackageLoader("glassengine.report", "html/page"),
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    index = "" if page is None else _as_script(page.to_dict())
    own = _own_files(("copy",) if page is None else SCRIPTS)
    names = [sentences.short(one) for one in (head.baseline, head.candidate) if one]
    title = ": ".join([head.mark, *([" | ".join(names)] if names else [])])
    texts = {"title": title, "markdown": escape(markdown(head, made)), "made": made, "up": up}
    template = environment.get_template("page.html.j2")
    return template.render(head=head, page=page, index=index, **texts, **own)


def _overview(heads: Sequence[Head]) -> Head:
    """Return the page of several candidates, each of which has a report of its own: the worst first."""
    kinds = {"good": "rounding", "fair": "suspicious", "bad": "wrong"}
    rows: list[list[Cell]] = [
        [
            Chip("", head.candidate, f"{number}/{PAGE}"),
            Chip(kinds[head.tone], head.mark),
            head.sentence,
            " ".join(f"{one.place}: {one.code}" for one in head.sources if one.code),
            " ".join(text for _, text in head.hint),
        ]
        for number, head in sorted(enumerate(heads, 1), key=lambda one: (one[1].ok, not one[1].is_flagged))
    ]
    columns = ("candidate", "verdict", "answer", "source", "hint")
    about = "Worst first; each has a report of its own."
    return Head(
        f"{sum(head.ok for head in heads)} of {len(heads)} candidates are ok.",
        all(head.ok for head in heads),
        lines=(("baseline", heads[0].baseline),),
        tables=(table("Candidates", about, columns, rows, is_open=True),),
    )


def _as_script(value: Any) -> Markup:
    """Return JSON that may stand in a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))  # noqa: S704  # ASCII JSON without < > &


def _own_files(scripts: Sequence[str]) -> dict[str, Any]:
    """Return style and script of the page, and the hashes that its policy allows."""
    folder = files("glassengine.report").joinpath("html", "page")
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    parts = [folder.joinpath(f"{name}.js").read_text(encoding="utf-8") for name in scripts]
    script = '"use strict";\n(() => {\n' + "\n".join(parts) + "\n})();\n"
    return {
        "style": Markup(style),  # noqa: S704  # a file of this package
        "script": Markup(script),  # noqa: S704  # files of this package
        "style_hash": _digest(style),
        "script_hash": _digest(script),
    }


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
