"""Settings shared by the whole suite: offline, one thread a worker, one compiler cache, no colors.

And one check of a whole run: every test that tests/compatibility.json names ran and passed.
"""

from __future__ import annotations

import compileall
import contextlib
import copy
import dataclasses
import functools
import gc
import hashlib
import json
import logging
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Set before anything imports torch or transformers: these are read at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Two workers on two cores: a second thread in each would only spin (measured: five times slower).
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads of OpenMP that spin while they wait make torch many times slower as soon as anything else runs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".cache" / "inductor"))
# The code around the kernels of an engine takes as long to compile as all kernels, and no test measures its speed.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
# Six seconds each, in every new cache: headers that save a kernel nothing, and programs that ask the processor what
# /proc/cpuinfo says of it.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Whether a graph is compiled must not depend on earlier runs: tests of the cache name a directory of their own.
os.environ["GLASS_CACHE_MAX_BYTES"] = "0"
# Nobody's real key marks the engines of tests.
os.environ["GLASS_CONFIG_DIR"] = str(ROOT / ".cache" / "config")
# Nor does anything of theirs wait beside the user's own recordings.
os.environ["GLASS_SPOOL_DIR"] = str(ROOT / ".cache" / "spool")
# The surroundings of the person who runs the suite must not change what commands print.
for _name in ("NO_COLOR", "FORCE_COLOR", "CI"):
    os.environ.pop(_name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-guides", action="store_true", help="write what the blocks of the guides print into them")


# A worker takes file after file, and all wait for the last: those that take most processor time begin first.
LONGEST = (
    "diagnose/test_check_model.py",
    "diagnose/end_to_end/test_corpus.py",
    "docs/test_guides.py",
    "diagnose/end_to_end/test_bundled_model.py",
    "backends/end_to_end/test_conformance.py",
    "diagnose/test_snapshot_replay.py",
    "capture/test_script_recorder.py",
    "engine/build/test_artifacts.py",
    "backends/inductor/test_rewrites.py",
    "engine/end_to_end/test_trust.py",
    "diagnose/end_to_end/test_plain_ports.py",
    "diagnose/end_to_end/test_gone_wrong.py",
    "engine/end_to_end/test_tokens_of_transformers.py",
    "test_readme.py",
    "frontends/test_eager_debug.py",
    "engine/build/test_build.py",
    "engine/run/test_engine.py",
    "docs/test_exercise.py",
    "diagnose/end_to_end/test_ports.py",
    "backends/inductor/test_backend.py",
    "diagnose/test_training_check.py",
    "engine/end_to_end/test_encoder_decoder.py",
    "test_wheel.py",
    "cli/test_check.py",
    "diagnose/ladder/test_generations.py",
    "judge/exclusions/test_ties.py",
    "judge/sides/test_recorded.py",
    "backends/test_onnxruntime.py",
    "diagnose/ladder/test_judging.py",
    "program/end_to_end/test_sites_of_model.py",
    "diagnose/end_to_end/test_specialized.py",
    "diagnose/ladder/test_levels.py",
    "diagnose/end_to_end/test_generating_programs.py",
    "fuzz/test_fuzz.py",
    "program/end_to_end/test_hash_seed.py",
    "docs/test_families.py",
    "docs/test_site.py",
    "judge/sides/test_arguments.py",
    "diagnose/end_to_end/test_written_out.py",
    "backends/inductor/test_settings.py",
    "cli/test_build.py",
    "fuzz/test_inputs.py",
    "cli/test_record.py",
    "diagnose/test_side_by_side.py",
    "capture/end_to_end/test_tensor_parallel.py",
    "capture/test_record.py",
    "program/kinds/test_causal_lm.py",
)


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with Ctrl-C ignored; processes that tests send it to would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # pytest-xdist would put files with few tests last, and among them are the longest.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    # With xdist the reports of all workers come to the controller, which alone knows what ran.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Promises(config), "promises")
        _prepare(config)


def _prepare(config: pytest.Config) -> None:
    """Compile the modules of the package, and the tests as pytest does it: half of them in a second process.

    Where the surroundings forbid to write bytecode, each process that a test starts would compile 900 modules; and each
    worker would compile all tests.
    """
    sources = [path for path in sorted(ROOT.glob("*/**/*.py")) if path.parts[len(ROOT.parts)] in ("src", "tests")]
    child = os.fork() if hasattr(os, "fork") else None
    try:
        _compile(sources if child is None else sources[bool(child) :: 2], config)
    finally:
        if child == 0:
            os._exit(0)
    if child is not None:
        os.waitpid(child, 0)


def _compile(sources: list[Path], config: pytest.Config) -> None:
    for path in sources:
        if path.is_relative_to(ROOT / "src"):
            compileall.compile_file(path, quiet=2)
        elif path.name.startswith("test_") or path.name == "conftest.py":
            with contextlib.suppress(Exception):  # pytest's own affair: where this is not the way, each worker does it
                _rewrite(path, config)


def _rewrite(path: Path, config: pytest.Config) -> None:
    """Keep what pytest makes of a test file, unless it is kept already."""
    from _pytest.assertion import rewrite

    kept = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(path, kept) is None:
        kept.parent.mkdir(exist_ok=True)
        stat, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, kept)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let what pytest makes of the test files be written, which takes half of a collection; nothing else."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()  # nothing that a collection makes is garbage
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before
        gc.enable()


