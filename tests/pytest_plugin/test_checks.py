"""The plugin in a project made for the test: two models, one of them wrong."""

from __future__ import annotations

import copy
import json
import logging
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest
import torch

import glassengine as glass
from tests.report.conftest import REFERENCE

pytest_plugins = ["pytester"]

SCHEMA = Path(__file__).parent.parent / "report/sarif-2.1.0-rtm.5.json"
# Of Jenkins, under the MIT license; from pytest's source distribution, whose own tests hold its files to it.
SCHEMA_OF_JUNIT = Path(__file__).with_name("junit-10.xsd")
MODELS = f"""{REFERENCE}
class Wrong(Net):
    def forward(self, x):
        hidden = nn.functional.gelu(self.up(x))
        return self.down(hidden)

INPUTS = {{"x": torch.randn(4, 16, generator=torch.Generator().manual_seed(1))}}
"""
TESTS = """
import pytest
from models import INPUTS, Net, Wrong

def test_right(glass_check):
    assert glass_check(Net().eval(), Net().eval(), inputs=INPUTS).ok

def test_wrong(glass_check):
    glass_check(Net().eval(), Wrong().eval(), inputs=INPUTS)

def test_without():
    pass
"""
# An environment that was installed before the plugin was there does not load it by itself.
LOAD = (
    [] if any(e.name == "glassengine" for e in entry_points(group="pytest11")) else ["-p", "glassengine.pytest_plugin"]
)


@pytest.fixture(scope="module", autouse=True)
def _loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load torch and the judge: pytester forgets what is imported first within it, and torch cannot be loaded twice."""
    folder = tmp_path_factory.mktemp("loaded")
    torch.save({"input": torch.ones(1, 2)}, folder / "x.pt")
    model = torch.nn.Linear(2, 2).eval()
    assert glass.check(model, candidate=copy.deepcopy(model), inputs=str(folder / "x.pt")).ok
    with glass.record(model, folder / "run"):
        model(torch.ones(1, 2))
    assert glass.compare(folder / "run", folder / "run").ok


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(models=MODELS, test_port=TESTS)
    pytester.makeini("[pytest]\npythonpath = .\njunit_family = xunit2\naddopts = --strict-markers\n")
    pytester.mkdir(".git")
    return pytester


def run(project: pytest.Pytester, *words: str) -> pytest.RunResult:
    return project.runpytest_inprocess(*LOAD, "-p", "no:cacheprovider", *words)


def junit(project: pytest.Pytester) -> dict[str, dict[str, str]]:
    """Return test -> properties, of a file that has what the schema of JUnit files asks for."""
    root = ET.parse(project.path / "junit.xml").getroot()
    assert root.tag == "testsuites" and {suite.tag for suite in root} == {"testsuite"}
    for suite in root:
        assert {"name", "tests", "failures", "errors"} <= suite.attrib.keys()
        assert {case.tag for case in suite} <= {"testcase", "properties", "system-out", "system-err"}
    cases = {case.attrib["name"]: case for case in root.iter("testcase")}
    allowed = {"properties", "skipped", "error", "failure", "system-out", "system-err"}
    assert all({part.tag for part in case} <= allowed for case in cases.values())
    return {
        name: {found.attrib["name"]: found.attrib["value"] for found in case.iter("property")}
        for name, case in cases.items()
    }


def test_the_junit_file_follows_its_schema(project: pytest.Pytester) -> None:
    """But for where properties stand: pytest writes those of a test into its case, the schema has them in suites."""
    etree = pytest.importorskip("lxml.etree", reason="lxml is not installed")
    schema = etree.XMLSchema(etree.parse(SCHEMA_OF_JUNIT))
    run(project, "--junitxml=junit.xml", "-k", "wrong or without").assert_outcomes(passed=1, failed=1, deselected=1)
    document = etree.parse(project.path / "junit.xml")
    found = document.findall(".//testcase/properties")
    assert len(found) == 1 and len(found[0]) > 5 and not schema.validate(document)
    for properties in found:
        schema.assertValid(etree.ElementTree(copy.deepcopy(properties)))
        properties.getparent().remove(properties)
    schema.assertValid(document)
    # Planted: a word that no schema knows.
    etree.SubElement(document.find(".//testcase"), "glass")
    assert not schema.validate(document)


def test_a_failing_test_shows_the_screen_and_leaves_junit_and_sarif(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This suite turns off what torch logs of its compiler; that of a user does not.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", False)
    done = run(project, "--junitxml=junit.xml", "--glass-report", "out", "-rf")
    done.assert_outcomes(passed=2, failed=1)
    text = done.stdout.str()
    for part in (
        "glass: ",
        ">       glass_check(Net().eval(), Wrong().eval(), inputs=INPUTS)",
        "NotOk: NOT OK: gelu in place of silu (proven)",
        "first divergence: ./silu.0",
        "silu in the baseline, gelu in the candidate",
        "hidden = nn.functional.gelu(self.up(x))",
        "2 comparisons in out, findings in out/glass.sarif",
    ):
        assert part in text, part
    assert "torch.__trace" not in text
    assert "pytest_plugin/checks.py" not in text, "no line of the plugin in the traceback"

    properties = junit(project)
    of_wrong = properties["test_wrong"]
    assert of_wrong["glass.ok"] == "false" and of_wrong["glass.verdict"] == "wrong"
    assert (
        of_wrong["glass.site"] == "./silu.0" and of_wrong["glass.hint"] == "silu in the baseline, gelu in the candidate"
    )
    assert of_wrong["glass.candidate_source"].startswith("models.py:18: hidden = ")
    assert properties["test_right"]["glass.ok"] == "true" and properties["test_without"] == {}

    log = json.loads((project.path / "out/glass.sarif").read_text())
    jsonschema.Draft4Validator(json.loads(SCHEMA.read_text())).validate(log)
    (found,) = log["runs"][0]["results"]
    place = found["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "models.py" and place["region"]["startLine"] == 18
    assert len(list((project.path / "out").glob("*.json"))) == 2
    assert len(list((project.path / "out").glob("*/index.html"))) == 2


RECORDED = """
import pytest, torch
from models import INPUTS, Net, Wrong

