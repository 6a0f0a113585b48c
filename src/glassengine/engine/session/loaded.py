"""An engine in memory: its manifest, its executable, its names, and what follows from them.

What runs an engine (sessions, recorders, encoders) is given this, and `Engine` is this with what users call.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from glassengine.backends.onnx.export import MODEL_FILE
from glassengine.backends.protocol.backend import KeepingCaches
from glassengine.engine import files
from glassengine.engine.manifest import AddedOutput, Manifest
from glassengine.engine.prompts import load_tokenizer
from glassengine.engine.recorded_model import load_recorded
from glassengine.engine.session.checks import check_inputs, require_module, results_of
from glassengine.errors import UsageError
from glassengine.executable.run.executable import Executable
from glassengine.program import Program
from glassengine.program.inputs.user_inputs import positional
from glassengine.program.kinds.causal_lm import USER_MODULE
from glassengine.program.kinds.image_text import FEATURES, INDEX
from glassengine.program.onnx.file import read_onnx
from glassengine.program.representation.kept_logits import KEPT
from glassengine.program.representation.outputs import PREFIX, Derived, DerivedValues, From
from glassengine.program.representation.stored import ONNX_GRAPH, load_graph, load_program
from glassengine.sites import HasSites, SiteTable

Step = tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]
"""Inputs and outputs of a step by name."""
STEP_INPUTS = ("input_ids", "attention_mask", "position_ids", "cache_position")
"""Inputs of a step beside the caches, which a session makes."""


class LoadedEngine(HasSites):
    """An engine in memory; its attributes are those of `Engine`."""

    model: str | Path | None = None
    _trusted = False
    # Back-ends keep the memory of weights, not the tensors that another engine of the same file can share.
    _mapped: Mapping[str, torch.Tensor] | None = None

    def __init__(self, directory: Path, manifest: Manifest, executable: Executable, sites: SiteTable) -> None:
        self.directory = directory
        self.manifest = manifest
        self.executable = executable
        self.sites = sites

    def __repr__(self) -> str:
        name, manifest = type(self).__name__, self.manifest
        return f"{name}({str(self.directory)!r}, backend={manifest.backend!r}, dtype={manifest.dtype!r})"

    @functools.cached_property
    def added_outputs(self) -> dict[str, AddedOutput]:
        """Debug outputs by name."""
        return {entry.name: entry for entry in self.manifest.added_outputs}

    @functools.cached_property
    def past_of(self) -> dict[str, str]:
        """`present_*` -> `past_*`."""
        return {present: past for past, present in self.manifest.caches.items()}

    @functools.cached_property
    def debug_names(self) -> list[str]:
        """Every input and output of a step under the documents' names, in their order."""
        if not self.manifest.generates:
            ports = dict.fromkeys(entry.name for entry in (*self.manifest.inputs, *self.manifest.outputs))
            return [*ports, *self.added_outputs]
        names = ["input_ids", "logits", "position_ids", "attention_mask", "cache_position", *self.constant_inputs]
        names += [INDEX] if self.takes_images else []
        layers: dict[str, list[str]] = {}
        for past in self.manifest.caches:
            layers.setdefault(past.rpartition("_")[2], []).append(past)
        for pasts in layers.values():
            names += [*pasts, *(self.manifest.caches[past] for past in pasts)]
        return [*names, *self.added_outputs]

    @functools.cached_property
    def constant_inputs(self) -> list[str]:
        """Inputs that stay the same in every step of a session: what the encoder made, and its mask."""
        changing = {*STEP_INPUTS, KEPT, INDEX, *self.manifest.caches}
        return [entry.name for entry in self.manifest.inputs if entry.name not in changing]

    @functools.cached_property
    def makes_kept_logits(self) -> bool:
        """Whether a step can make the logits of some of its tokens alone."""
        return any(entry.name == KEPT for entry in self.manifest.inputs)

    @functools.cached_property
    def takes_images(self) -> bool:
        """Whether it generates from images beside text."""
        return FEATURES in self.constant_inputs

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer stored in the engine, of transformers.

        Raises:
            UsageError: There is none.
        """
        if not self.manifest.tokenizer:
            raise UsageError(
                f"the engine {self.manifest.name!r} has no tokenizer", hint="give one with --tokenizer DIRECTORY"
            )
        return load_tokenizer(self.directory)

    @functools.cached_property
    def program(self) -> Program:
        """The stored program with weights: from the engine, or from the checkpoint it was built from.

        Code that has just built the engine may assign its program; then nothing is read.

        Raises:
            UsageError: The checkpoint is not where it was.
            CorruptError: The checkpoint was changed since.
        """
        return load_program(self.directory, self._weights)

    def __call__(self, *args: Any, **inputs: Any) -> dict[str, torch.Tensor]:
        """Run an engine of kind "module" once.

        Args:
            *args: The first arguments, in the order of the forward it was built from.
            **inputs: The arguments it was built with; tensors may be nested in lists and dicts.

        Returns:
            Results and debug outputs (taps included) by name; tensors owned by the caller.

        Raises:
            UsageError: An input does not fit; the message is a table of all of them.
        """
        require_module(self.manifest)
        if args:
            names = dict.fromkeys(re.split(r"[.\[]", entry.name)[0] for entry in self.manifest.inputs)
            inputs = positional(args, inputs, list(names))
        tensors = check_inputs(self.manifest, inputs)
        # A module that writes into an argument does so in a copy, which is then among the results.
        tensors |= {name: tensors[name].clone() for name in self.manifest.caches}
        with torch.no_grad():
            outputs = self.executable.run(tensors)
            results = results_of(self.manifest, outputs, tensors, self.past_of)
            tensors |= {past: results[present] for past, present in self.manifest.caches.items()}
            for name, value in self.debug_values(self.added_outputs, outputs, lambda: (tensors, outputs)).items():
                results[name] = value if self.added_outputs[name].derived is None else value.clone()
        return results

    def debug_values(
        self, names: Iterable[str], outputs: Mapping[str, torch.Tensor], step: Callable[[], Step]
    ) -> dict[str, torch.Tensor]:
        """Return added outputs of one step by name, not copied.

        `step` returns what other nodes are computed from: inputs, caches as they are after the step, and
        outputs.
        """
        values: dict[str, torch.Tensor] = {}
        derived = None
        for name in names:
            entry = self.added_outputs[name]
            if entry.derived is None:
                value = outputs[PREFIX + entry.node]
            else:
                derived = derived or self._derive(*step())
                value = derived[entry.node]
            values[name] = value if entry.cast is None else value.to(getattr(torch, entry.cast))
        return values

    def runner(self, session: object, batch_size: int, length: int) -> Callable[..., Any]:
        """Return what runs a step of a session of this size; where others keep its caches, until it is gone."""
        keeps = self.executable.function
        if not isinstance(keeps, KeepingCaches):
            return self.executable.run
        step, end = keeps.open(batch_size, length)
        weakref.finalize(session, end)
        own = self.executable
        return Executable(own.name, step, graph=own.graph, backend=own.backend).run

    def _derive(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> DerivedValues:
        """Return the values of nodes that are computed on reading."""
        needs_weights = any(entry.derived == str(Derived(From.WEIGHTS)) for entry in self.manifest.added_outputs)
        return DerivedValues(self.program if needs_weights else self._graph, inputs, outputs)

    @functools.cached_property
    def _graph(self) -> Program:
        """The stored program without weights, for values that need none."""
        if "program" in vars(self):
            return self.program
        exported = load_graph(self.directory)
        return load_program(self.directory, {**exported.state_dict, **exported.constants})

    @functools.cached_property
    def _weights(self) -> dict[str, torch.Tensor]:
        stored = files.load_weights(self.directory / files.WEIGHTS)
        if self.manifest.weights == "all":
            return stored
        if (self.directory / ONNX_GRAPH).is_file():
            return read_onnx(self.directory / files.MAIN / MODEL_FILE).weights()
        tensors = load_recorded(self.manifest.model, self.manifest.dtype, self.model, self.directory)
        prefix = f"{USER_MODULE}." if self.manifest.generates else ""
        return {prefix + name: tensor for name, tensor in tensors.items()} | stored
