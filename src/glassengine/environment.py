"""Reads the environment of this process: versions, processor, compiler, settings.

The only module of the package that reads environment variables, so that a manifest can say which of them were set. It
imports nothing heavy: versions come from package metadata, processor flags from the operating system.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("glassengine", "torch", "transformers", "onnxruntime", "onnx", "onnxscript", "numpy", "safetensors")

REMOVED = "<removed>"

# Variables that change what is computed or how: recorded in manifests. Nothing else of the surroundings is.
_RECORDED = re.compile(
    r"^(GLASS|DEBUG_ARTIFACTS|TRTLLM|TORCH|TORCHINDUCTOR|PYTORCH|HF|TRANSFORMERS|TOKENIZERS|OMP|MKL|KMP|GOMP|ORT|CUDA|"
    r"NVIDIA|XLA|NEURON|CUBLAS|NCCL)(_|$)|^(CC|CXX|CFLAGS|CXXFLAGS|PYTHONHASHSEED)$"
)
_SECRET_WORDS = {"TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD"}
_SECRET_WORDS |= {"PASSWD", "CREDENTIAL", "CREDENTIALS", "AUTH", "COOKIE"}
_SECRET_VALUE = re.compile(r"hf_[A-Za-z0-9]{16,}|(?<=://)[^/@\s]+(?=@)")


def versions() -> dict[str, str | None]:
    """Return the version of Python and of every package that matters; None for one that is not installed."""
    return dict(_versions_on(tuple(sys.path), PACKAGES))


@lru_cache(maxsize=1)
def _versions_on(_path: tuple[str, ...], packages: tuple[str, ...]) -> Mapping[str, str | None]:
    """Look them up in the files of the packages, which are many, and asked for with every engine."""
    from importlib import metadata  # takes a tenth of what `glass --help` takes

    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


@lru_cache(maxsize=1)
def _cpuinfo() -> Mapping[str, str]:
    """Return the first processor of /proc/cpuinfo as key -> value; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return parse_cpuinfo(text)


def parse_cpuinfo(text: str) -> dict[str, str]:
    """Return the entries of the first processor in `text`, which has the form of /proc/cpuinfo."""
    entries: dict[str, str] = {}
    for line in text.split("\n\n", 1)[0].splitlines():
        key, _, value = line.partition(":")
        entries.setdefault(key.strip(), value.strip())
    return entries


def cpu_flags() -> frozenset[str]:
    """Return the instruction-set flags of the processor; empty where the system does not tell.

    An x86 processor lists them as "flags", an ARM one as "Features".
    """
    info = _cpuinfo()
    return frozenset((info.get("flags") or info.get("Features") or "").split())


