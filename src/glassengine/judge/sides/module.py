"""Runs a user's module by its own forward, observed at module outputs and taps: the baseline's or the candidate's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import nn

from glassengine.capture.observers import observing
from glassengine.errors import GlassError, IncomparableError
from glassengine.judge.cases import Case, Given, StepInputs, by_name, taken_by
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.arguments import Arguments
from glassengine.judge.sides.protocol import Guarantee, Observed, Place, Side, float_nodes
from glassengine.judge.site_pairs import SitePair
from glassengine.program.kinds.causal_lm import accepted, cache_argument, cache_tensors, expert_modules, forget
from glassengine.program.representation.program import Program
from glassengine.program.representation.signature import named_results, plain_results
from glassengine.program.user_code.calls import described, raised_in
from glassengine.program.user_code.forward import restored_modes
from glassengine.program.user_code.module_state import ModuleState, own_copies, run_with


@dataclass
class ModuleSide(Side):
    """A user's module, unchanged: transformers' own cache and masks; observed at module outputs and taps.

    Args:
        module: In evaluation mode, but for `training`.
        baseline: Program of the baseline, whose sites say which node a module output is.
        replay: Judges the segments between module outputs; None leaves the accumulated floor.
        beside: Of a candidate: the unchanged baseline, which runs each step before it.
        arguments: How inputs become arguments of its forward; None where they have the same names.
        state: What it remembers before a step, where a forward changes that.
        training: Paths of its modules that run in training mode.
    """

    module: nn.Module
    baseline: Program
    place: Place = field(default=Place.PROGRAM, kw_only=True)
    guarantee: Guarantee = field(default=Guarantee.SEGMENTS, kw_only=True)
    replay: Replay | None = field(default=None, kw_only=True)
    beside: Side | None = field(default=None, kw_only=True)
    arguments: Arguments | None = field(default=None, kw_only=True)
    state: ModuleState | None = field(default=None, kw_only=True)
    training: Collection[str] = field(default=(), kw_only=True)
    _values: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    _cache: Any = field(default=None, init=False)
    _steps: int = field(default=0, init=False)

    def begin(self, case: Case) -> None:
        """Start with an empty cache."""
        super().begin(case)
        self._cache = None
        self._values, self._results = {}, {}
        self._steps = 0

    def step(self, inputs: Given) -> None:
        """Run one forward, as `generate()` would.

        Raises:
            IncomparableError: The forward raised.
        """
        self._values, self._results, self.plain, self.written = {}, {}, {}, None
        try:
            self._run(inputs)
        except GlassError:
            raise
        except Exception as error:
            self._raise(error)
        if self.replay is not None:
            self.replay.begin_step(inputs, self._made())
        self._steps += 1

    def _made(self) -> dict[str, torch.Tensor]:
        """Return what was made in the current step, by node, as what reads it was given it."""
        made = {node: self.observed(node) for node in self.baseline.sites.by_node}
        return {node: found[-1].tensor for node, found in made.items() if found}

    def _raise(self, error: Exception) -> NoReturn:
        """Say where a forward raised, and how far it was right."""
        path = raised_in(error, self.module)
        if path is None:
            raise error
        who = "baseline" if self.place is Place.PROGRAM else "candidate"
        step = f"step {self._steps}"
        if self.baseline.generates:
            step = f"decode {step}" if self._steps else f"{step} (prefill)"
        raise IncomparableError(
            f"the {who} cannot run: its forward raised in {path or type(self.module).__name__}, in {step}",
            got=described(error),
            hint=None if self.beside is None else until_here(self._values, self.beside.module_outputs()),
        ) from error

    def _run(self, inputs: Given) -> None:
        with torch.no_grad(), observing(self.module, self._keep, called_as=self.baseline.called_as):
            if not isinstance(inputs, StepInputs):
                returned = self.forward(inputs)
                self._results, self.plain = named_results(returned), plain_results(returned)
                return
            seen = int(inputs.cache_position[-1]) + 1
            with restored_modes(self.module, self.training):
                self.logits, caches = self.decode(inputs, seen)
            self._results = {"logits": self.logits}
        for past, tensor in cache_tensors(caches).items():
            present = self.baseline.caches.get(past)
            # A window that slides holds the newest slots only.
            if present is not None and (tensor.shape[-2] == seen or not past.startswith(("past_key", "past_value"))):
                self._values[f"node:{self.baseline.output_nodes[present]}"] = tensor

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        """Run a forward that nothing follows, and return what it returns."""
        given = taken_by(self.module, inputs) if self.arguments is None else self.arguments.of(inputs)
        with restored_modes(self.module, self.training):
            returned, written = run_with(self.module, self.state, given)
        self.written = {n if self.arguments is None else self.arguments.ours(n): one for n, one in written.items()}
        return returned

    def module_outputs(self) -> Mapping[str, torch.Tensor]:
        """Return what modules and taps made in the current step so far."""
        return self._values

    def decode(self, inputs: StepInputs, seen: int) -> tuple[torch.Tensor, Any]:
        """Run one step with transformers' own cache.

        Args:
            inputs: Of the step.
            seen: Slots of the cache in use.

        Returns:
            Logits [B, S, V], and the cache of the decoder after it.
        """
        from transformers import DynamicCache

        if self._cache is None:
            self._cache = DynamicCache(config=self.module.config.get_text_config(decoder=True))  # type: ignore[union-attr, operator]
        assert self.baseline.layout is not None
        # To a recurrence padding is a token like any other: a row begins when its first real token comes.
        forget(self._cache, ~inputs.attention_mask[:, : seen - 1].any(1))
        tensors = {
            "input_ids": inputs.input_ids,
            "attention_mask": inputs.attention_mask[:, :seen] if self.baseline.layout.attention_layers else None,
            "position_ids": inputs.position_ids,
        }
        arguments = {**own_copies(tensors), cache_argument(self.module): self._cache, "use_cache": True}
        return self.module(**accepted(self.module, arguments)).logits, self._cache

    @cached_property
    def reordered(self) -> tuple[str, ...]:
        """Inside of experts: the program computes them in another order."""
        return tuple(f"{path}." for path in expert_modules(self.module))

    def countable(self, baseline: Program) -> set[str]:
        """Return what modules and taps make."""
        return float_nodes(baseline, ("module", "tap"), without=self.reordered)

    def chooser(self) -> ModuleSide:
        """Return the same side once more, to choose the same tokens without being judged."""
        return replace(self, replay=None)

    def _keep(self, site: str, tensor: torch.Tensor) -> None:
        if not site.startswith(self.reordered):
            self._values[site] = tensor.clone()

    def observed(self, node: str) -> list[Observed]:
        """Return the values of all module outputs and taps that name `node`."""
        found = []
        for site in self.baseline.sites.by_node.get(node, ()):
            key = f"node:{node}" if site.kind == "kv" else site.name
            if site.kind != "op" and key in self._values:
                found.append(Observed(self._values[key], site.name, "name"))
        return found


SMALL_BYTES = 64 << 20
"""Weights up to this size make a small model."""


@contextmanager
def threads_for(module: nn.Module) -> Iterator[None]:
    """Judge small models on one thread: their short ops would wait for a second one longer than they run."""
    before = torch.get_num_threads()
    if sum(parameter.nbytes for parameter in module.parameters()) <= SMALL_BYTES:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_NEAR = 64
"""Units of the coarser dtype."""


def until_here(outputs: Mapping[str, torch.Tensor], baseline: Mapping[str, torch.Tensor]) -> str | None:
    """Say which module outputs before an error are the baseline's; None where none has the name of one there."""
    common = [name for name in outputs if name in baseline]
    if not common:
        return None
    differs = next((name for name in common if not _is_near(outputs[name], baseline[name])), None)
    if differs is not None:
        return f"before that its {differs} is not the baseline's any more"
    return f"until then it is the baseline's: {len(common)} module outputs, the last of them {common[-1]}"


