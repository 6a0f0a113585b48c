"""Records other runtimes than PyTorch: sessions of ONNX Runtime, requests of OpenVINO, packages of AOTInductor.

Their classes are replaced method by method when a script imports them, and get their own methods back at the end. Each
run is a step; its inputs and results are sites of the root.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import multiprocessing.process
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Unpack

import numpy as np
import torch

from glassengine import environment
from glassengine.capture.calls import tensors_in
from glassengine.capture.intake import Intake, StepCounter
from glassengine.capture.watcher import Watcher, watcher_of
from glassengine.recording.background import BackgroundWriter
from glassengine.recording.write.policy import RecordingPolicy, Wanted, Watch, watch_of
from glassengine.sites import ROOT

_log = logging.getLogger(__name__)

_CACHE = re.compile(r"past|present|cache|\bkv")


@contextlib.contextmanager
def when_imported(name: str, then: Callable[[ModuleType], None]) -> Iterator[None]:
    """Call `then(module)` after each execution of the module `name`, and now if it has been imported.

    Look-ups alone (`importlib.util.find_spec`), reloads, lazy loaders and a second import after the module was removed
    from `sys.modules` are all seen. What `then` raises is logged: the importing code would run without us.
    """
    finder = _Finder(name, then)
    loaded = sys.modules.get(name)
    if loaded is not None:
        finder.note(loaded)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.is_active = False
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the finders behind it do, and observes its loader."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.is_active = True
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or not self.is_active or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                self._observe(spec.loader)
                return spec
        return None

    def note(self, module: ModuleType) -> None:
        """Hand on a module that has been executed, or will be at its first use."""
        if type(module) is importlib.util._LazyModule:  # type: ignore[attr-defined]
            spec = object.__getattribute__(module, "__spec__")
            self._observe(spec.loader)
            return
        try:
            self._then(module)
        except Exception as error:
            _log.warning("what runs in %s is not recorded: %s: %s", self._name, type(error).__name__, error)

    def _observe(self, loader: Any) -> None:
        execute = getattr(loader, "exec_module", None)
        # A loader that is a class, as that of frozen modules, serves every import of the process.
        if execute is None or isinstance(loader, type) or getattr(execute, "finder", None) is self:
            return

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self.is_active and module.__name__ == self._name:
                self.note(module)

        exec_module.finder = self  # type: ignore[attr-defined]
        with contextlib.suppress(AttributeError, TypeError):  # of one with slots
            loader.exec_module = exec_module


@dataclass(frozen=True)
class RunSource:
    """What a recording says of the owner of its runs."""

    kind: str
    name: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class RuntimeRun:
    """One run that has ended.

    Attributes:
        owner: Whose runs make one recording; anything that can be hashed.
        describe: Tells about the owner; called before its first run is written.
        tensors: (site, value) of its inputs and results: tensors, or what numpy makes an array of.
        stopped: What ended a run that has no results.
    """

    owner: Any
    describe: Callable[[Any], RunSource]
    tensors: Sequence[tuple[str, Any]]
    stopped: str | None


class SessionRecording:
    """A recording of the runs of one owner."""

    def __init__(
        self,
        source: RunSource,
        path: Path,
        *,
        overwrite: bool = False,
        durable: bool = True,
        spool_bytes: int | None = None,
        watch: Watch | bool | None = None,
        **wanted: Unpack[Wanted],
    ) -> None:
        self.path = path
        metadata = {
            "kind": source.kind,
            **source.metadata,
            "environment": environment.describe(),
            "command_line": environment.without_secrets(sys.argv),
        }
        self._policy = RecordingPolicy(**wanted)
        self._writer = BackgroundWriter(
            path, metadata=metadata, overwrite=overwrite, durable=durable, spool_bytes=spool_bytes
        )
        self._policy.watch(lambda: self._writer.is_behind)
        self._watcher: Watcher | None = None
        policy, watched = self._policy, watch_of(watch)
        if watched is not None:
            self._watcher = watcher_of(self._writer, watched, policy, rank=0, shared=None)
            self._watcher.attach()
            policy = policy.unlimited()
        self._intake = Intake(self._watcher or self._writer, policy, 0, keeps_every_step=self._watcher is None)
        self._steps = StepCounter()

    def step(self, run: RuntimeRun) -> None:
        """Record one run."""
        step = self._steps.next()
        if not self._policy.wants_step(step):
            return
        for site, value in run.tensors:
            self._take(site, step, value)
        self._intake.commit(step, stopped=None if run.stopped is None else run.stopped[:300])

    def _take(self, site: str, step: int, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._intake.take(site, step, value)
            return
        try:
            array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
            # torch warns of an array that it could write to, and refuses one that runs backwards.
            is_usual = array.flags.writeable and all(stride >= 0 for stride in array.strides)
            tensor = torch.from_numpy(array if is_usual else array.copy())
        except (TypeError, ValueError, RuntimeError):
            self._intake.leave_out(site, step, f"a {type(value).__name__} of non-numeric elements")
        else:
            if _CACHE.search(site):
                self._intake.take_cache(site, step, tensor, {})
            else:
                self._intake.take(site, step, tensor)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._watcher is not None:
            self._watcher.detach()
            self._watcher.finish()
            self._writer.metadata["watch"] = self._watcher.summary()
        self._writer.close(None if error is None else f"stopped by {type(error).__name__}: {error}"[:300])


# Gets the method that is observed, and its arguments.
_Observed = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

# Modules of what runs models and is not observed, with the name that people know it by.
_UNSEEN = {
    "tensorrt": "TensorRT",
    "tensorrt_llm": "TensorRT-LLM",
    "tensorflow": "TensorFlow",
    "tflite_runtime": "TensorFlow Lite",
    "ai_edge_litert": "LiteRT",
    "jax": "JAX",
    "paddle": "PaddlePaddle",
    "mxnet": "MXNet",
    "llama_cpp": "llama.cpp",
    "ctranslate2": "CTranslate2",
    "coremltools": "Core ML",
    "executorch": "ExecuTorch",
    "tvm": "TVM",
    "ncnn": "ncnn",
    "MNN": "MNN",
    "cv2": "OpenCV",
    "mlx": "MLX",
    "sklearn": "scikit-learn",
    "xgboost": "XGBoost",
    "lightgbm": "LightGBM",
}


def unseen_runtimes() -> list[str]:
    """Return the names of the runtimes that this process has imported and of which no run can be recorded."""
    return [title for name, title in _UNSEEN.items() if name in sys.modules]


class Runtimes:
    """Observes the runs of this process while it is entered; a context manager.

    Attributes:
        num_unseen: Runs that were seen and cannot be recorded, by what they are.
        num_processes: Processes that were started.
    """

    def __init__(self, note: Callable[[RuntimeRun], None]) -> None:
        self.num_unseen: dict[str, int] = {}
        self.num_processes = 0
        self._note = note
        self._process = os.getpid()
        self._undo = contextlib.ExitStack()
        # The compiled model of each request of OpenVINO, and the requests that have begun and not been waited for.
        self._models: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()

    def __enter__(self) -> Runtimes:
        enter = self._undo.enter_context
        enter(when_imported("onnxruntime", self._observe_onnxruntime))
        enter(when_imported("openvino", self._observe_openvino))
        # Where the class is depends on the version of torch.
        for name in ("torch._inductor.package.package", "torch.export.pt2_archive._package"):
            enter(when_imported(name, self._observe_packages))
        self._replace(subprocess.Popen, "__init__", self._process_started)
        self._replace(multiprocessing.process.BaseProcess, "start", self._process_started)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _replace(self, owner: Any, name: str, observed: _Observed) -> None:
        """Have `observed(original, args, kwargs)` called in place of a method, in this process."""
        original = getattr(owner, name, None)
        # Not every version has all of them; and a module that is executed again may keep its classes.
        if original is None or getattr(original, "observed_by", None) is self:
            return
        is_own = name in vars(owner)

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != self._process:
                return original(*args, **kwargs)
            return observed(original, args, kwargs)

        run.observed_by = self  # type: ignore[attr-defined]
        setattr(owner, name, run)
        if is_own:
            self._undo.callback(setattr, owner, name, original)
        else:
            self._undo.callback(delattr, owner, name)

    def _process_started(self, start: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_processes += 1
        return start(*args, **kwargs)

    def _count(self, kind: str) -> _Observed:
        def counted(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.num_unseen[kind] = self.num_unseen.get(kind, 0) + 1
            return run(*args, **kwargs)

        return counted

    def _observe_onnxruntime(self, onnxruntime: ModuleType) -> None:
        session = getattr(onnxruntime, "InferenceSession", None)
        for name in ("run", "run_with_ort_values"):
            self._replace(session, name, self._session_run)
        self._replace(session, "run_async", self._session_run_later)
        for name in ("run_with_iobinding", "run_with_ortvaluevector"):
            self._replace(session, name, self._count("runs of ONNX Runtime with bound tensors"))

    def _session_run(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _bound(run, args, kwargs)
        if given is None:
            return run(*args, **kwargs)
        session, names, inputs = list(given.arguments.values())[:3]
        return _noted(run, args, kwargs, functools.partial(self._note_session, session, names, inputs))

    def _session_run_later(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _bound(run, args, kwargs)
        if given is None:
            return run(*args, **kwargs)
        session, names, inputs, callback = list(given.arguments.values())[:4]

        def ended(results: Any, data: Any, error: str) -> None:
            self._note_session(session, names, inputs, results, error or None)
            callback(results, data, error)

        given.arguments["callback"] = ended
        return run(*given.args, **given.kwargs)

    def _note_session(
        self, session: Any, names: Sequence[str] | None, inputs: Mapping[str, Any], results: Any, stopped: str | None
    ) -> None:
        wanted = names or [output.name for output in session.get_outputs()]
        found = [(f".:in.{name}", value) for name, value in inputs.items()]
        made = results if stopped is None else ()
        found += [(f".:out.{name}", value) for name, value in zip(wanted, made, strict=False)]
        self._note(RuntimeRun(session, _session_source, found, stopped))

    def _observe_openvino(self, openvino: ModuleType) -> None:
        self._replace(getattr(openvino, "CompiledModel", None), "create_infer_request", self._request_made)
        request = getattr(openvino, "InferRequest", None)
        self._replace(request, "infer", self._request_run)
        self._replace(request, "start_async", self._request_begun)
        for name in ("wait", "wait_for"):
            self._replace(request, name, self._request_waited)
        queue = getattr(openvino, "AsyncInferQueue", None)
        self._replace(queue, "start_async", self._count("runs of queues of OpenVINO"))

    def _request_made(self, make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = make(*args, **kwargs)
        self._models[request] = args[0]
        return request

    def _request_run(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _noted(run, args, kwargs, lambda _, stopped: self._note_request(args[0], stopped))

    def _request_begun(self, begin: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begun = begin(*args, **kwargs)
        self._begun.add(args[0])
        return begun

    def _request_waited(self, wait: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def note(ended: Any, stopped: str | None) -> None:
            if ended is not False and args[0] in self._begun:  # the time to wait was long enough
                self._begun.discard(args[0])
                self._note_request(args[0], stopped)

        return _noted(wait, args, kwargs, note)

    def _note_request(self, request: Any, stopped: str | None) -> None:
        found: list[tuple[str, Any]] = []
        try:
            # Given as arguments, or tensor by tensor before the run.
            found += _of_ports(request, request.model_inputs, ".:in")
            if stopped is None:
                found += _of_ports(request, request.model_outputs, ".:out")
        except RuntimeError as error:
            stopped = stopped or f"its tensors cannot be read: {error}"
        self._note(RuntimeRun(self._models.get(request, request), _request_source, found, stopped))

    def _observe_packages(self, module: ModuleType) -> None:
        called = functools.partial(self._call, _package_source)
        self._replace(getattr(module, "AOTICompiledModel", None), "__call__", called)

    def scripted_call(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a scripted module, the first of `args`, and note its inputs and results."""
        return self._call(_scripted_source, call, args, kwargs)

    def _call(
        self,
        describe: Callable[[Any], RunSource],
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        owner, *given = args
        inputs = [*tensors_in(".:in", tuple(given)), *tensors_in(".:in", kwargs)]
        # Compiled code may write into what it was given.
        found: list[tuple[str, Any]] = [(site, tensor.detach().clone()) for site, tensor in inputs]

        def note(result: Any, stopped: str | None) -> None:
            made = tensors_in(":out", result) if stopped is None else ()
            results = [(ROOT if site == ":out" else ROOT + site, tensor) for site, tensor in made]
            self._note(RuntimeRun(owner, describe, [*found, *results], stopped))

        return _noted(call, args, kwargs, note)


def _bound(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments | None:
    """Return the arguments by name; None where the call fails, which then tells what is wrong."""
    try:
        return inspect.signature(run).bind(*args, **kwargs)
    except TypeError:
        return None


def _noted(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], note: Callable[[Any, str | None], None]
) -> Any:
    """Call, and note what it returns, or what it raises, in words."""
    try:
        result = call(*args, **kwargs)
    except Exception as error:
        note(None, f"{type(error).__name__}: {error}")
        raise
    note(result, None)
    return result


def _of_ports(request: Any, ports: Iterable[Any], port: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for index, item in enumerate(ports):
        data = request.get_tensor(item).data
        value: Any = data.copy()  # the memory is the request's, and used again by its next run
        if item.element_type.to_string() == "bf16":  # which numpy does not know
            value = torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
        found.append((f"{port}.{item.any_name}" if item.names else f"{port}[{index}]", value))
    return found


def _session_source(session: Any) -> RunSource:
    path = getattr(session, "_model_path", None)
    # An engine of the same file knows a result by the name of its value, as it knows every other one.
    aliases = {output.name: f".:out.{output.name}" for output in session.get_outputs()}
    metadata = {"model": str(path), "providers": list(session.get_providers()), "aliases": aliases}
    return RunSource("onnxruntime", Path(path or "session").stem, metadata)


def _request_source(model: Any) -> RunSource:
    try:
        name = str(model.get_property("NETWORK_NAME"))
    except (AttributeError, RuntimeError):
        name = ""
    return RunSource("openvino", name or "openvino", {"model": name or None})


def _package_source(package: Any) -> RunSource:
    try:
        metadata = dict(package.get_metadata())
    except (AttributeError, RuntimeError, TypeError):
        metadata = {}
    return RunSource("aotinductor", type(package).__name__, {"package": metadata})


def _scripted_source(module: Any) -> RunSource:
    return RunSource("torchscript", str(getattr(module, "original_name", type(module).__name__)), {})
