"""Findings as SARIF 2.1.0, which forges show as annotations of the guilty source line in a pull request."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from glassengine.environment import versions
from glassengine.reading.files import printable
from glassengine.report.findings import RULES, ReportFinding, SourceLine, findings
from glassengine.report.words import hint_details
from glassengine.results import Comparison, Message

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "%SRCROOT%"
_FACTORY = re.compile(r":\w+$")
_WARNINGS = frozenset({"suspicious"})
_IDS = list(RULES)


def sarif(
    results: Sequence[Comparison],
    command: str,
    root: Path,
    exit_status: int,
    asked_at: Sequence[tuple[str, int]] = (),
) -> dict[str, Any]:
    """Return the log of one command.

    Args:
        results: What it compared.
        command: Its name.
        root: Of the repository; paths below it are relative to it, and other paths do not become locations.
        exit_status: Of the command.
        asked_at: File and line that asked for each result, for findings without another place: of tests.
    """
    uris = dict(enumerate(asked_at))
    told = [
        _result(finding, result, root, uris.get(number))
        for number, result in enumerate(results)
        for finding in findings(result)
    ]
    # Of many tests the name of a run does not change when one is added.
    names = (
        [] if asked_at else [_slug(side, root) for side in (results[0].baseline, *(one.candidate for one in results))]
    )
    return _log(
        command,
        told,
        {"executionSuccessful": True, "exitCode": exit_status},
        automation="/".join(["glass", command, *names, ""]),
        properties={"ok": all(result.ok for result in results), "coverage": min(result.coverage for result in results)},
    )


def failed(error: Message, command: str, exit_status: int) -> dict[str, Any]:
    """Return the log of a command that ended with an error: it has no results, and a notification."""
    told = {"got": error.got, "expected": error.expected, "hint": error.hint}
    parts = [error.what, *(f"{name}: {text}" for name, text in told.items() if text)]
    notification = {"level": "error", "message": {"text": _text(". ".join(parts))}}
    invocation = {
        "executionSuccessful": False,
        "exitCode": exit_status,
        "toolExecutionNotifications": [notification],
    }
    return _log(command, [], invocation, automation=f"glass/{command}/")


def repository_of(here: Path) -> Path:
    """Return the nearest directory above that holds a repository; the directory itself where there is none."""
    here = here.resolve()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)


def _log(
    command: str,
    told: list[dict[str, Any]],
    invocation: dict[str, Any],
    *,
    automation: str,
    properties: dict[str, Any] | None = None,
) -> dict[str, Any]:
    driver = {
        "name": "Glass Engine",
        "semanticVersion": versions()["glassengine"] or "0.0.0",
        "rules": [_rule(name, text) for name, text in RULES.items()],
    }
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "automationDetails": {"id": automation},
        "invocations": [invocation],
        "originalUriBaseIds": {_ROOT: {"description": {"text": "The root of the repository."}}},
        "columnKind": "unicodeCodePoints",
        "results": told,
        "properties": {"command": command, **(properties or {})},
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(name: str, text: str) -> dict[str, Any]:
    title = "".join(word.capitalize() for word in name.split("-"))
    return {
        "id": f"glass/{name}",
        "name": title,
        "shortDescription": {"text": text},
        "help": {"text": f"{text} docs/concepts.md has the rule, docs/numerics.md how a tensor is judged."},
        "defaultConfiguration": {"level": "warning" if name in _WARNINGS else "error"},
    }


def _result(finding: ReportFinding, result: Comparison, root: Path, asked_at: tuple[str, int] | None) -> dict[str, Any]:
    physical, related = _places(finding, result, root)
    if physical is None and asked_at is not None:
        physical = _physical(SourceLine(*asked_at, ""), root)
    location: dict[str, Any] = {}
    if physical is not None:
        location["physicalLocation"] = physical
    if finding.site is not None:
        location["logicalLocations"] = [{"fullyQualifiedName": _text(finding.site), "kind": "tensor"}]
    document: dict[str, Any] = {
        "ruleId": f"glass/{finding.rule}",
        "ruleIndex": _IDS.index(finding.rule),
        "level": finding.level,
        "message": {"text": _text(finding.text)},
        "partialFingerprints": {"glassFinding/v1": _fingerprint(finding)},
        "properties": _properties(finding, result),
    }
    if location:
        document["locations"] = [location]
    if related:
        document["relatedLocations"] = related
    return document


def _places(
    finding: ReportFinding, result: Comparison, root: Path
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return where to show the finding, which is in the repository, and the lines beside it."""
    sides = [("The candidate's line", finding.candidate), ("The baseline's line", finding.baseline)]
    lines = [(words, line, _physical(line, root)) for words, line in sides if line is not None]
    own = None if finding.candidate is None or finding.is_shared else _physical(finding.candidate, root)
    others = [place for _, _, place in lines]
    where = next(filter(None, (own, _file(result.candidate, root), *others, _file(result.baseline, root))), None)
    related: list[dict[str, Any]] = []
    for words, line, place in lines:
        if place is not None and place != where:
            related.append({"id": len(related) + 1, "physicalLocation": place, "message": {"text": words}})
        elif place is None:
            # A package, or a file that is not here: its name is no path of this repository.
            text = _text(f"{words}: {line.place}: {line.code}")
            related.append({"id": len(related) + 1, "message": {"text": text}})
    return where, related


