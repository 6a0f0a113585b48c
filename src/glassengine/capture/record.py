"""`glass.record`: write down what a model computes while the user's own code runs it."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from glassengine import environment
from glassengine.capture.gradients import Microbatches, ParameterHooks
from glassengine.capture.intake import Intake
from glassengine.capture.module_hooks import ModuleHooks
from glassengine.capture.module_names import ModuleNames
from glassengine.capture.watcher import LOSS, Watcher, listen, stop_listening, watcher_of
from glassengine.errors import GlassError, UnknownNameError, UsageError
from glassengine.recording.background import BackgroundWriter
from glassengine.recording.write.policy import RecordingPolicy, Watch, WhenBehind, watch_of
from glassengine.sites import ROOT
from glassengine.stores.places import place

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecorderSettings:
    """How a model is recorded, as `record` takes it; `writing` is for the writer."""

    gradients: bool
    optimizer: torch.optim.Optimizer | bool | None
    watch: Watch | None
    microbatches: int
    writing: dict[str, Any]


class Recorder:
    """A recording in progress; made by `record`, a context manager.

    Attributes:
        model: The model that is observed.
        path: Directory of the recording.
    """

    def __init__(self, model: nn.Module, path: str | Path, policy: RecordingPolicy, settings: RecorderSettings) -> None:
        self.path = place(path)
        self.model = model
        self._policy = policy
        self._settings = settings
        self._watcher: Watcher | None = None
        self._writer: BackgroundWriter | None = None

    def __enter__(self) -> Self:
        if self._writer is not None:
            raise UsageError("a recorder is entered twice", got=str(self.path), hint="call glass.record again")
        self.path = own_directory(self.path)
        settings = self._settings
        writer = self._writer = self.open_writer(settings.writing)
        self._policy.watch(lambda: writer.is_behind)
        policy, (rank, count) = self._policy, _place()
        if settings.watch is not None:
            shared = self.path.parent if count > 1 else None
            self._watcher = watcher_of(writer, settings.watch, policy, rank=rank, shared=shared)
            policy = policy.unlimited()
        self._intake = Intake(self._watcher or writer, policy, rank, keeps_every_step=self._watcher is None)
        # Some pipelines run parts of a backward again for the gradients of parameters.
        self._intake.takes_again = settings.microbatches == 1
        holds = settings.gradients or bool(settings.optimizer) or settings.watch is not None
        options: dict[str, Any] = {"holds_steps": holds, "most_held": settings.microbatches}
        self._hooks = ModuleHooks(self.model, self._intake, self._policy, gradients=settings.gradients, **options)
        self._parameters = ParameterHooks(
            self._hooks.names,
            self._intake,
            lambda: self._hooks.current_step,
            gradients=settings.gradients,
            optimizer=settings.optimizer,
            microbatches=Microbatches(settings.microbatches, self._intake, lambda: self._hooks.awaited_steps),
        )
        try:
            self._hooks.attach()
            self._parameters.attach()
            if self._watcher is not None:
                self._watcher.attach()
                listen(self._note_loss)
        except BaseException:
            self._detach()
            writer.close("it never began")
            raise
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self._detach()
        writer = self._writer
        assert writer is not None
        if writer.was_forked:
            return  # the recording is that of the process which this one was forked from
        stopped = None if error is None else f"{type(error).__name__}: {error}".rstrip(": ")[:300]
        reason = None if stopped is None else f"stopped by {stopped}"
        problem: GlassError | None = None
        try:
            self._hooks.finish(stopped)
            self._intake.finish("the end of glass.record")
            if self._watcher is not None:
                if isinstance(error, Exception):
                    self._watcher.fail(f"stopped by {stopped}")
                self._watcher.finish()
                writer.metadata["watch"] = self._watcher.summary()
            if self._hooks.steps.num_begun == 0 and reason is None:
                reason = "the model was not called"
                _log.warning(
                    "nothing was recorded into %s: the model was not called, or only by compiled code; then record "
                    "what torch.compile returned",
                    self.path,
                )
            for name, value in self._hooks.generation.items():
                writer.metadata.setdefault(name, value)
            writer.metadata["not_called"] = not_called = self._hooks.not_called()
            if self._hooks.steps.num_begun and ROOT in not_called:
                _log.warning(
                    "the model itself was not called, only modules inside of it: its own inputs and results are not "
                    "recorded; call model(...) instead of model.forward(...)"
                )
            self._note_unseen(writer)
            if self._intake.num_late:
                writer.metadata["num_late"] = self._intake.num_late
                _log.warning(
                    "%d tensors came too late, after the step they belong to: a step ends when the next forward "
                    "begins; to see the gradients of each, call backward between the forwards, or microbatches=N",
                    self._intake.num_late,
                )
            again = self._hooks.recomputed.num_calls
            if again:
                writer.metadata["recomputed"] = dict(again)
                _log.warning(
                    "%d calls of %d modules ran again in a backward (activation checkpointing); recorded are the first",
                    again.total(),
                    len(again),
                )
            unmatched = self._policy.unmatched()
            if unmatched and self._hooks.steps.num_begun:
                writer.metadata["unmatched_patterns"] = unmatched
                _log.warning("no site matches %s", ", ".join(unmatched))
                if self._policy.nothing_matched:
                    problem = UnknownNameError("site", unmatched[0], self._policy.asked_sites())
        finally:
            writer.close(reason)
        # What the user's own code raised comes first.
        if problem is not None and error is None:
            raise problem

    def _note_unseen(self, writer: BackgroundWriter) -> None:
        unseen = self._hooks.not_seen()
        if unseen:
            writer.metadata["not_seen"] = unseen
            path, why = next(iter(unseen.items()))
            what = f"{path} {why}" if len(unseen) == 1 else f"{len(unseen)} modules, e.g. {path}, which {why}"
            hint = "to see inside, record the model before it is compiled or scripted" if " inside " in why else ""
            _log.warning("not seen: %s%s", what, f"; {hint}" if hint else "")

    def open_writer(self, options: dict[str, Any]) -> BackgroundWriter:
        """Return what takes the tensors; a recorder that does not write files has another."""
        return BackgroundWriter(self.path, **options)

    @property
    def is_open(self) -> bool:
        """Whether a call of the model is open in this thread."""
        return self._writer is not None and self._hooks.is_open

    @property
    def current_call(self) -> tuple[int, str] | None:
        """Step and path of the innermost recorded call of the model that is open in this thread."""
        return None if self._writer is None else self._hooks.current_call

    def wait(self) -> None:
        """Wait until all that was recorded so far is in the file."""
        if self._writer is not None:
            self._intake.finish("Recorder.wait()")
            self._writer.wait()

    def number(self, name: str, value: Tensor | float) -> None:
        """Add a number (a loss, an accuracy) to the series of the current step of a watched run.

        Raises:
            UsageError: The run is not watched.
        """
        if self._settings.watch is None:
            raise UsageError("only a watched run has numbers", got=name, hint="glass.record(..., watch=True)")
        step = None if self._watcher is None else self._hooks.current_step
        if step is not None and self._watcher is not None:
            self._watcher.number(name, step, value)

    @property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """What triggered in a watched run so far: "step", "why", the steps "recorded" for it, what was "missing"."""
        return () if self._watcher is None else tuple(self._watcher.events)

    def _note_loss(self, loss: Tensor) -> None:
        self.number(LOSS, loss)

    def _detach(self) -> None:
        self._parameters.detach()
        self._hooks.detach()
        if self._watcher is not None:
            stop_listening(self._note_loss)
            self._watcher.detach()


def record(
    model: nn.Module | Callable[..., Any],
    path: str | Path,
    *,
    sites: Sequence[str] | None = None,
    values: bool | Sequence[str] = True,
    gradients: bool = False,
    optimizer: torch.optim.Optimizer | bool | None = None,
    steps: Collection[int] | None = None,
    byte_budget: int | None = None,
    overwrite: bool = False,
    durable: bool = True,
    spool_bytes: int | None = None,
    when_behind: WhenBehind = "wait",
    metadata: Mapping[str, Any] | None = None,
    watch: Watch | bool | None = None,
    microbatches: int = 1,
) -> Recorder:
    """Record every forward of `model` that runs while the returned context manager is entered.

    Each forward of the model is a step, 0 the first: `model.generate()` records a prefill and its decode steps.
    Recorded are the inputs and results of every module (`path:in[0]`, `path:in.name`, `path`, `path:out.name`), taps
    (`path.name`) and the key/value cache of every layer after the step (`path:kv.key`). The model computes what it
    would compute without; the grad mode is left as it is; a disk that fills up stops the recording and not the model.

        with glass.record(model, "run1"):
            model.generate(**inputs, max_new_tokens=20)

    Args:
        model: Any module, compiled and wrapped ones included (modules inside of a compiled graph are not seen, and are
            listed as `not_seen` in the metadata); or something callable that holds exactly one: a pipeline, a method, a
            function.
        path: New directory, or a URL in a store; one recording each. In a run of several ranks each writes to
            `rank<r>/` in it.
        sites: Patterns of the sites to record (globs and `re:`); all when None.
        values: False records shape, dtype, min, max, norm and the number of non-finite elements instead of values;
            patterns keep the values of the sites they match and such statistics of all others.
        gradients: Also record gradients of inputs (`:grad_in...`), results (`:grad_out...`) and parameters
            (`<parameter>:grad`); a step then ends when the next forward begins.
        optimizer: Record the parameters (`:param`) and the state (`:state.exp_avg`) after each of its steps; True for
            every optimizer that updates parameters of the model.
        steps: Record only these, e.g. range(3).
        byte_budget: Most bytes of values; tensors that do not fit leave their statistics and are listed.
        overwrite: Replace an existing recording.
        durable: Keep every step that has ended when the process is killed. False loses the steps of the last 20 ms or
            so then, more while the disk is slow (at most 256 MiB of values), and makes recording a small model 3 %
            faster, a large one not; a process that ends in any other way loses nothing.
        spool_bytes: For a store: how many bytes may wait on this machine to be uploaded; 4 GiB when None.
        when_behind: For a store that takes less than is recorded: "wait" slows the model down to what it takes, "cut"
            leaves values out, keeps their statistics and lists them.
        metadata: JSON-ready facts to keep with the recording.
        watch: Measure every tensor and record the values of those steps only that a trigger names, with the steps
            before: True, or a `glass.Watch`. A step then ends when the next forward begins.
        microbatches: How many forwards may begin before the backward of the first one, as in a pipeline: so many steps
            are left open, in memory.

    Raises:
        UsageError: `model` is not, and does not hold, one module; or the directory cannot be written, or exists.
        UnknownNameError: (On leaving) the patterns of `sites` or `values` matched nothing.
        GlassError: (On leaving) not everything could be written; the message says what is safe.
    """
    model = find_module(model)
    if isinstance(model, torch.jit.ScriptModule):
        what = "a scripted module runs no hooks"
        raise UsageError(what, got=type(model).__name__, hint="record the module it was made from")
    if microbatches < 1 or (microbatches > 1 and not gradients):
        raise UsageError("invalid microbatches", got=str(microbatches), expected="1, or more with gradients")
    policy = RecordingPolicy(sites=sites, values=values, steps=steps, byte_budget=byte_budget, when_behind=when_behind)
    facts = {**describe_model(model), **(metadata or {}), "gradients": gradients, "byte_budget": byte_budget}
    metadata = facts if microbatches == 1 else {**facts, "microbatches": microbatches}
    writing = {"metadata": metadata, "overwrite": overwrite, "durable": durable, "spool_bytes": spool_bytes}
    return Recorder(model, path, policy, RecorderSettings(gradients, optimizer, watch_of(watch), microbatches, writing))


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Return what the manifest of a recording says about the model and this process; JSON-ready."""
    parameters = list(model.parameters())
    floating = next((p.dtype for p in parameters if p.is_floating_point()), None)
    return {
        "kind": "model",
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "training": model.training,
        "dtype": None if floating is None else str(floating).removeprefix("torch."),
        "device": sorted({str(p.device) for p in parameters}),
        # Those of lazy modules have no size before the first call.
        "num_parameters": sum(p.numel() for p in parameters if not is_lazy(p)),
        # Of a wrapper and what it wraps the latter; the former is the class above.
        "modules": {
            path: type(module).__name__ for module, known in ModuleNames(model).known.items() for path in known.paths
        },
        "seed": torch.initial_seed(),
        "rank": _place()[0],
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "num_threads": torch.get_num_threads(),
        "environment": environment.describe(),
        "command_line": environment.without_secrets(sys.argv),
    }


