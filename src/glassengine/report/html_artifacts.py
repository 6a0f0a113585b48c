"""`index.html` of build artifacts: one self-contained page, readable without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from glassengine.reading.files import is_regular, open_regular

_MAX_DIFF_BYTES = 200_000
"""Most bytes of one difference on the page; the rest is in its file."""


def index_page(directory: Path, manifest: Mapping[str, Any]) -> str:
    """Return the page for the artifacts in `directory`.

    Args:
        directory: Where the files of `manifest` are.
        manifest: Content of `manifest.json`.
    """
    environment = Environment(
        loader=PackageLoader("glassengine.report", "html"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    stages = []
    for entry in manifest["stages"]:
        path = directory / entry["directory"] / "diff-from-previous.txt"
        text = ""
        is_whole = True
        if is_regular(path, inside=directory):
            with open_regular(path, inside=directory) as file:
                text = file.read(_MAX_DIFF_BYTES).decode("utf-8", "replace")
                is_whole = not file.read(1)
        stages.append({**entry, "rows": diff_rows(text), "is_whole": is_whole})
    top = [name for name in manifest["files"] if "/" not in name]
    # A build that was killed has no page.
    earlier = {
        path.name: next((name for name in ("index.html", "manifest.json") if (path / name).is_file()), "")
        for path in sorted(directory.glob("earlier-*"))
        if path.is_dir()
    }
    return environment.get_template("artifacts.html.j2").render(
        manifest=manifest, stages=stages, files=top, earlier=earlier
    )


def diff_rows(text: str) -> list[tuple[str, str]]:
    """Return (before, after) for each row of a side-by-side view; a line and its replacement share a row."""
    rows: list[tuple[str, str]] = []
    for line in text.splitlines():
        sign, content = line[:1], line[2:]
        if sign == "-":
            rows.append((content, ""))
        elif sign == "+":
            name = content.partition(":")[0]
            if rows and rows[-1][0].partition(":")[0] == name and not rows[-1][1]:
                rows[-1] = (rows[-1][0], content)
            else:
                rows.append(("", content))
    return rows
