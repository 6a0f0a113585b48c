"""The Dockerfiles name what is there. Building one needs a network and minutes, and is left to whoever has Docker."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

FILES = ("docker/Dockerfile", "docker/Dockerfile.cuda")


@pytest.fixture(params=FILES)
def text(request: pytest.FixtureRequest, root: Path) -> str:
    return (root / request.param).read_text(encoding="utf-8")


def test_what_is_copied_is_there_and_not_ignored(text: str, root: Path) -> None:
    ignored = (root / ".dockerignore").read_text(encoding="utf-8").split()
    copied = [source for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for source in line.split()[:-1]]
    assert {"pyproject.toml", "src", "README.md", "LICENSE"} <= set(copied)
    for source in copied:
        assert (root / source).exists(), source
        assert not any(fnmatch(source, pattern) for pattern in ignored), source


def test_extras_are_those_of_the_package(text: str, root: Path) -> None:
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (asked,) = re.findall(r"pip install .*'\.\[([\w,]+)\]'", text)
    assert set(asked.split(",")) <= extras.keys()


def test_the_image_runs_the_command_and_not_as_root(text: str) -> None:
    assert 'ENTRYPOINT ["/opt/glassengine/docker/entrypoint.sh"]' in text
    assert text.index("USER glass") < text.index("ENTRYPOINT")


def test_files_that_the_package_is_made_from_are_copied(text: str, root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for name in (project["readme"], *project["license-files"]):
        assert re.search(rf"^COPY .*\b{re.escape(name)}", text, re.MULTILINE), name


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        (["check", "model"], "glass check model"),
        (["glass", "doctor"], "glass doctor"),
        (["bash", "-c", "echo a shell"], "a shell"),
        (["sh", "-c", "echo a shell"], "a shell"),
        (["--help"], "glass --help"),
        ([], "glass"),
    ],
)
def test_f40_the_image_gives_a_shell(given: list[str], runs: str, root: Path, tmp_path: Path) -> None:
    (tmp_path / "glass").write_text('#!/bin/sh\necho glass "$@"\n')
    (tmp_path / "glass").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = [str(root / "docker" / "entrypoint.sh"), *given]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path})
    assert done.stdout.strip() == runs