@pytest.mark.parametrize("case", ["a/b", "a:b"])
def test_as_before(glass_check, case):
    model = KIND().eval()
    assert glass_check.recorded(model, lambda: model(**INPUTS)).ok
"""


def test_baselines_are_stored_and_refreshed_by_the_flag(project: pytest.Pytester) -> None:
    project.makepyfile(test_port=RECORDED.replace("KIND", "Net"))
    done = run(project)
    done.assert_outcomes(failed=2)
    assert "no baseline is stored for this test" in done.stdout.str() and "pytest --glass-update" in done.stdout.str()
    done = run(project, "--glass-update")
    done.assert_outcomes(passed=2)
    assert done.stdout.str().count("stored ") == 2 and "storing baselines" in done.stdout.str()
    stored = sorted((project.path / "glass_baselines/test_port").iterdir())
    assert len(stored) == 2 and all((path / "baseline/recording.json").is_file() for path in stored)
    run(project).assert_outcomes(passed=2)

    project.makepyfile(test_port=RECORDED.replace("KIND", "Wrong"))
    done = run(project)
    done.assert_outcomes(failed=2)
    assert "first divergence" in done.stdout.str()
    run(project, "--glass-update").assert_outcomes(passed=2)
    run(project).assert_outcomes(passed=2)


MARKED = """
import pytest, torch
pytestmark = pytest.mark.glass(atol=10.0, fail_on="suspicious")

def compared(glass_check, **options):
    torch.save({"a": torch.zeros(3)}, "one.pt")
    torch.save({"a": torch.ones(3)}, "two.pt")
    return glass_check.compare("one.pt", "two.pt", **options)

def test_of_the_module(glass_check):
    compared(glass_check)

@pytest.mark.glass(atol=1e-3)
def test_nearer(glass_check):
    compared(glass_check)

def test_given(glass_check):
    compared(glass_check, atol=1e-3)

def test_twice(glass_check):
    compared(glass_check)
    compared(glass_check)

@pytest.mark.glass(atoll=1)
def test_misspelled(glass_check):
    compared(glass_check)
"""


def test_options_of_marks_the_nearest_first(project: pytest.Pytester) -> None:
    project.makepyfile(test_port=MARKED)
    done = run(project, "-rf", "--junitxml=junit.xml")
    done.assert_outcomes(passed=2, failed=3)
    text = done.stdout.str()
    for part in ("test_nearer - ", "test_given - ", "unknown option of the mark glass 'atoll'", "nearest: atol"):
        assert part in text
    assert {"glass.ok", "glass.2.ok"} <= junit(project)["test_twice"].keys()


@pytest.mark.slow
def test_workers_send_what_they_found(project: pytest.Pytester) -> None:
    project.makepyfile(test_port=MARKED)
    done = project.runpytest_subprocess(
        *LOAD, "-n", "1", "-p", "no:cacheprovider", "--junitxml=junit.xml", "--glass-report", "out", timeout=300
    )
    done.assert_outcomes(passed=2, failed=3)
    text = done.stdout.str()
    assert "NotOk: NOT OK" in text and "5 comparisons in out" in text
    assert junit(project)["test_given"]["glass.verdict"] == "wrong"
    assert len(json.loads((project.path / "out/glass.sarif").read_text())["runs"][0]["results"]) == 2