def own_directory(path: Path) -> Path:
    """Return where this process writes what the ranks of its run write to `path`: `rank<r>/` in it, of several."""
    rank, count = _place()
    path = place(path)
    return path / f"rank{rank}" if count > 1 and path.name != f"rank{rank}" else path


def _place() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, of torch's process group or else of the launcher."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    count = environment.num_ranks() or 1
    return environment.rank() if count > 1 else 0, count


def find_module(target: object) -> nn.Module:
    """Return `target` if it is a module, or else the one module that it is bound to, holds or refers to."""
    if isinstance(target, nn.Module):
        return target
    held = [getattr(target, "__self__", None)]
    if inspect.isfunction(target):
        names = inspect.getclosurevars(target)
        held += [*names.nonlocals.values(), *names.globals.values()]
    # What a method is bound to, or a function refers to, may be a pipeline in its turn.
    holders = [item for item in (target, *held) if not isinstance(item, (nn.Module, ModuleType))]
    held += [getattr(item, name, None) for item in holders for name in ("model", "module", "_model")]
    found = list(dict.fromkeys(item for item in held if isinstance(item, nn.Module)))
    if len(found) != 1:
        hint = "engine.generate(..., record=path)" if hasattr(target, "manifest") else "name the module that it calls"
        what = ", ".join(type(item).__name__ for item in found) or f"{type(target).__name__}, which holds no module"
        raise UsageError("only one module can be recorded", got=what, hint=hint)
    return found[0]
