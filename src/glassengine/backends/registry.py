"""The registry of back-ends: built-ins and third parties come in by the same door, the entry-point group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from glassengine import asked
from glassengine.accelerators import require_device
from glassengine.backends.protocol.backend import Backend, CompilingGraphs, TakingOnnx
from glassengine.errors import BackendError, UsageError
from glassengine.extensions import BACKENDS, registered, remedy

DEFAULT = "inductor"
FALLBACK = "onnxruntime"


@dataclass(frozen=True)
class BackendInfo:
    """One registered back-end; `reason` and `install` say why it cannot be used and what to do about it."""

    name: str
    available: bool
    reason: str
    install: str


def list_backends() -> list[BackendInfo]:
    """Return every registered back-end, default first, with whether it can be used here."""
    infos = []
    for name, entry in sorted(registered(BACKENDS).items(), key=lambda item: (item[0] != DEFAULT, item[0])):
        try:
            state = _load(entry).available()
            infos.append(BackendInfo(name, state.available, state.reason, state.install))
        except Exception as error:
            infos.append(BackendInfo(name, False, f"{type(error).__name__}: {error}", remedy(entry)))
    return infos


def backends_that(can: Callable[[Backend], bool]) -> list[str]:
    """Return the back-ends that can be used here and do something."""
    return [info.name for info in list_backends() if info.available and can(find_backend(info.name))]


def get_backend(name: str) -> Backend:
    """Return the back-end called `name`, to build with.

    Raises:
        UnknownNameError: No such back-end is registered.
        BackendError: It cannot be used here; says why and what to install.
    """
    backend = find_backend(name)
    state = backend.available()
    if not state.available:
        raise BackendError(f"back-end {name!r} cannot be used here", got=state.reason, hint=state.install)
    return backend


def find_backend(name: str) -> Backend:
    """Return the back-end called `name`, whether or not it can build here (running may need less)."""
    asked.backend(name)
    entries = registered(BACKENDS)
    try:
        return _load(entries[name])
    except Exception as error:
        raise BackendError(
            f"back-end {name!r} cannot be imported", got=f"{type(error).__name__}: {error}", hint=remedy(entries[name])
        ) from error


def choose_backend(name: str | None, *, for_onnx: bool = False) -> tuple[Backend, str | None]:
    """Return the back-end to build with and, if the default was replaced, a sentence about it.

    Args:
        name: None takes the default.
        for_onnx: Whether what is built is an ONNX graph, which only some can build.

    Raises:
        UnknownNameError: No such back-end is registered.
        BackendError: It cannot be used here, or not for this.
    """
    if for_onnx:
        return _for_onnx(name), None
    if name is not None:
        return get_backend(name), None
    state = find_backend(DEFAULT).available()
    if state.available:
        return get_backend(DEFAULT), None
    return get_backend(FALLBACK), f"{DEFAULT} cannot be used here ({state.reason}): building with {FALLBACK} instead"


def _for_onnx(name: str | None) -> Backend:
    chosen = get_backend(name or FALLBACK)
    if isinstance(chosen, TakingOnnx):
        return chosen
    able = backends_that(lambda backend: isinstance(backend, TakingOnnx))
    raise BackendError(
        f"back-end {chosen.name!r} cannot build an ONNX file",
        expected=able,
        hint=f"--backend {FALLBACK}, or give the model that the file was made of",
    )


def choose_device(backend: Backend, device: str | None) -> str:
    """Return what `backend` is to build for: `device`, or what it is for.

    Raises:
        UsageError: It does not build for that device.
        BackendError: The device must be available, and is not.
    """
    known = backend.capabilities.devices
    if device is None:
        return known[0]
    if device not in known:
        able = backends_that(lambda backend: device in backend.capabilities.devices)
        raise UsageError(
            f"back-end {backend.name!r} does not build for {device!r}",
            got=f"--device {device}",
            expected=known,
            hint=f"--backend {able[0]}" if able else f"--device {known[0]}",
        )
    if device != known[0]:
        require_device(device, f"building with {backend.name} for --device {device}")
    return device


def choose_graph_backend(name: str | None) -> CompilingGraphs:
    """Return the back-end called `name`, or the default one, which must be able to compile a graph in memory.

    Raises:
        UnknownNameError: No such back-end is registered.
        BackendError: It cannot be used here.
        UsageError: It builds engines only.
    """
    backend: Backend | CompilingGraphs = get_backend(name or DEFAULT)
    if isinstance(backend, CompilingGraphs):
        return backend
    able = backends_that(lambda backend: isinstance(backend, CompilingGraphs))
    raise UsageError(
        f"back-end {backend.name!r} builds engines and cannot compile a graph in memory",
        expected=able,
        hint='torch.compile(model, backend="glass", options={"backend": "inductor"})',
    )


def _load(entry: EntryPoint) -> Backend:
    backend: Backend = entry.load()()
    return backend
