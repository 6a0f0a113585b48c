"""The house is in order: what the repository promises to someone who has just cloned it."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import glassengine

# Absolute paths of somebody's machine, and hosts that belong into pip's configuration.
PRIVATE = re.compile(
    r"(?<![\w.])/(?:work|home|root|Users|mnt)/\w|[\w.-]*(?:artifactory|nexus|devpi)[\w.-]*\.\w+"
    r"|--(?:extra-)?index-url|--trusted-host|PIP_INDEX_URL|https?://[\w.-]+/simple\b",
    re.IGNORECASE,
)
# Found in every line that is, and a tenth of the time.
ROUGHLY_PRIVATE = re.compile(
    "/(?:work|home|root|users|mnt)/|artifactory|nexus|devpi|index-url|trusted-host|pip_index_url|/simple", re.IGNORECASE
)


# Tests lie where the module lies that they test: `src/glassengine/a/b.py` is tested by `tests/a/test_b.py`. Others ask
# a question of a whole, and lie in a folder of one of these names.
TOPICS = {
    "end_to_end": "in the folder of a unit: its commands and classes on whole models, whole recordings, whole runs",
    "benchmarks": "beside src in the repository",
    "docs": "beside src in the repository: its examples, its pages as a site, the exercise for newcomers",
    "examples": "beside src in the repository",
    "faults": "system calls that fail, one after the other",
    "foreign": "models of other packages, in an environment of their own",
    "foreign_onnx": "ONNX files of other tools, in an environment of their own",
    "serving_engines": "engines in environments of their own",
    "fuzz": "changed files of every kind",
    "trust": "files that an attacker wrote",
}
# What holds for the whole repository, and what helps all tests, is tested beside these folders.
OF_THE_HOUSE = {
    "architecture",
    "children",
    "compatibility",
    "docker",
    "exporting_once",
    "house",
    "import",
    "platforms",
    "readme",
    "wheel",
}


def private_lines(text: str) -> list[str]:
    """Return the lines of `text` that name somebody's machine or a package index host."""
    return [line for line in text.splitlines() if PRIVATE.search(line)] if ROUGHLY_PRIVATE.search(text) else []


def tracked(root: Path) -> list[Path]:
    """Return the text files of the repository that git tracks."""
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True).stdout
    return [root / name for name in listed.decode().split("\0") if name and (root / name).is_file()]


