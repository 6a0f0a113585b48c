"""What the documentation site has beside the files of this folder, and where their links lead in it.

The documents at the root of the repository become pages, the public names become a reference, and patterns of the
navigation take all files that match. Links between documents are written as they work in the repository; here each of
them leads to the page that the file became, and one to another file leads to the repository.
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
# Module whose public names have a page.
REFERENCE = {
    "glassengine": "api/index.md",
    **{
        f"glassengine.{name}": f"api/{name}.md"
        for name in ("lazy", "metrics", "profiler", "snapshots", "compat", "commands", "results", "errors")
    },
}

_CODE_OR_LINK = re.compile(
    r"(?P<code>^ *```.*?^ *```|`[^`\n]+`)|(?P<start>!?\[(?P<text>(?:[^\[\]`]|`[^`]*`)*)\]\()(?P<target>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)


def on_config(config: Any) -> Any:
    """Replace each pattern of the navigation by the files that match it."""
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
    for module, page in REFERENCE.items():
        files.append(File.generated(config, page, content=reference(module)))
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

    return _CODE_OR_LINK.sub(link, _GENERATED.sub(lambda match: GENERATED[match[1]](), markdown))


def floors() -> str:
    """Return the table of the floors, highest first, from the test that enforces it."""
    tree = ast.parse((ROOT / "tests/test_architecture.py").read_text(encoding="utf-8"))
    (found,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS"
    )
    lines = ["| floor | units |", "|---:|---|"]
    for level, units in reversed(list(enumerate(ast.literal_eval(found)))):
        lines.append(f"| {level} | {', '.join(f'`{unit}`' for unit in sorted(units))} |")
    return "\n".join(lines)


def rooms() -> str:
    """Return the table of units and rooms, each with the first line of its docstring."""
    source = ROOT / "src/glassengine"
    lines = ["| room | what is in it |", "|---|---|"]
    for path in source.glob("*/**/__init__.py"):
        told = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        lines.append(f"| `{path.parent.relative_to(source).as_posix()}` | {told} |")
    return "\n".join([*lines[:2], *sorted(lines[2:])])


GENERATED = {"floors": floors, "rooms": rooms}
_GENERATED = re.compile(r"<!-- generated: (\w+) -->")


def reference(module: str) -> str:
    """Return the page of the public names of a module, each with its docstring."""
    called = module.replace("glassengine", "glass", 1)
    told = ast.get_docstring(_parsed(module)) or ""
    # What is indented in a docstring is code.
    lines = [f"# {called}", "", told, ""]
    for name, where in sorted(public_names(module).items(), key=lambda item: (item[0][0].isupper(), item[0])):
        own = next((other for other in ("errors", "results") if f".{other}." in where and other not in module), None)
        if own is None:
            lines += [f"::: {where}", "    options:", f"      heading: {called}.{name}", ""]
        else:  # described once
            lines += [f"### {called}.{name}", "", f"See [glass.{own}]({own}.md).", ""]
    return "\n".join(lines)


def public_names(module: str) -> dict[str, str]:
    """Return public name -> where it is defined, read from the source without running it; no modules."""
    for node in _parsed(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_PUBLIC":
            table: dict[str, str] = ast.literal_eval(node.value)
            places = {name: (*where.split(":"), name)[:2] for name, where in table.items()}
            return {name: ".".join(place) for name, place in places.items() if place[0] != f"{module}.{name}"}
    return {
        node.name: f"{path.relative_to(ROOT / 'src').with_suffix('').as_posix().replace('/', '.')}.{node.name}"
        for path in _files(module)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def _files(module: str) -> list[Path]:
    place = ROOT / "src" / module.replace(".", "/")
    return sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]


def _parsed(module: str) -> ast.Module:
    place = ROOT / "src" / module.replace(".", "/")
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))