def pytest_collection_finish() -> None:
    # The collector would go through half a million objects of the libraries again and again: a fifth of all time.
    gc.set_threshold(50_000, 10, 10)
    gc.freeze()


SLOW_VARIANTS = Path(__file__).with_name("slow_variants.txt")


def _mark_slow_variants(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the list as slow; a line that no test has is an error where its file was collected whole."""
    lines = SLOW_VARIANTS.read_text(encoding="utf-8").splitlines() if SLOW_VARIANTS.is_file() else []
    listed = {line for line in lines if line and not line.startswith("#")}
    names = {item.nodeid.removeprefix("tests/"): item for item in items}
    for name in listed & names.keys():
        names[name].add_marker(pytest.mark.slow)
    files = {name.partition("::")[0] for name in names}
    gone = [name for name in sorted(listed - names.keys()) if name.partition("::")[0] in files]
    if gone and not any("::" in word for word in config.args):
        raise pytest.UsageError(f"{SLOW_VARIANTS.name} names tests that are gone: {', '.join(gone[:3])}")


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_slow_variants(config, items)
    # Workers must collect the same names: an address in one is another in each.
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:
        raise pytest.UsageError(f"names of tests that differ from run to run: {', '.join(unstable[:3])}; give them ids")
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: make test-cuda"))


class Promises:
    """Fails a run of the whole suite in which a test that tests/compatibility.json names did not run and pass."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._outcomes: dict[str, set[str]] = defaultdict(set)
        self._broken: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test that is skipped or fails before its call has no report of the call.
        if report.when == "call" or report.outcome != "passed":
            for name in {report.nodeid, report.nodeid.split("[", 1)[0]}:
                self._outcomes[name].add(report.outcome)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        page = self._config.rootpath / "tests" / "compatibility.json"
        if not self._is_whole(session) or not page.is_file():
            return
        exempt = self._config.option.markexpr == "not slow"
        for row, name, slow in promised_tests(page.read_text(encoding="utf-8")):
            found = self._outcomes.get(name, set())
            if found != {"passed"} and not (slow and exempt and not found):
                self._broken.append(f"{row}: {name}: {', '.join(sorted(found)) or 'was not run'}")
        if self._broken and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._broken:
            terminalreporter.section("rows of tests/compatibility.json that this run does not show", red=True)
            for line in self._broken:
                terminalreporter.line(line)

    def _is_whole(self, session: pytest.Session) -> bool:
        option = self._config.option
        chosen = (
            option.keyword or option.collectonly or getattr(option, "lf", False) or option.deselect or option.ignore
        )
        return (
            self._config.args_source is pytest.Config.ArgsSource.TESTPATHS
            and not chosen
            and option.markexpr in ("", "not slow")
            and not session.shouldstop
            and not session.shouldfail
        )


def promised_tests(table: str) -> list[tuple[str, str, bool]]:
    """Return (row, test, whether the table calls it slow) of everything that tests/compatibility.json names."""
    rows = json.loads(table).items()
    return [(row, name.removesuffix(" (slow)"), name.endswith(" (slow)")) for row, names in rows for name in names]


@pytest.fixture(scope="session")
def promises(root: Path) -> list[tuple[str, str, bool]]:
    """Return what `promised_tests` finds in the table."""
    return promised_tests((root / "tests" / "compatibility.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _threads() -> None:
    """Keep torch's number of threads, without importing it for tests that do not use it."""
    torch = sys.modules.get("torch")
    wanted = int(os.environ["OMP_NUM_THREADS"])
    if torch is not None and torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


@pytest.fixture(autouse=True)
def _loud() -> None:
    """A command that another test ran in this process with -q has left what it made of the level."""
    logging.getLogger("glassengine").setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def exporting_once() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context in which what is equal is exported, stored and read back once in this process.

    Equal models have modules of the same classes with the same settings and the same code, and weights of the same
    shapes: each program has those of its own model. Equal programs have the same nodes, equal files the same bytes.
    """

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        from glassengine.program import generation
        from glassengine.program.representation import stored

        # One context may lie within another.
        _real.setdefault("save", stored._save_graph)
        _real.setdefault("load", stored.load_graph)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generation, "export_causal_lm", _export_once)
            patch.setattr(generation, "export_module", _export_module_once)
            for name, stand_in in _TWO.items():
                if getattr(generation, name) is not stand_in:
                    patch.setitem(_real, name, getattr(generation, name))
                patch.setattr(generation, name, stand_in)
            patch.setattr(stored, "_save_graph", _save_once)
            patch.setattr(stored, "load_graph", _load_once)
            yield

    return context


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    """Let `exporting_once` begin without what other tests of this process have exported, stored and read."""
    stores = _exported, _stored, _loaded
    before = [dict(store) for store in stores]
    for store in stores:
        store.clear()
    yield
    for store, kept in zip(stores, before, strict=True):
        store.clear()
        store.update(kept)


class _Kept(dict[Any, Any]):
    """What was made last, by what it was made from; a program counts only as long as nobody has changed it."""

    def latest(self, key: Any, make: Callable[[], Any], state: Callable[[Any], str]) -> Any:
        """Return what was made of `key`, or make it; `state` tells whether it is as it was made."""
        # What was asked for last is the last to go.
        made, before = self.pop(key, (None, ""))
        if made is None or state(made) != before:
            made = make()
            before = state(made)
        self[key] = made, before
        for oldest in list(self)[:-48]:
            del self[oldest]
        return made


_exported, _stored, _loaded = _Kept(), _Kept(), _Kept()
_real: dict[str, Callable[..., Any]] = {}
_APART = ("_parameters", "_buffers", "_modules", "config", "name_or_path")
"""Attributes of a module that are looked at by themselves, and the directory it came from."""


def _export_once(model: Any, *, metadata: dict[str, Any] | None = None, on_stage: Any = None) -> Any:
    from glassengine.program.export.export import export_causal_lm

    def export(*observers: Any) -> tuple[Any, ...]:
        return (export_causal_lm(model, on_stage=observers[0]),)

    return _once("causal", model, export, metadata, [on_stage])[0]


def _export_module_once(
    model: Any,
    given: Any,
    *,
    metadata: dict[str, Any] | None = None,
    on_stage: Any = None,
    keeps_state: bool = False,
) -> Any:
    from glassengine.program.export.export import export_module

    def export(*observers: Any) -> tuple[Any, ...]:
        return (export_module(model, given, on_stage=observers[0], keeps_state=keeps_state),)

    inputs = _given(given)
    if keeps_state or inputs is None:
        return export_module(model, given, metadata=metadata, on_stage=on_stage, keeps_state=keeps_state)
    return _once(f"module {inputs}", model, export, metadata, [on_stage])[0]


def _export_two_once(
    name: str,
    model: Any,
    given: Any,
    *,
    metadata: dict[str, Any] | None = None,
    on_stage: Any = None,
    on_encoder_stage: Any = None,
) -> Any:
    def export(*observers: Any) -> tuple[Any, ...]:
        first, last = observers
        made: tuple[Any, ...] = _real[name](model, given, on_encoder_stage=first, on_stage=last)
        return made

    return _once(f"{name} {_given(given)}", model, export, metadata, [on_encoder_stage, on_stage])


def _given(inputs: Any) -> str | None:
    """Return what a program depends on of inputs; None where that cannot be told."""
    from torch.utils import _pytree as pytree

    leaves = {pytree.keystr(path): value for path, value in pytree.tree_flatten_with_path(inputs)[0]}
    tensors = {path: value for path, value in leaves.items() if hasattr(value, "dtype")}
    plain = {path: value for path, value in leaves.items() if path not in tensors}
    if not all(value is None or isinstance(value, bool | int | float | str) for value in plain.values()):
        return None
    return f"{_state(tensors)} {[value.stride() for value in tensors.values()]} {plain!r}"


def _once(
    what: str, model: Any, export: Callable[..., tuple[Any, ...]], metadata: dict[str, Any] | None, observers: list[Any]
) -> tuple[Any, ...]:
    """Return the programs of a model, with its own weights; they are traced for the first of its like.

    Whoever observes sees the stages of the export that was, and those have weights: of equal ones only.
    """
    structure, code = _identity(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weights = _state(tensors) if any(observers) else ""

    def make() -> Any:
        stages: list[list[Any]] = [[] for _ in observers]
        programs = export(*(seen.append for seen in stages))
        places = {_place(value): name for name, value in tensors.items()}
        names = [
            {name: places[_place(value)] for name, value in _weights_of(program).items() if _place(value) in places}
            for program in programs
        ]
        # The model and its code live on, or their addresses would be used again.
        return programs, stages, names, (model, code)

    programs, stages, names, _ = _exported.latest((what, structure, weights), make, _state_of_programs)
    for observer, seen in zip(observers, stages, strict=True):
        for stage in seen if observer is not None else ():
            observer(stage)
    return tuple(
        dataclasses.replace(
            program,
            exported=_with_weights(program.exported, tensors, own),
            metadata={**(metadata or {}), **program.metadata},
        )
        for program, own in zip(programs, names, strict=True)
    )


def _weights_of(program: Any) -> dict[str, Any]:
    stored = {**program.exported.state_dict, **program.exported.constants}
    return {name: value for name, value in stored.items() if hasattr(value, "dtype")}


def _place(tensor: Any) -> Any:
    """Return where the values of a tensor are; on the meta device there are none."""
    where = id(tensor) if tensor.is_meta or not tensor.numel() else tensor.data_ptr()
    return where, tuple(tensor.shape), tensor.stride()


def _with_weights(exported: Any, tensors: dict[str, Any], names: dict[str, str]) -> Any:
    """Return the program with the tensors of a model; what is none of them is of its code."""
    other = copy.copy(exported)
    other._state_dict, other._constants = (
        {name: tensors[names[name]] if name in names else value for name, value in stored.items()}
        for stored in (exported.state_dict, exported.constants)
    )
    return other


def _state_of_programs(made: Any) -> str:
    return " ".join(_graph(program.exported) for program in made[0])


# What stands in is the same object each time, as `_identity` asks for.
_TWO = {name: functools.partial(_export_two_once, name) for name in ("export_encoder_decoder", "export_image_text")}


def _save_once(program: Any, directory: Path) -> None:
    exported, path = program.exported, directory / "program.pt2"

    def make() -> Any:
        _real["save"](program, directory)
        return path.read_bytes(), exported

    path.write_bytes(_stored.latest((id(exported.graph_module), _graph(exported)), make, lambda made: "")[0])


def _load_once(directory: Path) -> Any:
    path = directory / "program.pt2"
    if not path.is_file():
        return _real["load"](directory)
    key = hashlib.sha256(path.read_bytes()).hexdigest()
    exported = copy.copy(_loaded.latest(key, lambda: _real["load"](directory), _graph))
    # Whoever reads it fills its weights in.
    exported._state_dict, exported._constants = dict(exported.state_dict), dict(exported.constants)
    return exported


def _graph(exported: Any) -> str:
    """Return the nodes of a program and its signature, and the names, dtypes and shapes of its weights."""
    graphs = [module.graph for module in exported.graph_module.modules() if hasattr(module, "graph")]
    metas = [(id(node.meta.get("val")), *sorted(node.meta)) for graph in graphs for node in graph.nodes]
    tensors = {**exported.state_dict, **exported.constants}
    weights = [
        (name, str(value.dtype), tuple(value.shape)) for name, value in tensors.items() if hasattr(value, "dtype")
    ]
    described = (
        f"{[str(graph) for graph in graphs]} {metas} {exported.graph_signature} {exported.range_constraints} {weights}"
    )
    return hashlib.sha256(described.encode()).hexdigest()


def _identity(model: Any) -> tuple[str, list[Any]]:
    """Return what a trace depends on: structure, settings, hooks and code of a model, and no values; and the code."""
    kinds = {type(module) for module in model.modules()}
    # A test may put another function in place of a method, or of one that the methods call.
    owners = [owner for kind in kinds for owner in kind.__mro__[:-1]]
    around = [vars(sys.modules[name]) for name in sorted({kind.__module__ for kind in kinds} & sys.modules.keys())]
    around += [getattr(owner.__dict__.get("forward"), "__globals__", {}) for owner in owners]
    spaces = [*map(vars, owners), *around]
    ours = [vars(module) for name, module in sys.modules.items() if name.startswith("glassengine.program")]
    spaces += [*ours, *(vars(value) for space in ours for value in space.values() if isinstance(value, type))]
    code = [value for space in spaces for value in space.values() if callable(value)]
    # And a number in place of another.
    plain = [
        sorted(
            (name, repr(value))
            for name, value in space.items()
            if isinstance(value, bool | int | float | str) and not name.startswith("_")
        )
        for space in [*map(vars, owners), *around]
    ]
    own = [
        (name, {key: _said(value) for key, value in vars(module).items() if key not in _APART})
        for name, module in model.named_modules()
    ]
    config = getattr(model, "config", None)
    # Its dtype is that of the weights, or not filled in.
    others = {"dtype": None, "_name_or_path": None}
    settings = None if config is None else ({**config.to_dict(), **others}, config._attn_implementation)
    described = f"{model} {own} {sorted(map(id, code))} {sorted(plain)} {settings} {_shapes(model)}"
    return hashlib.sha256(described.encode()).hexdigest(), code


def _said(value: Any) -> str:
    return _state({"": value}) if hasattr(value, "is_meta") else repr(value)


def _shapes(model: Any) -> list[Any]:
    """Return everything of weights but their values: which are one tensor, too."""
    first: dict[Any, str] = {}
    found = []
    for names in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, value in names:
            shared = first.setdefault(_place(value), name)
            found.append((name, shared, str(value.dtype), str(value.device), value.shape, value.stride()))
            found[-1] += (value.requires_grad, type(value))
    return found


def _state(tensors: Any) -> str:
    import torch

    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} {value.device}".encode())
        if not value.is_meta:
            digest.update(value.detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def token_ids(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two left-padded rows of different prompts, and one row alone."""
    path: Path = tmp_path_factory.mktemp("ids") / "ids.json"
    path.write_text(
        json.dumps(
            {
                "input_ids": [[0, 0, 0, 17, 200, 9, 33, 41], [5, 91, 14, 3, 77, 120, 250, 8]],
                "attention_mask": [[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8],
            }
        )
    )
    return str(path)


@pytest.fixture(scope="session")
def llama() -> Any:
    """Return the clean baseline of the tests of the judge."""
    from glassengine.testing import models

    return models.llama()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[dict[str, str]]:
    """An S3 server of this machine, started for the first test that wants it: the variables that lead to it."""
    from tests.s3_server import serving

    with serving() as variables:
        yield variables


@pytest.fixture
def bucket(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new bucket, `s3://test-...`."""
    from tests.s3_server import new_bucket

    return new_bucket(s3_server, monkeypatch)


@pytest.fixture
def nothing_in_memory() -> Iterator[None]:
    """Leave `memory://` as empty as it was."""
    from fsspec.implementations.memory import MemoryFileSystem

    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