def outside_make() -> dict[str, str]:
    """Return the environment without what a `make` that runs this suite passes on to the one a test runs."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pins(root: Path) -> dict[str, str]:
    """Return canonical name -> version of constraints.txt; every line must be an exact pin."""
    found = {}
    for line in (root / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, exactly, version = line.partition("==")
            assert exactly, f"not an exact pin: {line}"
            found[canonicalize_name(name)] = version
    return found


# The installation for the tests leaves out a hundred megabytes that need nothing else, and the stores of two clouds.
NOT_INSTALLED = {"adlfs", "gcsfs", "tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs"}


# An environment without them runs all tests but those in a browser, which skip with that reason.
OF_THE_BROWSER = {"axe-playwright-python", "greenlet", "playwright"}
# Nor those of the server of tools and of plots.
OF_TOOLS = {
    "mcp",
    "mcp-types",
    "opentelemetry-api",
    "pyjwt",
    "python-multipart",
    "sse-starlette",
    "starlette",
    "uvicorn",
}
# Nor the one of the schema of JUnit files.
OF_SCHEMAS = {"lxml"}
# Nor those of adapters.
OF_ADAPTERS = {"accelerate", "peft", "psutil"}
OF_PLOTS = {"contourpy", "cycler", "fonttools", "kiwisolver", "matplotlib", "pyparsing"}


def is_here(name: str) -> bool:
    """Return whether a package is installed; only one of those above may be missing."""
    try:
        distribution(name)
    except PackageNotFoundError:
        if name in OF_THE_BROWSER | OF_TOOLS | OF_PLOTS | OF_SCHEMAS | OF_ADAPTERS:
            return False
        raise
    return True


def direct(project: dict[str, Any]) -> list[Requirement]:
    extras = project["project"]["optional-dependencies"].values()
    return [Requirement(text) for text in sum(extras, project["project"]["dependencies"])]


def test_constraints_pin_every_direct_dependency_within_its_bounds(
    project: dict[str, Any], pins: dict[str, str]
) -> None:
    for requirement in direct(project):
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned is not None, f"{requirement} is not pinned"
        assert requirement.specifier.contains(pinned), f"{requirement} excludes its pin {pinned}"


def test_constraints_pin_every_transitive_dependency(project: dict[str, Any], pins: dict[str, str]) -> None:
    waiting = [requirement.name for requirement in direct(project)]
    seen: set[str] = set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        assert name in pins, f"{name} is not pinned"
        needed = (
            [] if name in NOT_INSTALLED or not is_here(name) else [Requirement(text) for text in requires(name) or ()]
        )
        # An accelerated build of torch brings its own exactly pinned libraries.
        waiting += [
            r.name
            for r in needed
            if (r.marker is None or r.marker.evaluate({"extra": ""}))
            and not r.name.startswith(("nvidia-", "cuda-", "triton"))
        ]


def test_pins_carry_no_local_label(pins: dict[str, str]) -> None:
    # 2.13.0+cpu would be found on one index only; 2.13.0 matches it as well.
    assert [name for name, version in pins.items() if Version(version).local] == []


def locked(root: Path, name: str) -> dict[str, tuple[str, list[str]]]:
    """Return canonical name -> (version, hashes) of a lock file; every line must be a pin or a hash."""
    found: dict[str, tuple[str, list[str]]] = {}
    for line in (root / "requirements" / name).read_text(encoding="utf-8").splitlines():
        if pin := re.fullmatch(r"([\w.-]+)==([\w.+!-]+)(?: ; [^#]+?)?(?: \\)?", line):
            hashes: list[str] = []
            found[canonicalize_name(pin[1])] = (pin[2], hashes)
        elif digest := re.fullmatch(r"    --hash=sha256:([0-9a-f]{64})(?: \\)?", line):
            hashes.append(digest[1])
        else:
            assert line.startswith("#"), f"neither a pin nor a hash: {line}"
    return found


def test_the_locks_are_of_the_pins_and_every_one_has_hashes(root: Path, pins: dict[str, str]) -> None:
    tests, torch = locked(root, "tests.lock"), locked(root, "torch.lock")
    wanted = pins.keys() - NOT_INSTALLED
    assert tests.keys() | torch.keys() == wanted, "make lock"
    assert torch.keys() == {"torch"}, "in many builds, and so by itself"
    found = tests | torch
    assert {name: version for name, (version, _) in found.items() if version != pins[name]} == {}, "make lock"
    tools = locked(root, "tools.lock")
    for line in (root / "requirements/tools.in").read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("==")
        assert tools[name][0] == version, "make lock"
    for name, (_, hashes) in [*found.items(), *tools.items()]:
        assert hashes and len(set(hashes)) == len(hashes), name


def test_installed_packages_are_locked(root: Path) -> None:
    """An environment of the tests that was made in another way is not what CI has."""
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"pip install (.*)", makefile)
    unhashed = [line for line in commands if "--require-hashes" not in line]
    # torch of any build with what it needs, this package itself, and packages of other people's models.
    assert [line.split(" -")[0] for line in unhashed if "requirements.txt" not in line] == [
        "-c constraints.txt dist/*.whl pytest",  # as a user installs the wheel
        "-c constraints.txt torch",
        "--no-deps",
    ]


def test_the_security_rules_hold_where_users_code_meets_ours(project: dict[str, Any]) -> None:
    lint = project["tool"]["ruff"]["lint"]
    assert "S" in lint["select"]
    assert [rule for rule in lint["ignore"] if rule.startswith("S")] == ["S101"]
    assert not any(pattern.startswith("src") for pattern in lint["per-file-ignores"])


def test_metadata(project: dict[str, Any]) -> None:
    metadata = project["project"]
    assert metadata["name"] == "glassengine"
    assert metadata["requires-python"] == ">=3.11"
    assert metadata["license"] == "Apache-2.0"
    # `uvx glassengine` runs the command of the name of the package.
    assert metadata["scripts"] == dict.fromkeys(("glass", "glassengine"), "glassengine.cli.__main__:run")
    assert {"onnx", "dev"} <= metadata["optional-dependencies"].keys()


def test_license(root: Path) -> None:
    text = (root / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text


def test_typed_marker_and_data_files_are_shipped(project: dict[str, Any], root: Path) -> None:
    data = project["tool"]["setuptools"]["package-data"]
    assert "py.typed" in data["glassengine"]
    assert (root / "src/glassengine/py.typed").is_file()


def test_every_folder_of_the_package_is_a_package(root: Path) -> None:
    # A folder without __init__.py works in an editable installation and is missing from the wheel.
    folders = {path.parent for path in (root / "src/glassengine").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def homeless(root: Path) -> list[str]:
    """Return the test files that belong to no module or room of the package, and to none of the topics."""
    found = []
    for path in (root / "tests").rglob("test_*.py"):
        place = path.relative_to(root / "tests").parent
        name = path.stem.removeprefix("test_")
        module = root / "src/glassengine" / place / name
        is_of_a_topic = bool(TOPICS.keys() & set(place.parts)) or (not place.parts and name in OF_THE_HOUSE)
        if not (is_of_a_topic or module.with_suffix(".py").is_file() or module.is_dir()):
            found.append(str(path.relative_to(root)))
    return found


def test_tests_lie_where_their_modules_lie(root: Path, tmp_path: Path) -> None:
    assert homeless(root) == []
    folders = {path.name for path in (root / "tests").rglob("*") if any(path.glob("test_*.py"))}
    assert TOPICS.keys() <= folders
    # Planted: a test whose module has moved away.
    (tmp_path / "tests/numerics").mkdir(parents=True)
    (tmp_path / "tests/numerics/test_noise.py").touch()
    assert homeless(tmp_path) == ["tests/numerics/test_noise.py"]


def test_every_folder_of_tests_is_collected(root: Path, pytestconfig: pytest.Config) -> None:
    """Some names, "build" among them, pytest leaves out by itself and without a word."""
    left_out = pytestconfig.getini("norecursedirs")
    folders = {part for path in root.glob("tests/**/test_*.py") for part in path.relative_to(root).parts[:-1]}
    assert "build" in folders and not [name for name in folders if any(fnmatch(name, own) for own in left_out)]


def test_readme_begins_with_the_installation_and_a_command(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    assert re.match(r"# Glass Engine\n\n    pip install glassengine .*\n    glass check .*\n\n```text\nNOT OK: ", text)
    assert "make demo" in text and "make test" in text


@pytest.mark.parametrize(
    "name", ["CHANGELOG.md", "CONTRIBUTING.md", "LIMITATIONS.md", "SECURITY.md", ".pre-commit-config.yaml"]
)
def test_house_documents(root: Path, name: str) -> None:
    assert (root / name).read_text(encoding="utf-8").strip()


def test_the_changelog_begins_with_this_version_in_60_lines(root: Path) -> None:
    newest = (root / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    assert re.match(rf"{re.escape(glassengine.__version__)} \(\d{{4}}-\d\d-\d\d\)\n", newest)
    assert len(newest.splitlines()) <= 60
    kinds = re.findall(r"^### (\w+)$", newest, re.MULTILINE)
    assert kinds == [kind for kind in ("Added", "Changed", "Fixed", "Removed") if kind in kinds]


def test_removals_name_what_to_use_instead(root: Path) -> None:
    newest = (root / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    entries = newest.partition("### Removed\n")[2].split("\n- ")[1:]
    entries += [path.read_text(encoding="utf-8") for path in (root / "changelog.d").glob("*.removed.md")]
    without = [entry for entry in entries if not re.search(r"\b(?:use|install|sign|record|again)\b", entry)]
    assert without == []


def test_fragments_of_the_changelog_have_a_kind_and_plain_names(root: Path) -> None:
    names = {path.name for path in (root / "changelog.d").iterdir()} - {"README.md", "template.md.jinja"}
    kinds = "|".join(
        kind["directory"] for kind in tomllib.loads((root / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    )
    assert [name for name in names if not re.fullmatch(rf"[a-z0-9-]+\.(?:{kinds})\.md", name)] == []


def test_ci_is_executable(root: Path) -> None:
    assert os.access(root / ".ci/run", os.X_OK)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("lint", [0, 1])
@pytest.mark.parametrize("status", [0, 1])
def test_ci_ends_with_the_summary_and_passes_the_status_on(root: Path, tmp_path: Path, lint: int, status: int) -> None:
    # Planted: a `make test` that ends as pytest does, and a `make lint`, well and badly.
    shutil.copytree(root / ".ci", tmp_path / ".ci")
    text = f"lint:\n\t@echo ruff; exit {lint}\ntest:\n\t@echo '1 test in 0.1s'; exit {status}\n"
    (tmp_path / "Makefile").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [tmp_path / ".ci/run"], env=outside_make(), capture_output=True, text=True, timeout=600, check=False
    )
    said = ["make lint has failed"] if lint else []
    assert done.stdout.splitlines() == ["ruff", *said, "1 test in 0.1s"]
    assert (done.returncode != 0) == bool(lint or status)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_makefile_offers_the_promised_targets(root: Path) -> None:
    for target, part in {
        "demo": "glass check examples/tiny-llama",
        "test": 'not slow"',
        "test-all": "pytest",
        "lint": "mypy --strict",
        "bench": "benchmarks",
        "audit": "pip-audit --strict",
        "sbom": "cyclonedx-py environment",
        "lock": "requirements/lock.py",
    }.items():
        done = subprocess.run(
            ["make", "-n", target],
            cwd=root,
            env=outside_make(),
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        )
        assert part in done.stdout


def test_no_machine_paths_or_index_hosts_in_tracked_files(root: Path) -> None:
    found = {}
    for path in tracked(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path != Path(__file__).resolve() and (lines := private_lines(text)):
            found[str(path.relative_to(root))] = lines[:3]
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "see /home/somebody/model",
        'path = "/work/main/src"',
        "pip install --index-url x",
        "https://pypi.example.org/simple/torch",
        "https://artifactory.example.org/x",
    ],
)
def test_planted_private_line_is_found(line: str) -> None:
    assert private_lines(line) == [line]


@pytest.mark.parametrize("line", ["~/.cache/huggingface", "/proc/cpuinfo", "docs/root/x", "artifacts", "a/home/page"])
def test_ordinary_line_is_not_private(line: str) -> None:
    assert private_lines(line) == []


@functools.cache
def style(root: Path) -> re.Pattern[str]:
    """Return what the style files find: rules in the format of vale, each a pattern and what to write in its place."""
    rules = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((root / ".vale/Glass").glob("*.yml"))]
    return re.compile("|".join(rf"\b(?:{pattern})(?!\w)" for rule in rules for pattern in rule["swap"]), re.IGNORECASE)


def wrong_words(text: str, rules: re.Pattern[str]) -> list[str]:
    """Return the words of a text that the style files replace; code in backticks may say anything."""
    return [match[0] for match in rules.finditer(re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL))]


def strings_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string of a module, docstrings included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_documents_messages_and_docstrings_are_in_plain_english(root: Path) -> None:
    found = {}
    # The reference lists the names of keys and classes.
    for path in {*root.glob("*.md"), *(root / "docs").rglob("*.md")} - {*(root / "docs/json").glob("*.md")}:
        if words := wrong_words(path.read_text(encoding="utf-8"), style(root)):
            found[str(path.relative_to(root))] = words
    for path in (root / "src").rglob("*.py"):
        for line, text in strings_of(path.read_text(encoding="utf-8")):
            # One word is a key, or a name.
            if " " in text and (words := wrong_words(text, style(root))):
                found[f"{path.relative_to(root)}:{line}"] = words
    assert found == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Without a compiler another back-end is chosen, and that is said aloud.", ["is said", "aloud"]),
        (
            "What comes out of them is nobody's mistake; whoever reads it is told of it.",
            ["nobody", "whoever", "is told"],
        ),
        ("Elements that hang on a tie.", ["hang on"]),
        ("the how-manieth time", ["how-manieth"]),
        ("This is no seed.", ["is no seed"]),
        ("Values are no longer read; there is no cache; `nobody` is a name.", []),
        ("Elements that depend on a tie are excluded and listed.", []),
        ("The rung is untouched.", ["rung", "untouched"]),
    ],
)
def test_planted_dialect_is_found(text: str, words: list[str], root: Path) -> None:
    assert wrong_words(text, style(root)) == words


# A dotted name in backticks that begins with a unit of the package.
REFERENCE = re.compile(r"`(?:glassengine\.)?([a-z_]+(?:\.\w+)+)[`(]")
OBJECTS = {"engine", "program"}
"""Units that are also names of objects in examples: only a reference to a module below them is checked."""


def defined_in(source: str) -> set[str]:
    """Return the names that a module defines or imports, those of its classes included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).rpartition(".")[2])
    return found