def _physical(line: SourceLine, root: Path) -> dict[str, Any] | None:
    path = _inside(Path(line.file), root)
    if path is None or line.line < 1:
        return None
    region: dict[str, Any] = {"startLine": line.line}
    if line.code:
        region["snippet"] = {"text": printable(line.code, also="\t")}
    return {"artifactLocation": {"uri": path, "uriBaseId": _ROOT}, "region": region}


def _file(side: str, root: Path) -> dict[str, Any] | None:
    """Return the place of a side that was named as a file or `file.py:factory`."""
    return _physical(SourceLine(_FACTORY.sub("", side), 1, ""), root)


def _inside(path: Path, root: Path) -> str | None:
    """Return the URI of a file relative to `root`; None where it is not below it, or is not there."""
    try:
        for folder in (Path.cwd(), root):
            found = (folder / path).resolve()
            if found.is_file() and found.is_relative_to(root):
                return quote(found.relative_to(root).as_posix())
    except (OSError, ValueError):
        return None
    return None


def _fingerprint(finding: ReportFinding) -> str:
    """Return what stays the same while lines move and numbers change."""
    origin = finding.divergence
    parts = [finding.rule, finding.site or ""]
    if origin is not None:
        parts += [origin.level or "", origin.group or origin.site, origin.candidate_site]
    if finding.candidate is not None:
        parts += [PurePath(finding.candidate.file).name, finding.candidate.code]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "backslashreplace")).hexdigest()[:32]


def _properties(finding: ReportFinding, result: Comparison) -> dict[str, Any]:
    hints = ["; ".join(f"{what}: {text}" for what, text in hint_details(hint)) for hint in finding.hints]
    properties: dict[str, Any] = {"verdict": result.verdict, "hints": list(map(_text, hints))}
    origin = finding.divergence
    if origin is not None:
        properties |= {"level": origin.level, "step": origin.step, "candidateSite": _text(origin.candidate_site)}
        properties |= {"noiseRatio": origin.noise_ratio, "boundRatio": origin.bound_ratio}
    return properties


def _text(text: str) -> str:
    """Return a text that no viewer obeys: neither control characters, nor the links that a message may hold."""
    return printable(text, also="\n\t").replace("](", "] (")


def _slug(side: str, root: Path) -> str:
    """Return a side in the name of a run, as short as its file and factory are."""
    name = side.removeprefix(f"{root}/") if len(side) <= 200 else side[-200:]
    return quote(PurePath(name).name or "model", safe=":.-_")
