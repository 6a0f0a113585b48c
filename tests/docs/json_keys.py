"""The tables of docs/json/: the keys of every document, from the result classes and their docstrings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from typing import Any, Literal, get_origin, is_typeddict

from glassengine import results
from glassengine.engine.build.plan import BuildPlan
from glassengine.engine.manifest import Manifest

CLASSES: dict[str, Any] = {"BuildPlan": BuildPlan, "Manifest": Manifest}
"""What a document is made of, by name; of two of one name the second has that of its module in front."""
for _module in pkgutil.iter_modules(results.__path__, f"{results.__name__}."):
    for _name, _class in vars(importlib.import_module(_module.name)).items():
        if (dataclasses.is_dataclass(_class) or is_typeddict(_class)) and _class not in CLASSES.values():
            CLASSES[f"{_module.name.rpartition('.')[2]}.{_name}" if _name in CLASSES else _name] = _class
FUNCTIONS_ONLY = {
    *("ConformanceReport", "Finding"),
    *("Fallback", "PendingTensor"),
    *("KernelMistake", "Match", "Sweep", "SweepCase", "TensorMatch"),
    *("Decision", "Findings", "Policy"),
}
"""What only functions of Python return."""
_WORDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "None": "null", "Any": "anything"}
_LINK = re.compile(r"\[([\w.]+)\]\(\)")
_NAMES = re.compile(r"<!-- keys: ([\w. ]+) -->")
_TABLE = re.compile(r"(<!-- keys: ([\w. ]+) -->\n)(.*?)(<!-- end of keys -->)", re.DOTALL)


def written(pages: dict[str, str]) -> dict[str, str]:
    """Return file name -> page with its tables as the classes are now; links lead to the page that has the class."""
    places = {name: page for page, text in pages.items() for name in " ".join(_NAMES.findall(text)).split()}

    def filled(page: str, text: str) -> str:
        made = _TABLE.sub(lambda found: found[1] + "\n".join(map(table, found[2].split())) + found[4], text)
        return _LINK.sub(lambda name: f"[{name[1]}]({link(page, name[1])})", made)

    def link(page: str, name: str) -> str:
        return f"{'' if places[name] == page else places[name]}#{name.replace('.', '').lower()}"

    return {page: filled(page, text) for page, text in pages.items()}


def table(name: str) -> str:
    """Return the heading, the first sentence and the keys of a class."""
    doc = inspect.getdoc(CLASSES[name]) or ""
    meanings = {"schema_version": "Of the document.", "format": "Of the file.", **attributes(doc)}
    lines = [f"\n### {name}\n", f"{doc.partition(chr(10) * 2)[0].replace(chr(10), ' ')}\n"]
    lines += ["| key | type | meaning |", "|---|---|---|"]
    for key, kind in types(CLASSES[name]).items():
        meaning = meanings.get(key, "").replace("|", "\\|")
        lines.append(f"| `{key}` | {json_type(kind, CLASSES[name])} | {meaning} |")
    return "\n".join(lines) + "\n"


def types(cls: Any) -> dict[str, str]:
    """Return key -> annotation, as the source has it."""
    if is_typeddict(cls):
        return {key: kind.__forward_arg__ for key, kind in cls.__annotations__.items()}
    return {field.name: str(field.type) for field in dataclasses.fields(cls)}


def attributes(doc: str) -> dict[str, str]:
    """Return name -> text of the "Attributes:" or "Args:" of a docstring."""
    _, _, section = doc.partition("Attributes:\n")
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if head := re.match(r"    (\w+): (.*)", line):
            name = head[1]
            found[name] = head[2]
        elif name and line.startswith("        "):
            found[name] += " " + line.strip()
        elif line.strip():
            break
    return found


def json_type(annotation: str, cls: Any) -> str:
    """Return what an annotated field is in JSON, with a link where it is an object of its own."""
    parts = re.split(r" \| (?![^\[]*\])", annotation)
    if len(parts) > 1:
        return " or ".join(json_type(part, cls) for part in parts)
    base, _, inside = annotation.partition("[")
    of_module = vars(importlib.import_module(cls.__module__))
    if base == "Literal" or get_origin(of_module.get(base)) is Literal:
        return "string"
    if base in ("tuple", "list", "Sequence"):
        of = json_type(inside.removesuffix("]").partition(", ...")[0].partition(", ")[0], cls)
        return f"list of {of}"
    if base in ("Mapping", "dict"):
        of = inside.removesuffix("]").partition(", ")[2]
        return f"object of {json_type(of, cls)}" if of in CLASSES else "object"
    name = next((name for name, other in CLASSES.items() if other is of_module.get(base)), base)
    if name in CLASSES:
        return f"[{name}]()"
    return _WORDS.get(base, "object")
