"""Writes the schemas from the classes of the results.

    python -m glassengine.schemas.generate

What a class does not say is added here: every key is always there and no other is, numbers that are not finite are
words, and `--metrics` adds the key "metrics" to any document.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from glassengine.results import (
    ArtifactComparison,
    Comparison,
    Comparisons,
    Invariance,
    MetricsReport,
    ReportPage,
    SeriesComparison,
    SideBySide,
    WrittenReport,
)
from glassengine.results.base import Failure
from glassengine.results.comparison import SCHEMA_VERSION

_WORDS = {
    "check": "glass check --json, glass check-training --json",
    "compare": "glass compare --json",
    "report": "glass report --json; and the index in its page",
}
_DOCUMENTS = {
    "check": (Comparison, Invariance, Failure),
    "compare": (Comparison, Comparisons, SideBySide, ArtifactComparison, SeriesComparison, Failure),
    "report": (WrittenReport, ReportPage, Failure),
}
_NUMBER = {
    "description": "A number; one that is not finite is a word.",
    "anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}],
}
_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def generate(name: str) -> dict[str, Any]:
    """Return the schema of "check", "compare" or "report"."""
    documents = _DOCUMENTS[name]
    tops, definitions = msgspec.json.schema_components((*documents, MetricsReport), ref_template="#/$defs/{name}")
    generated = {title: _definition(definition) for title, definition in sorted(definitions.items())}
    for document in documents:
        properties = generated[document.__name__]["properties"]
        properties["schema_version"] = {"const": SCHEMA_VERSION}
        properties["metrics"] = {**tops[-1], "description": "With --metrics: counters and times of the process."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:glassengine:{name}:{SCHEMA_VERSION}",
        "title": _WORDS[name],
        "anyOf": list(tops[:-1]),
        "$defs": {**generated, "number": _NUMBER},
    }


def _definition(definition: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a class: closed, complete, its attributes described."""
    text = inspect.cleandoc(definition.get("description", ""))
    words, _, attributes = text.partition("\n\nAttributes:\n")
    described = {name: _one_line(meaning) for name, meaning in _ATTRIBUTE.findall(attributes)}
    properties = {
        name: {**_open(value), **({"description": described[name]} if name in described else {})}
        for name, value in definition["properties"].items()
    }
    return {
        "description": _one_line(words),
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


def _open(value: Any) -> Any:
    """Return a part of a schema without defaults, as every key is written, and with numbers that may not be finite."""
    if isinstance(value, list):
        return [_open(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "number":
        return {"$ref": "#/$defs/number"}
    choices = value.get("anyOf", ())
    if choices and all(set(choice) == {"type"} and choice["type"] != "number" for choice in choices):
        return {"type": [choice["type"] for choice in choices]}
    return {key: _open(item) for key, item in value.items() if key != "default"}


def _one_line(text: str) -> str:
    return " ".join(text.split())


def text_of(name: str) -> str:
    """Return the content of the file of a schema."""
    return json.dumps(generate(name), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for each in _DOCUMENTS:
        Path(__file__).with_name(f"{each}.json").write_text(text_of(each), encoding="utf-8")
