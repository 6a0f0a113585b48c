"""`model_addition_debugger_context` of transformers, built on a recording: the same call, the same files.

A recording is made beside the files and turned into them when the block ends; if that fails, the recording stays. What
is not a tensor (`use_cache`, a cache, None) goes into the tree as text, recorded by separate hooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.capture.record import Recorder, own_directory, record
from glassengine.errors import GlassError, UsageError
from glassengine.recording.formats.debug_tree_writer import TreeWriter
from glassengine.recording.reader import Recording
from glassengine.sites import port_site
from glassengine.writing import local, put_away

_log = logging.getLogger(__name__)

_ADDRESS = re.compile(r"object at 0x[0-9A-Fa-f]+")
_BLOCK = re.compile(r"(?P<list>.+)\.(?P<number>\d+)")
_MAX_TEXT = 2000
_MAX_DEPTH = 16


@contextlib.contextmanager
def model_addition_debugger_context(
    model: nn.Module, debug_path: str | Path | None = None, do_prune_layers: bool = True, use_repr: bool = True
) -> Iterator[nn.Module]:
    """Write what goes into and comes out of every module of `model` to a pair of JSON files when the block ends.

    `<Class>_debug_tree_FULL_TENSORS.json` and `<Class>_debug_tree_SUMMARY.json`, the same without values. Later
    forwards (`generate`) get files of their own: `<Class>_debug_tree_step1_...`. An earlier pair of this class is moved
    into `earlier-NNN/`. Runs under `torch.no_grad()`; use `glass.record` for gradients. Of a forward that raises, what
    had been computed is written.

    Args:
        model: Any module.
        debug_path: Directory to write into, made when it is missing; the current one when None.
        do_prune_layers: Of each list of layers record the first and the last only.
        use_repr: Print values as text; otherwise one `.safetensors` file per tensor, named by the module.

    Yields:
        The model.

    Raises:
        UsageError: `model` is not a module, or the directory cannot be written.
    """
    if not isinstance(model, nn.Module):
        raise UsageError("only a module can be debugged", got=type(model).__name__)
    folder = local(debug_path or ".")
    # A compiled model is known by the name of what was compiled.
    name = type(getattr(model, "_orig_mod", model)).__name__
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{name}_recording-", dir=folder))
    except OSError as error:
        raise UsageError("cannot write the debug tree", got=f"{folder}: {error.strerror}") from error
    pruned = _intermediate_layers(model) if do_prune_layers else None
    recorder = record(model, aside, sites=None if pruned is None else [f"re:^(?!{pruned})"])
    notes = _Notes(model, recorder, pruned)
    failed = True
    try:
        with recorder, torch.no_grad(), notes, _forward_is_a_call(model):
            yield model
        failed = False
    finally:
        try:
            _write(aside, folder, name, notes, use_repr=use_repr)
        except GlassError:
            # What the user's own code raised comes first.
            if not failed:
                raise
            _log.exception("the debug tree of %s cannot be written; its recording is in %s", name, aside)


def _write(aside: Path, folder: Path, name: str, notes: _Notes, *, use_repr: bool) -> None:
    recording = Recording.open(own_directory(aside))
    if recording.entries:
        _move_earlier(folder, name)
        versions = recording.metadata.get("environment", {}).get("versions")
        writer = TreeWriter(folder, name, use_repr=use_repr, versions=versions)
        for path in writer.write(recording, recording.entries, notes.by_step, notes.calls):
            _log.info("wrote %s", path)
    shutil.rmtree(aside)


def _move_earlier(folder: Path, name: str) -> None:
    """Move the trees of an earlier run of this class, and the files of their values, out of the way."""
    ours = [item for item in folder.iterdir() if item.is_file() and item.name.startswith(f"{name}_debug_tree")]
    if not ours:
        return
    values = folder.glob(f"{name}[._]*.safetensors")
    target = put_away(folder, {*ours, *values}, first=0)
    _log.warning("the debug tree of an earlier %s is in %s", name, target)


def _intermediate_layers(model: nn.Module) -> str | None:
    """Return a regular expression for the sites of layers between the first and the last of a list, if there are any.

    A layer is a numbered module that has modules of its own.
    """
    lists: dict[str, list[str]] = {}
    for path, module in getattr(model, "_orig_mod", model).named_modules():
        found = _BLOCK.fullmatch(path)
        if found is not None and next(module.children(), None) is not None:
            lists.setdefault(found["list"], []).append(path)
    between = [re.escape(path) for paths in lists.values() for path in paths[1:-1]]
    return rf"(?:{'|'.join(between)})(?:[.:@/]|$)" if between else None


@contextlib.contextmanager
def _forward_is_a_call(model: nn.Module) -> Iterator[None]:
    """Make `model.forward(...)`, as the document has it, a call of the model: hooks hear of no other."""
    state = threading.local()
    had = "forward" in model.__dict__
    original = model.forward

    def called(*_: Any) -> None:
        state.is_called = True

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(state, "is_called", False):
            state.is_called = False
            return original(*args, **kwargs)
        return model(*args, **kwargs)

    handle = model.register_forward_pre_hook(called)
    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        handle.remove()
        if had:
            model.__dict__["forward"] = original
        else:
            model.__dict__.pop("forward", None)


class _Notes:
    """Notes as text what a recording does not store: values that are not tensors.

    Attributes:
        by_step: Step -> (site, text), in the order of the calls.
        calls: Step -> (path with call, that of its caller), in the order in which they began.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, pruned: str | None) -> None:
        self.by_step: dict[int, list[tuple[str, str]]] = {}
        self.calls: dict[int, list[tuple[str, str | None]]] = {}
        self._recorder = recorder
        self._pruned = re.compile(pruned) if pruned is not None else None
        self._modules = dict.fromkeys(model.modules())
        self._open = threading.local()
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> _Notes:
        for module in self._modules:
            self._hooks.enter_context(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._hooks.enter_context(module.register_forward_hook(self._after, always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._calls()
        place = self._recorder.current_call
        if place is None or (self._pruned is not None and self._pruned.match(place[1])):
            place = None
        callers = [outer for _, outer in calls if outer is not None and place is not None and outer[0] == place[0]]
        calls.append((module, place))
        if place is not None:
            step, where = place
            # A wrapper and what it wraps are one call.
            if not callers or callers[-1] != place:
                self.calls.setdefault(step, []).append((where, callers[-1][1] if callers else None))
            self._note(step, where, ":in", args)
            self._note(step, where, ":in", kwargs)

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._calls()
        # Hooks do not hear of a call that an exception left, unless it ends on its way.
        while calls and calls[-1][0] is not module:
            calls.pop()
        place = calls.pop()[1] if calls else None
        if place is not None and result is not None:
            self._note(*place, ":out", result)

    def _calls(self) -> list[tuple[nn.Module, tuple[int, str] | None]]:
        if not hasattr(self._open, "calls"):
            self._open.calls = []
        calls: list[tuple[nn.Module, tuple[int, str] | None]] = self._open.calls
        return calls

    def _note(self, step: int, where: str, port: str, value: Any) -> None:
        for key, text in _texts(port, value, 0):
            self.by_step.setdefault(step, []).append((port_site(where, key), text))


def _texts(port: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
    """Yield (port with keys, text) of a non-tensor in `value`."""
    if isinstance(value, Tensor):
        return
    children: list[tuple[str, Any]]
    if isinstance(value, Mapping):
        children = [(f".{key}", child) for key, child in value.items()]
    elif isinstance(value, list | tuple):
        children = [(f"[{index}]", child) for index, child in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    else:
        yield port, _text(value)
        return
    if depth > _MAX_DEPTH:
        yield port, _text(value)
        return
    for key, child in children:
        yield from _texts(port + key, child, depth + 1)


def _text(value: Any) -> str:
    """Return the text of a value, the same in every run."""
    try:
        return _ADDRESS.sub("object at 0xXXXXXXXX", repr(value))[:_MAX_TEXT]
    except Exception as error:  # foreign __repr__
        return f"{type(value).__name__} (its text cannot be had: {type(error).__name__})"
