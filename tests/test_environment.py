from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from glassengine import environment

X86 = """processor\t: 0
model name\t: Some Processor @ 2.1GHz
flags\t\t: fpu avx2 avx512f amx_bf16

processor\t: 1
model name\t: Another
flags\t\t: fpu
"""


def test_versions_name_every_package_and_do_not_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("torch", "no-such-package-at-all"))
    found = environment.versions()
    assert found["python"] and found["torch"]
    assert found["no-such-package-at-all"] is None


def test_cpuinfo_of_the_first_processor() -> None:
    entries = environment.parse_cpuinfo(X86)
    assert entries["model name"] == "Some Processor @ 2.1GHz"
    assert entries["flags"].split() == ["fpu", "avx2", "avx512f", "amx_bf16"]


@pytest.mark.parametrize(
    ("info", "flags"),
    [({"flags": "avx2 amx_bf16"}, {"avx2", "amx_bf16"}), ({"Features": "asimd sve"}, {"asimd", "sve"}), ({}, set())],
)
def test_cpu_flags(monkeypatch: pytest.MonkeyPatch, info: dict[str, str], flags: set[str]) -> None:
    monkeypatch.setattr(environment, "_cpuinfo", lambda: info)
    assert environment.cpu_flags() == flags
    assert environment.cpu_name()


def test_memory_and_cpus() -> None:
    total, available = environment.memory_bytes()
    assert (total is None and available is None) or (total or 0) > (available or 0) > 0
    assert environment.num_cpus() >= 1


def test_compiler_is_the_one_inductor_would_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment.sys, "platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert environment.cxx_compiler() is None

    def plant(name: str) -> str:
        path = tmp_path / name
        path.write_text("#!/bin/sh\n", encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    other = plant("clang++")
    assert environment.cxx_compiler() is None, "Inductor does not look for clang++ by itself"
    gxx = plant("g++")
    assert environment.cxx_compiler() == gxx
    monkeypatch.setenv("CXX", "clang++")
    assert environment.cxx_compiler() == other
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert environment.cxx_compiler() is None, "CXX outranks g++ even when it names nothing"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # set when run from a git hook
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment.git_revision(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "--no-verify", "-m", "m"], check=True)
    revision = environment.git_revision(tmp_path)
    assert revision is not None and len(revision) == 40
    assert environment.git_revision(tmp_path / "a file that is not there") == revision


def test_git_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.git_revision(tmp_path) is None


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEBUG_ARTIFACTS_DIR", "TRTLLM_ADD_OUTPUT"):
        monkeypatch.setenv(name, "")
    assert environment.debug_artifacts_dir() is None
    assert environment.add_output_json() is None
    monkeypatch.setenv("DEBUG_ARTIFACTS_DIR", "some/where")
    monkeypatch.setenv("TRTLLM_ADD_OUTPUT", '{"a": "b"}')
    assert environment.debug_artifacts_dir() == Path("some/where")
    assert environment.add_output_json() == '{"a": "b"}'


@pytest.mark.parametrize(
    ("value", "expected"), [("", False), ("0", False), ("false", False), ("1", True), ("true", True)]
)
def test_in_ci(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("CI", value)
    assert environment.in_ci() is expected


def test_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert environment.is_dumb_terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    assert not environment.is_dumb_terminal()


def test_cache_dirs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "GLASS_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    found = environment.cache_dirs()
    assert found["glassengine"] == Path("~/.cache/glassengine").expanduser()
    assert found["huggingface"] == Path("~/.cache/huggingface/hub").expanduser()
    assert found["inductor"].name.startswith("torchinductor_")
    monkeypatch.setenv("HF_HOME", "/h")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/i")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    expected = {"huggingface": Path("/h/hub"), "inductor": Path("/i"), "glassengine": Path("/x/glassengine")}
    assert environment.cache_dirs() == expected
    monkeypatch.setenv("GLASS_CACHE_DIR", "/c")
    assert environment.cache_dirs() == expected | {"glassengine": Path("/c")}


def test_compiler_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLASS_CC_FLAGS", raising=False)
    monkeypatch.setenv("NEURON_CC_FLAGS", "--log_level=INFO")
    assert environment.compiler_flags() == ("--log_level=INFO", "NEURON_CC_FLAGS")
    monkeypatch.setenv("GLASS_CC_FLAGS", "--max_autotune")
    assert environment.compiler_flags() == ("--max_autotune", "GLASS_CC_FLAGS")


@pytest.mark.parametrize("name", ["GLASS_EAGER_DEBUG", "NEURON_USE_EAGER_DEBUG_MODE"])
def test_eager_debug(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable in ("GLASS_EAGER_DEBUG", "NEURON_USE_EAGER_DEBUG_MODE"):
        monkeypatch.delenv(variable, raising=False)
    assert not environment.eager_debug()
    monkeypatch.setenv(name, "1")
    assert environment.eager_debug()


@pytest.mark.parametrize("error", [KeyError("uid"), OSError("no name")])
def test_cache_dirs_without_a_user_name(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> str:
        raise error

    monkeypatch.setattr(environment.getpass, "getuser", fail)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert environment.cache_dirs()["inductor"].name == f"torchinductor_{os.getuid()}"


def test_planted_secrets_do_not_reach_a_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "s3cr3t-value"
    token = "hf_" + "a1B2" * 8
    for name, value in {
        "HF_TOKEN": secret,
        "TORCH_API_KEY": secret,
        "NEURON_PASSWORD": secret,
        "HF_ENDPOINT": f"https://me:{secret}@hub.example.org/path",
        "XLA_FLAGS": f"--login={token}",
        "AWS_SECRET_ACCESS_KEY": secret,
        "HOME_MADE": secret,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "2",
    }.items():
        monkeypatch.setenv(name, value)
    argv = [
        "glass",
        "--token",
        secret,
        f"--hf-token={secret}",
        f"--hf_token={secret}",
        f"https://{secret}@host.example.org/x",
        token,
        "model",
    ]
    monkeypatch.setattr(environment.sys, "argv", argv)

    found = environment.describe()

    assert secret not in str(found) and token not in str(found)
    assert found["variables"]["HF_TOKEN"] == environment.REMOVED
    assert found["variables"]["HF_ENDPOINT"] == f"https://{environment.REMOVED}@hub.example.org/path"
    assert found["variables"]["TOKENIZERS_PARALLELISM"] == "false"
    assert found["variables"]["OMP_NUM_THREADS"] == "2"
    assert {"HOME_MADE", "AWS_SECRET_ACCESS_KEY"}.isdisjoint(found["variables"])
    assert found["command_line"][0] == "glass" and found["command_line"][-1] == "model"


def test_ordinary_command_line_is_kept() -> None:
    line = [
        "glass",
        "run",
        "engine",
        "--max-new-tokens",
        "8",
        "--input-text",
        "the key is here",
        "--tokenizer-dir",
        "d",
    ]
    line += ["--eos-token-id", "2", "--token-ids=ids.json", "key", "-k", "v"]
    assert environment.without_secrets(line) == line