def _is_near(candidate: torch.Tensor, baseline: torch.Tensor) -> bool:
    """Whether two tensors are the same but for what rounding does within a few layers; a hint, not a verdict."""
    if candidate.shape != baseline.shape or not baseline.is_floating_point():
        return torch.equal(candidate, baseline)
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (candidate, baseline) if tensor.is_floating_point())
    wide = baseline.double()
    return bool((candidate.double() - wide).norm() <= _NEAR * eps * wide.norm())


_NAMED = ("module", "tap")


@dataclass
class UntouchedCandidate(ModuleSide):
    """A candidate's module.

    Args:
        names: Baseline node -> names of the candidate's module outputs and taps that are its counterpart; None where
            the candidate has no program, and only names are known.
    """

    names: Mapping[str, Sequence[str]] | None = field(default=None, kw_only=True)
    place: Place = field(default=Place.UNTOUCHED, kw_only=True)

    def step(self, inputs: Given) -> None:
        """Run one forward; as `ModuleSide.step`."""
        self.arranged.begin_step(by_name(inputs))
        super().step(inputs)

    def observed(self, node: str) -> list[Observed]:
        """Return the values of the counterparts of what modules and taps of the baseline make at `node`."""
        found = super().observed(node)
        if self.names is None:
            return found
        sites = {site.name: site.kind for site in self.baseline.sites.by_node.get(node, ())}
        found = [seen for seen in found if sites[seen.site] not in _NAMED]
        if not any(kind in _NAMED for kind in sites.values()):
            return found
        for name in self.names.get(node, ()):
            if name in self._values:
                method = "name" if name in sites else "content"
                found.append(Observed(self.arranged(node, self._values[name]), name, method))
        return found


def own_names(program: Program, pairs: Mapping[str, SitePair]) -> dict[str, list[str]]:
    """Return baseline node -> names of a candidate's module outputs and taps that are its counterpart.

    Args:
        program: The candidate's.
        pairs: Baseline node -> pair.
    """
    by_node = {}
    for node, pair in pairs.items():
        sites = program.sites.by_node.get(pair.candidate.node, ())
        names = [site.name for site in sites if site.kind in _NAMED]
        if names:
            by_node[node] = names
    return by_node
