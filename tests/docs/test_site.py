"""The documentation site builds without a warning, and its workflow files and forms are valid and ask for little."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.test_house import locked

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / ".venv-tools/bin"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
# `make test` installs them, and a test below holds it to that.
needs_tools = pytest.mark.skipif(not TOOLS.is_dir(), reason="needs the tools: make .venv-tools/.installed")


def tool(*words: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run one of the tools, whose settings are the repository's."""
    command = [TOOLS / words[0], *words[1:]]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=600)


def test_the_tests_install_the_tools(root: Path) -> None:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    assert "\ntest: $(STAMP) $(TOOLS)/.installed\n" in makefile


def test_the_tools_that_both_environments_have_are_one_version(root: Path) -> None:
    tests, tools = locked(root, "tests.lock"), locked(root, "tools.lock")
    assert tests["ruff"] == tools["ruff"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning as an error."""
    folder = tmp_path_factory.mktemp("site")
    done = tool("mkdocs", "build", "--strict", "-d", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@needs_tools
def test_every_document_is_a_page(site: Path, root: Path) -> None:
    for path in (root / "docs").rglob("*.md"):
        page = path.relative_to(root / "docs").with_suffix("")
        assert (site / page / "index.html").is_file(), page
    for name in ("limitations", "changelog", "contributing", "security", "conduct"):
        assert (site / name / "index.html").is_file(), name


@needs_tools
def test_links_between_documents_lead_to_pages(site: Path) -> None:
    # From a document at the root into docs/, and back.
    assert 'href="concepts/"' in (site / "index.html").read_text(encoding="utf-8")
    assert 'href="../../security/"' in (site / "guide/trust/index.html").read_text(encoding="utf-8")
    # What is no page is not linked where the repository has no address.
    assert "../src/" not in (site / "contributing/index.html").read_text(encoding="utf-8")


@needs_tools
@pytest.mark.parametrize("module", ["", "compat", "metrics", "profiler", "results", "snapshots"])
def test_every_public_name_is_in_the_reference(module: str, site: Path) -> None:
    page = (site / "api" / module / "index.html").read_text(encoding="utf-8")
    found = set(re.findall(r"<h3 id=[^>]*>\s*glass\.(?:\w+\.)*(\w+)[\s<]", page))
    public = importlib.import_module(f"glassengine.{module}".rstrip("."))
    there = {name: getattr(public, name) for name in getattr(public, "__all__", dir(public))}
    wanted = {name for name, value in there.items() if inspect.isclass(value) or inspect.isroutine(value)}
    # Of the results, their types.
    assert {name for name in wanted - found if module != "results" or inspect.isclass(there[name])} == set()


@needs_tools
def test_a_planted_dead_link_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[nowhere](nothing.md) and [no part](#nothing)\n")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    validation = re.search(r"^validation:\n(?:  .*\n)+", settings, re.MULTILINE)
    assert validation is not None
    (tmp_path / "mkdocs.yml").write_text("site_name: planted\n" + validation[0])
    done = tool("mkdocs", "build", "--strict", cwd=tmp_path)
    assert done.returncode != 0
    assert "nothing.md" in done.stderr and "#nothing" in done.stderr


FORGE = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.github-actions": [ROOT / "action.yml"],
    "vendor.github-issue-forms": sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[0-9]-*.yml")),
}
CHECKED = """
import json, sys
from check_jsonschema import main
for schema, paths in json.loads(sys.argv[1]).items():
    if main(["--builtin-schema", schema, *paths], standalone_mode=False):
        sys.exit(f"not as {schema}")
"""


@needs_tools
def test_files_of_the_forge_have_their_schema(tmp_path: Path) -> None:
    assert all(FORGE.values())
    good = {schema: list(map(str, paths)) for schema, paths in FORGE.items()}
    done = tool("python", "-c", CHECKED, json.dumps(good))
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "action.yml").write_text("name: planted\nruns: {using: nothing}\n")
    done = tool("python", "-c", CHECKED, json.dumps({"vendor.github-actions": [str(tmp_path / "action.yml")]}))
    assert done.returncode != 0


@needs_tools
def test_workflows_ask_for_little_and_pin_what_they_use() -> None:
    done = tool(
        "zizmor", "--offline", "--strict-collection", "--persona", "pedantic", "--no-progress", ".github", "action.yml"
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_tools
def test_a_planted_workflow_that_asks_for_much_is_found(tmp_path: Path) -> None:
    folder = tmp_path / ".github/workflows"
    folder.mkdir(parents=True)
    text = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    (folder / "tests.yml").write_text(text.replace("permissions:\n      contents: read", "permissions: write-all", 1))
    done = tool("zizmor", "--offline", "--no-progress", tmp_path)
    assert done.returncode != 0 and "permissions" in done.stdout


def test_every_action_is_pinned_by_hash_with_its_version(root: Path) -> None:
    for path in WORKFLOWS:
        for line in path.read_text(encoding="utf-8").splitlines():
            if "uses:" in line:
                assert re.search(r"uses: [\w/.-]+@[0-9a-f]{40} # v[\d.]+$", line), f"{path.name}: {line}"


def test_every_job_ends_in_time_and_makes_a_target_of_the_makefile(root: Path) -> None:
    targets = set(re.findall(r"^([\w./-]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    targets.add(".venv/.installed")  # $(STAMP)
    for path in WORKFLOWS:
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
        assert all(job["timeout-minutes"] <= 90 for job in jobs.values()), path.name
        for step in (step for job in jobs.values() for step in job["steps"]):
            for target in re.findall(r"\bmake (\S+)", step.get("run", "")):
                assert target in targets, f"{path.name}: make {target}"


def test_every_flag_that_a_form_names_is_a_flag(root: Path) -> None:
    from glassengine.cli.main import load_command

    known = {flag for name in ("check", "snapshot", "doctor") for p in load_command(name).params for flag in p.opts}
    for path in (root / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        assert set(re.findall(r"--[a-z-]+", path.read_text(encoding="utf-8"))) <= known, path.name
