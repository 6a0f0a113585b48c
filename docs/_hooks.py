"""What the documentation site has beside the files of this folder, and where their links lead in it.

The documents at the root of the repository become pages, the public names become a reference, and patterns of the
navigation take all files that match. Links between documents are written as they work in the repository; here each of
them leads to the page that the file became, and one to a file that is no page leads to the repository.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent

# File of the repository -> page of the site.
OUTSIDE = {
    "README.md": "index.md",
    "LIMITATIONS.md": "limitations.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "SECURITY.md": "security.md",
}
API = "api.md"

_CODE_OR_LINK = re.compile(
    r"(?P<code>^ *```.*?^ *```|`[^`\n]+`)|(?P<start>!?\[(?P<text>(?:[^\[\]`]|`[^`]*`)*)\]\()(?P<target>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)


def on_config(config: Any) -> Any:
    """Put the files that match it in the place of each pattern of the navigation."""
    config.nav = [_expanded(entry) for entry in config.nav]
    return config


def _expanded(entry: Any) -> Any:
    if isinstance(entry, str):
        return entry
    ((title, inside),) = entry.items()
    if isinstance(inside, str):
        return entry
    found = []
    for item in inside:
        if isinstance(item, str) and "*" in item:
            paths = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob(item))
            found.append({posixpath.dirname(item).capitalize() + "s": paths})
        else:
            found.append(_expanded(item))
    return {title: found}


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages that are no files of this folder."""
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, API, content=reference()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the text of a page with links that work in the site."""
    uri = page.file.src_uri
    origin = next((name for name, built in OUTSIDE.items() if built == uri), f"docs/{uri}")

    def link(match: re.Match[str]) -> str:
        if match["code"] or re.match(r"[a-z]+:|#", match["target"]):
            return match[0]
        target, mark, anchor = match["target"].partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if path in OUTSIDE or path.startswith("docs/"):
            built = OUTSIDE.get(path, path.removeprefix("docs/"))
            return f"{match['start']}{posixpath.relpath(built, posixpath.dirname(uri))}{mark}{anchor})"
        if not (ROOT / path).exists():
            return match[0]  # which the site's own check then reports
        return f"[{match['text']}]({config.repo_url}/blob/main/{path})" if config.repo_url else match["text"]

    return _CODE_OR_LINK.sub(link, markdown)


def reference() -> str:
    """Return the page of the public names, each with its docstring."""
    lines = ["# Public names", "", "`import glassengine as glass` gives the names below.", ""]
    for name, module in sorted(public_names().items(), key=lambda item: (item[0][0].isupper(), item[0])):
        lines += [f"::: {module}.{name}", "    options:", f"      heading: glass.{name}", ""]
    return "\n".join(lines)


def public_names() -> dict[str, str]:
    """Return public name -> module that defines it, read from the source without running it."""
    tree = ast.parse((ROOT / "src/glassengine/__init__.py").read_text(encoding="utf-8"))
    return {
        alias.name: str(node.module)
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
