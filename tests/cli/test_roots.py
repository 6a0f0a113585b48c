"""Nothing outside of the roots can be named, by any way that leads there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from glassengine.cli.roots import Roots
from glassengine.errors import UsageError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.pt").touch()
    (outside / "config.json").write_text("{}")
    root = tmp_path / "root"
    (root / "model").mkdir(parents=True)
    (root / "model/config.json").write_text("{}")
    (root / "model/weights").symlink_to("../x.pt")
    (root / "x.pt").touch()
    (root / "port.py").touch()
    (root / "link.pt").symlink_to(outside / "secret.pt")
    (root / "folder").symlink_to(outside)
    (root / "deep/in").mkdir(parents=True)
    (root / "deep/in/link").symlink_to("../../../outside/secret.pt")
    os.mkfifo(root / "pipe")
    return root


def test_files_below_a_root_are_found(root: Path, tmp_path: Path) -> None:
    roots = Roots([root], run_code=False)
    assert roots.path("x.pt") == roots.path(str(root / "x.pt")) == str(root / "x.pt")
    assert roots.target("model") == str(root / "model"), "a link to a place inside is fine"
    assert roots.target("gguf:x.pt") == f"gguf:{root / 'x.pt'}"
    two = Roots([root, tmp_path / "outside"], run_code=False)
    assert two.path("secret.pt") == str(tmp_path / "outside/secret.pt") == two.path("link.pt")


@pytest.mark.parametrize(
    "name",
    [
        *("../outside/secret.pt", "model/../../outside/secret.pt", "model/../x.pt", "/etc/passwd", "/", "~/x.pt", ""),
        *("link.pt", "folder", "folder/secret.pt", "deep", "deep/in", "pipe", "missing.pt", "x.pt\0"),
        *("https://example.org/x.pt", "s3://bucket/x", "file:///etc/passwd", "hf://a/b", "memory://x", "//host/x"),
        *("gguf:../outside/secret.pt", "gguf:https://example.org/x", "file:/etc/passwd", "org/model", "--trust-engine"),
    ],
)
def test_files_outside_of_the_roots_are_refused(root: Path, name: str) -> None:
    with pytest.raises(UsageError, match="a path is refused"):
        Roots([root], run_code=True).target(name)


def test_code_is_run_only_where_the_server_was_started_so(root: Path) -> None:
    with pytest.raises(UsageError, match="runs no code"):
        Roots([root], run_code=False).target("port.py:net")
    roots = Roots([root], run_code=True)
    assert roots.target("port.py:net") == f"{root / 'port.py'}:net"
    for name in ("os:system", "../outside/evil.py:net", "/tmp/evil.py:net", "package.module:net"):
        with pytest.raises(UsageError):
            roots.target(name)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("adapter_config.json", {"base_model_name_or_path": "../../outside"}),
        ("adapter_config.json", {"base_model_name_or_path": "org/not-here"}),
        ("engine.json", {"model": {"directory": "OUTSIDE"}}),
    ],
)
def test_a_file_that_names_what_is_outside_is_refused(root: Path, file: str, content: dict[str, object]) -> None:
    text = json.dumps(content).replace("OUTSIDE", str(root.parent / "outside"))
    (root / "model" / file).write_text(text)
    with pytest.raises(UsageError, match="not below the roots"):
        Roots([root], run_code=True).target("model")


def test_a_file_that_names_what_is_inside_is_taken(root: Path) -> None:
    (root / "adapter").mkdir()
    (root / "adapter/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "../model"}))
    (root / "model/engine.json").write_text(json.dumps({"model": {"directory": "/where/it/was/built"}}))
    roots = Roots([root], run_code=False)
    assert roots.target("adapter") and roots.target("model")


def test_a_root_is_a_directory(root: Path) -> None:
    with pytest.raises(UsageError, match="not a directory"):
        Roots([root / "x.pt"], run_code=False)