def cpu_name() -> str:
    """Return the marketing name of the processor, or the machine type where the system does not tell."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def num_cpus() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_is_command = False


def set_command() -> None:
    """Note that this process runs one command line of `glass`, and nothing else."""
    global _is_command
    _is_command = True


def owns_process() -> bool:
    """Return whether this process runs one command line of `glass`, and nothing else."""
    return _is_command


def memory_bytes() -> tuple[int | None, int | None]:
    """Return (total, available) memory of the machine in bytes; None where the system does not tell."""
    sizes: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(":")
            if value.endswith(" kB"):
                sizes[key] = int(value.split()[0]) * 1024
    except OSError:
        return None, None
    return sizes.get("MemTotal"), sizes.get("MemAvailable")


def cxx_compiler() -> str | None:
    """Return the path of the C++ compiler that Inductor would call, or None.

    Inductor calls $CXX, or else g++ (clang++ on macOS), and looks no further: another compiler on the path is of no use
    to it until CXX names it.
    """
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def git_revision(path: str | os.PathLike[str]) -> str | None:
    """Return the commit checked out at `path`, or None when it is in no readable git repository."""
    directory = Path(path)
    command = ["git", "-C", str(directory if directory.is_dir() else directory.parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)  # noqa: S603 (a path is one argument)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def debug_artifacts_dir() -> Path | None:
    """Return the directory named by DEBUG_ARTIFACTS_DIR, or None."""
    value = os.environ.get("DEBUG_ARTIFACTS_DIR")
    return Path(value) if value else None


def spool_dir() -> Path:
    """Return where recordings wait until a store has them: GLASS_SPOOL_DIR, or a directory of the cache."""
    value = os.environ.get("GLASS_SPOOL_DIR")
    return Path(value).expanduser() if value else cache_dirs()["glassengine"] / "spool"


def store_cache_bytes(default: int) -> int:
    """Return how large the copies of objects of stores may grow: GLASS_STORE_CACHE_BYTES, or `default`."""
    value = os.environ.get("GLASS_STORE_CACHE_BYTES", "")
    return int(value) if value.isdecimal() else default


def record_dir() -> Path | None:
    """Return the directory named by GLASS_RECORD_DIR, or None."""
    value = os.environ.get("GLASS_RECORD_DIR")
    return Path(value) if value else None


def add_output_json() -> str | None:
    """Return the JSON text of TRTLLM_ADD_OUTPUT (`{"site or node or layer": "alias"}`), or None."""
    return os.environ.get("TRTLLM_ADD_OUTPUT") or None


def rank() -> int:
    """Return the rank of this process in a distributed run, from RANK; 0 outside of one."""
    value = os.environ.get("RANK", "")
    return int(value) if value.isdecimal() else 0


def num_ranks() -> int | None:
    """Return the number of ranks of this run, from WORLD_SIZE; 1 outside of one, None where only RANK is set."""
    value = os.environ.get("WORLD_SIZE", "")
    if value.isdecimal():
        return int(value)
    return None if os.environ.get("RANK") else 1


def local_rank() -> int:
    """Return the rank of this process on its machine, from LOCAL_RANK; without it, that among all."""
    value = os.environ.get("LOCAL_RANK", "")
    return int(value) if value.isdecimal() else rank()


def everything() -> dict[str, str]:
    """Return all variables as they are now: for what is started later as if it were now."""
    return dict(os.environ)


def of_rank(rank: int, ranks: int) -> dict[str, str]:
    """Return the environment of a process that is started as a rank on this machine, as torchrun would set it."""
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    known = dict(os.environ)
    if loopback:
        known.setdefault("GLOO_SOCKET_IFNAME", loopback)
    known["OMP_NUM_THREADS"] = known.get("OMP_NUM_THREADS") or str(max(num_cpus() // ranks, 1))
    return known | variables


_variables = vars(os.environ)["_data"]
_XLA_FLAGS, _DUMP = b"XLA_FLAGS", b"NEURON_DUMP_HLO_SNAPSHOT"


class SnapshotRequest(NamedTuple):
    """Values of the variables by which PyTorch NeuronX asks for snapshots; "" for one that is not set."""

    xla_flags: str
    dump_hlo_snapshot: str
    framework_debug: str
    nc0_only: str


def snapshot_request() -> SnapshotRequest | None:
    """Return the snapshot settings of the environment now; None, within a microsecond, if there are none."""
    if _XLA_FLAGS not in _variables and _DUMP not in _variables:  # `os.environ.get` takes half a microsecond
        return None
    flags, dump = os.environ.get("XLA_FLAGS", ""), os.environ.get("NEURON_DUMP_HLO_SNAPSHOT", "")
    if not dump and "--xla_dump_" not in flags:
        return None
    get = os.environ.get
    return SnapshotRequest(flags, dump, get("NEURON_FRAMEWORK_DEBUG", ""), get("NEURON_NC0_ONLY_SNAPSHOT", ""))


def synchronous() -> bool:
    """Return whether GLASS_SYNCHRONOUS or CUDA_LAUNCH_BLOCKING asks to wait for the device after each execution."""
    return any(_is_on(name) for name in ("GLASS_SYNCHRONOUS", "CUDA_LAUNCH_BLOCKING"))


def metrics() -> bool:
    """Return whether counters and metrics are kept, which GLASS_METRICS=0 turns off."""
    return os.environ.get("GLASS_METRICS", "").lower() not in ("0", "false")


def explain() -> bool:
    """Return whether GLASS_EXPLAIN asks for a line on stderr for every compilation."""
    return _is_on("GLASS_EXPLAIN")


def eager_debug() -> bool:
    """Return whether GLASS_EAGER_DEBUG or NEURON_USE_EAGER_DEBUG_MODE asks to run every op by itself."""
    return any(_is_on(name) for name in ("GLASS_EAGER_DEBUG", "NEURON_USE_EAGER_DEBUG_MODE"))


def compiler_flags() -> tuple[str, str]:
    """Return the flags for the compiler and the variable they are from: GLASS_CC_FLAGS, or else NEURON_CC_FLAGS."""
    name = "GLASS_CC_FLAGS" if os.environ.get("GLASS_CC_FLAGS") else "NEURON_CC_FLAGS"
    return os.environ.get(name, ""), name


def cache_max_bytes() -> str:
    """Return what GLASS_CACHE_MAX_BYTES says of how large the cache of compiled graphs may grow; "" where unset."""
    return os.environ.get("GLASS_CACHE_MAX_BYTES", "")


def quiet_profiler() -> None:
    """Let torch's profiler keep its own log to itself, unless KINETO_LOG_LEVEL says what it should say."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def in_ci() -> bool:
    """Return whether CI says that no person is watching."""
    return _is_on("CI")


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() not in ("", "0", "false")


