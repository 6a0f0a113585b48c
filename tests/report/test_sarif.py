"""SARIF logs are valid by the schema of OASIS, and place a finding on the guilty line in the repository.

`sarif-2.1.0-rtm.5.json` is the schema of OASIS as the package @microsoft/jest-sarif (MIT) has it, without descriptions.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema

from glassengine.cli.documents import json_text
from glassengine.report.findings import RULES
from glassengine.report.sarif import failed, repository_of, sarif
from glassengine.results import Comparison, Message
from tests.report.conftest import GUILTY

SCHEMA = json.loads((Path(__file__).parent / "sarif-2.1.0-rtm.5.json").read_text())


def valid(log: dict[str, Any]) -> dict[str, Any]:
    """Return the run of a log as it is written, after validation."""
    written = json.loads(json_text(log))
    jsonschema.Draft4Validator(SCHEMA).validate(written)
    (run,) = written["runs"]
    return dict(run)


def test_the_finding_is_on_the_line_of_the_candidate(wrong: Comparison, here: Path) -> None:
    run = valid(sarif([wrong], "check", repository_of(here / "models"), 1))
    (found,) = run["results"]
    assert (found["ruleId"], found["level"]) == ("glass/wrong", "error")
    (location,) = found["locations"]
    place = location["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "models/port.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 12, "snippet": {"text": GUILTY}}
    assert location["logicalLocations"] == [{"fullyQualifiedName": "./silu.0", "kind": "tensor"}]
    (beside,) = found["relatedLocations"]
    assert beside["physicalLocation"]["artifactLocation"]["uri"] == "ref.py"
    assert str(here) not in json.dumps(run), "no path of the machine"
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == [f"glass/{name}" for name in RULES]
    assert run["invocations"] == [{"executionSuccessful": True, "exitCode": 1}]


def test_the_fingerprint_stays_when_lines_move_and_numbers_change(wrong: Comparison, here: Path) -> None:
    first = wrong.first_divergence
    assert first is not None and first.candidate_source is not None

    def fingerprint(**changes: Any) -> str:
        one = dataclasses.replace(first, **changes)
        (found,) = valid(sarif([dataclasses.replace(wrong, first_divergence=one, origins=(one,))], "check", here, 1))[
            "results"
        ]
        return str(found["partialFingerprints"]["glassFinding/v1"])

    moved = first.candidate_source.replace(":12:", ":40:")
    assert fingerprint() == fingerprint(candidate_source=moved, noise_ratio=9.0)
    assert fingerprint() != fingerprint(site="./other.0")


def test_without_a_line_in_the_repository_the_file_of_the_candidate_is_the_place(wrong: Comparison, here: Path) -> None:
    first = wrong.first_divergence
    assert first is not None
    elsewhere = "transformers/models/llama/modeling_llama.py:7: x = y"
    other = dataclasses.replace(first, source=elsewhere, candidate_source=None)
    (found,) = valid(sarif([dataclasses.replace(wrong, first_divergence=other, origins=())], "check", here, 1))[
        "results"
    ]
    assert found["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "models/port.py"
    assert elsewhere in found["relatedLocations"][0]["message"]["text"]
    # Nothing that is outside of the repository becomes a location.
    outside = dataclasses.replace(first, source=None, candidate_source="/etc/passwd:1: root:x:0:0")
    nowhere = dataclasses.replace(wrong, first_divergence=outside, origins=(), baseline="Net", candidate="Port")
    (found,) = valid(sarif([nowhere], "check", here, 1))["results"]
    assert "physicalLocation" not in found["locations"][0]


def test_where_both_sides_run_one_line_the_place_is_what_made_the_candidate(wrong: Comparison, here: Path) -> None:
    first = wrong.first_divergence
    assert first is not None
    shared = dataclasses.replace(first, candidate_source=first.source)
    changed = dataclasses.replace(wrong, first_divergence=shared, origins=())
    (found,) = valid(sarif([changed], "check", here, 1))["results"]
    place = found["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "models/port.py" and place["region"] == {"startLine": 1}
    assert found["relatedLocations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "ref.py"


def test_ok_has_no_result_and_an_error_is_a_notification(wrong: Comparison, here: Path) -> None:
    ok = dataclasses.replace(wrong, ok=True, standing="ok", origins=(), first_divergence=None)
    assert valid(sarif([ok], "check", here, 0))["results"] == []
    run = valid(failed(Message("unknown model", "nowhere", None, "glass sites"), "check", 2))
    (invocation,) = run["invocations"]
    assert not invocation["executionSuccessful"] and invocation["exitCode"] == 2
    assert "unknown model. got: nowhere" in invocation["toolExecutionNotifications"][0]["message"]["text"]


def test_hostile_names_are_text(wrong: Comparison, here: Path) -> None:
    first = wrong.first_divergence
    assert first is not None
    evil = dataclasses.replace(first, site="[click](https://example.org)\x1b\u202e", noise_ratio=float("nan"))
    (found,) = valid(sarif([dataclasses.replace(wrong, first_divergence=evil, origins=())], "check", here, 1))[
        "results"
    ]
    assert "](" not in found["message"]["text"] and "\x1b" not in json.dumps(found, ensure_ascii=False)
    assert found["properties"]["noiseRatio"] == "nan"