def is_dead(reference: str, package: Path) -> bool:
    """Whether a dotted name leads to no module of the package, or to nothing that the module defines."""
    at, (*parents, last) = package, reference.split(".")
    if parents[0] in OBJECTS and not (package / parents[0] / [*parents, last][1]).is_dir():
        return False
    for name in (*parents, last):
        if (at / name).is_dir():
            at = at / name
            continue
        module = at / f"{name}.py" if at.is_dir() else at
        if module.is_file() and at.is_dir():
            at = module
            continue
        source = at if at.is_file() else at / "__init__.py"
        return not source.is_file() or name not in defined_in(source.read_text(encoding="utf-8"))
    return False


def test_docstrings_name_what_exists(root: Path) -> None:
    package = root / "src" / "glassengine"
    units = {path.stem for path in package.iterdir()}
    found = {
        f"{path.relative_to(package)}: {reference}"
        for path in package.rglob("*.py")
        for reference in REFERENCE.findall(path.read_text(encoding="utf-8"))
        if reference.split(".")[0] in units
        and Path(reference).suffix not in (".json", ".pt2", ".py")
        and is_dead(reference, package)
    }
    assert found == set()


@pytest.mark.parametrize(
    ("reference", "dead"),
    [
        ("judge.gone", True),
        ("judge.pieces.Piece", False),
        ("judge.pieces.NoSuchClass", True),
        ("numerics.bounds", False),
        ("engine.generate", False),
        ("program.no_such_room.rows", False),
        ("program.export.no_such_module", True),
    ],
)
def test_a_dead_reference_is_found(reference: str, dead: bool, root: Path) -> None:
    assert is_dead(reference, root / "src" / "glassengine") is dead


RELATIVE = re.compile(r"(?:What|Why|How|Where|Who|Which|When|That|Whether)\b(?!.*\?)")


def test_a_module_docstring_states_a_role(root: Path) -> None:
    """It begins with a noun or a verb, not with a relative clause."""
    found = {
        str(path.relative_to(root)): first
        for path in (root / "src").rglob("*.py")
        if RELATIVE.match(
            first := (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        )
    }
    assert found == {}
    assert RELATIVE.match("What a build would make.") and not RELATIVE.match("Plans a build.")


def test_every_decision_has_a_number_of_its_own(root: Path) -> None:
    numbers = [path.name[:3] for path in (root / "docs" / "decisions").glob("[0-9]*.md")]
    assert sorted(numbers) == sorted(set(numbers))
