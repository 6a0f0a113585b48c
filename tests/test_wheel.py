"""What a user installs: the wheel works without the repository beside it, and holds what it needs and no more."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import glassengine

MODELS = """
import torch


class Net(torch.nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.scale = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4), scale

    def forward(self, x):
        return self.last(torch.relu(self.first(x)) * self.scale)


def right(): return Net(0.5).eval()
def wrong(): return Net(0.6).eval()
def inputs(): return {"x": torch.linspace(-1, 1, 24).reshape(3, 8)}
"""

Glass = Callable[..., "subprocess.CompletedProcess[str]"]


def build(what: str, folder: Path) -> Path:
    """Build the wheel or the `sdist` of `folder` as `make dist` does, and return where it is."""
    command = f"from setuptools import build_meta; build_meta.build_{what}('dist')"
    subprocess.run([sys.executable, "-c", command], cwd=folder, check=True, capture_output=True, timeout=600)
    return folder / "dist"


@pytest.fixture(scope="module")
def tree(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads of this tree."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, folder)
    shutil.copytree(root / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return folder


@pytest.fixture(scope="module")
def dist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel lies that the source distribution of this tree makes."""
    (archive,) = build("sdist", tree).glob("*.tar.gz")
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as opened:
        # The first patch releases of Python 3.11 have no filters.
        opened.extractall(unpacked, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # noqa: S202 - our own archive
    (folder,) = unpacked.iterdir()
    return build("wheel", folder)


@pytest.fixture(scope="module")
def glass(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Glass:
    """Run the command of a fresh environment that has the wheel, and, by a `.pth` file, the dependencies."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True, timeout=600)
    python = folder / "env/bin/python"
    (wheel,) = dist.glob("*.whl")
    install = ["--python", python, "install", "-q", "--no-deps", "--no-index", "--no-compile", wheel]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, capture_output=True, timeout=600)
    (packages,) = (folder / "env/lib").glob("*/site-packages")
    (packages / "beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (folder / "models.py").write_text(MODELS)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [folder / "env/bin/glass", *words]
        return subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=600
        )

    found = subprocess.run(
        [python, "-c", "import glassengine; print(glassengine.__file__)"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert found.stdout.startswith(str(packages)), "not the repository's"
    return run


def test_the_command_shows_three_examples_and_the_instructions(glass: Glass) -> None:
    assert glass("skill").stdout.startswith("---\nname: glassengine\n")
    assert glass().stdout.count("\n  glass ") == 3


def test_the_command_and_the_back_ends_are_there(glass: Glass) -> None:
    assert glass("--version").stdout.strip().endswith(glassengine.__version__)
    doctor = glass("doctor")
    assert doctor.returncode == 0, doctor.stderr
    for name in ("eager", "inductor", "onnxruntime", "openvino", "tensorrt_rtx"):
        assert name in doctor.stdout


@pytest.mark.slow
def test_a_check_finds_a_planted_mistake(glass: Glass) -> None:
    done = glass("check", "models.py:right", "--candidate", "models.py:wrong", "--inputs", "models.py:inputs", "-q")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT OK: factor of mul is 0.6, should be 0.5 (proven)" in done.stdout
    assert "0.5" in done.stdout and "0.6" in done.stdout  # the hint


@pytest.mark.slow
def test_a_build_writes_artifacts_with_the_page_that_shows_them(glass: Glass, tmp_path: Path) -> None:
    done = glass(
        *("build", "models.py:right", "--inputs", "models.py:inputs", "--backend", "eager", "-q"),
        *("-o", str(tmp_path / "engine"), "--artifacts", str(tmp_path / "artifacts")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "artifacts").rglob("*.html"))


def test_the_wheel_holds_the_package_and_nothing_else(dist: Path, root: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    source = root / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in path.as_posix()
    }
    package = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    assert package == wanted
    # PyTorch/XLA has a module of that name.
    own = package - {"glassengine/compat/torch_xla/test/test_utils.py"}
    assert not [name for name in own if Path(name).name.startswith(("test_", "conftest"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_is_small_and_has_the_instructions_for_agents(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.stat().st_size < 2_000_000
    assert "glassengine/SKILL.md" in zipfile.ZipFile(wheel).namelist()


def code_of(source: str) -> str:
    """Return the code of a module by line, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is not None
        ) or (isinstance(node, ast.FunctionDef) and ast.unparse(node.body[0]) == "''"):
            node.body = node.body[1:]
    return ast.dump(tree) + str([node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)])


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_internal_modules_of_the_wheel_lack_comments_and_docstrings_alone(every: int, dist: Path, root: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    shorter = set()
    for place, path in enumerate(sorted((root / "src").rglob("*.py"))):
        name, source = path.relative_to(root / "src").as_posix(), path.read_text(encoding="utf-8")
        packed = archive.read(name).decode()
        assert packed == source or place % every or code_of(packed) == code_of(source), name
        shorter |= {name} if packed != source else set()
    assert "glassengine/judge/verdict/score.py" in shorter
    whole = ("__init__.py", "engine/run/engine.py", "cli/check.py", "results/comparison.py")
    assert not {f"glassengine/{name}" for name in whole} & shorter


@pytest.mark.slow
def test_the_tree_makes_the_same_wheel(tree: Path, dist: Path) -> None:
    (again,) = build("wheel", tree).glob("*.whl")
    (wheel,) = dist.glob("*.whl")
    assert again.name == wheel.name
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())