def models_may_set_onnxruntime() -> bool:
    """Whether ONNX Runtime takes its settings from the model that it opens: which profile it writes, and where."""
    return os.environ.get("ORT_LOAD_CONFIG_FROM_MODEL") == "1"


def is_dumb_terminal() -> bool:
    """Return whether TERM says that the terminal cannot move its cursor."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def open_flag(name: str) -> int:
    """Return a flag of `os.open`; 0 where the system has none of that name: Windows has few of them."""
    found: int = getattr(os, name, 0)
    return found


def cache_dirs() -> dict[str, Path]:
    """Return where downloaded models, compiled kernels and compiled graphs are kept; the directories need not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    hf_home = os.environ.get("HF_HOME") or Path(home, "huggingface")
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # a user id without a name, as in many containers
        user = str(os.getuid())
    return {
        "huggingface": Path(os.environ.get("HF_HUB_CACHE") or Path(hf_home, "hub")).expanduser(),
        "inductor": Path(
            os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir(), f"torchinductor_{user}")
        ),
        "glassengine": Path(os.environ.get("GLASS_CACHE_DIR") or Path(home, "glassengine")).expanduser(),
    }


def set_cache_directory(directory: Path) -> None:
    """Keep compiled graphs in a directory from now on, in this process and those that it starts."""
    os.environ["GLASS_CACHE_DIR"] = str(directory)


def inductor_directory() -> Path | None:
    """Return the cache directory of Inductor set by the user or by torch itself; None for its default."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return Path(named) if named else None


def set_inductor_directory(directory: Path) -> None:
    """Tell Inductor where to keep what it builds, in this process and those that it starts."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)


def config_dir() -> Path:
    """Return where settings and keys of this user are kept; the directory need not exist."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.environ.get("GLASS_CONFIG_DIR") or Path(home, "glassengine")).expanduser()


def variables() -> dict[str, str]:
    """Return the environment variables that can change a result, secrets removed, sorted by name."""
    return {
        name: REMOVED if _SECRET_WORDS & set(name.upper().split("_")) else _SECRET_VALUE.sub(REMOVED, value)
        for name, value in sorted(os.environ.items())
        if _RECORDED.match(name)
    }


def without_secrets(arguments: Iterable[str]) -> list[str]:
    """Return a command line with secrets replaced: the values of `--token X` and `--hf-token=X`, and URL logins."""
    cleaned: list[str] = []
    hide_next = False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        # The last word decides: `--hf-token` takes a secret, `--eos-token-id` does not.
        is_secret = flag.startswith("-") and flag.upper().replace("_", "-").rpartition("-")[2] in _SECRET_WORDS
        if hide_next:
            cleaned.append(REMOVED)
        elif is_secret and equals:
            cleaned.append(f"{flag}={REMOVED}")
        else:
            cleaned.append(_SECRET_VALUE.sub(REMOVED, argument))
        hide_next = is_secret and not equals
    return cleaned


def describe() -> dict[str, Any]:
    """Return everything of this machine and process that belongs into a manifest, as JSON-ready values."""
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cpu_flags": sorted(cpu_flags()),
        "num_cpus": num_cpus(),
        "cxx_compiler": cxx_compiler(),
        "command_line": without_secrets(sys.argv),
        "variables": variables(),
    }
