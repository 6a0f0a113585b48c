"""Conformance tests of a back-end, as functions that its author can call.

    subject = prepare(module_or_program, backend, directory)     every op observable, built, loaded
    report = check_generation(subject, batch=2, left_padding=3)  prefill and three decode steps
    assert report.ok, report

The reference is the program itself, interpreted by torch. Values are held to plain tolerances relative to the size of
the tensor; nothing here uses this package's own verdicts, which are in turn tested with these back-ends.

Checked in every step: each op site; results; that inputs other than caches are unchanged; that each written slot of a
cache is right and every other slot bitwise as before; that results of earlier steps stay as they were. What a cast of
an infinity to an integer yields is up to the processor and is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glassengine.backends.protocol.backend import Backend, Run
from glassengine.capture.observers import run_program
from glassengine.engine.session.loaded import STEP_INPUTS
from glassengine.executable.run.executable import compile_executable, load_executable
from glassengine.judge.exclusions.perturbation import Followed
from glassengine.judge.exclusions.sources import UndefinedCasts
from glassengine.numerics.mask_values import sentinel
from glassengine.ops.traits import named
from glassengine.program.kinds.image_text import IMAGE_TOKEN, INDEX
from glassengine.program.representation.outputs import DerivedValues, add_outputs, plan_outputs
from glassengine.program.representation.program import Program
from glassengine.results.backends import ConformanceReport, Finding
from glassengine.sites import Site

TOLERANCES = {"float64": 1e-12, "float32": 5e-5, "float16": 1e-2, "bfloat16": 1e-1}
"""Largest error of an element, as a fraction of the largest finite element of its tensor.

That of the coarsest dtype in a program holds for all of it: a float32 norm of float16 values is as inexact as these.
"""

PROMPT_LENGTH = 9
SOURCE_LENGTH = 6
CACHE_LENGTH = 16


@dataclass(frozen=True)
class Subject:
    """A program, the same with every op site as an output, and the latter built and loaded by a back-end."""

    program: Program
    observed: Program
    nodes: tuple[str, ...]
    run: Run


def prepare(program: Program, backend: Backend, directory: Path) -> Subject:
    """Add every op site of `program` as an output, build it into the empty `directory` and load it.

    Raises:
        BackendError: The back-end failed to build or load it.
    """
    nodes = tuple(site.node for site in program.sites if site.kind == "op")
    observed = add_outputs(program, plan_outputs(program, nodes).added)
    name = f"conformance/{backend.name}"
    compile_executable(name, lambda path: backend.build(observed, path), directory)
    stored = {**program.exported.state_dict, **program.exported.constants}
    weights = None if backend.keeps_weights(observed) else stored
    loaded = load_executable(name, lambda path: backend.load(path, weights), directory)
    return Subject(program, observed, nodes, loaded.run)


def check_module(subject: Subject, inputs: Mapping[str, torch.Tensor]) -> ConformanceReport:
    """Run a program without caches once and compare every op site."""
    check = _Check(subject)
    check.step(dict(inputs), {}, {}, valid=None)
    return check.report()


def check_generation(
    subject: Subject, *, batch: int = 1, left_padding: int = 0, num_decode_steps: int = 3, strided: bool = False
) -> ConformanceReport:
    """Run a prefill and decode steps of a causal LM and compare every op site; tokens come from the reference.

    Args:
        subject: A prepared causal LM.
        batch: Rows.
        left_padding: Padding tokens at the start of every row but the first. Only valid positions are compared.
        num_decode_steps: Steps of one token after the prefill of `PROMPT_LENGTH` tokens.
        strided: Hand in tensors that are not contiguous, caches included.
    """
    program = subject.program
    assert program.layout is not None
    floating = next(port.dtype for port in program.inputs if port.name in program.caches)
    expected_kv = program.layout.allocate(batch, CACHE_LENGTH, getattr(torch, floating))
    kv = {name: _strided(tensor) if strided else tensor.clone() for name, tensor in expected_kv.items()}
    valid = torch.zeros((batch, CACHE_LENGTH), dtype=torch.bool)
    prompt = torch.randint(3, 250, (batch, PROMPT_LENGTH), generator=torch.Generator().manual_seed(11))
    if IMAGE_TOKEN in program.metadata:
        prompt[:, -4:-2] = program.metadata[IMAGE_TOKEN]
    # The program of a recurrent model takes a prompt token by token.
    given = list(torch.split(prompt, 1, dim=1)) if program.layout.states else [prompt]
    tokens = given[0]
    start = 0
    constants = _constants(program, batch)
    check = _Check(subject)
    for step in range(len(given) + num_decode_steps):
        tokens = given[step] if step < len(given) else tokens
        slots = torch.arange(start, start + tokens.shape[1])
        valid[:, slots] = True
        valid[1:, :left_padding] = False
        mask = valid.to(torch.int64)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, slots]
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, "cache_position": slots}
        if strided:
            inputs = {name: _strided(tensor) for name, tensor in inputs.items()}
        inputs |= constants
        expected = check.step(inputs, expected_kv, kv, valid=valid)
        tokens = expected["logits"][:, -1].argmax(-1, keepdim=True)
        start = int(slots[-1]) + 1
    return check.report()


def _constants(program: Program, batch: int) -> dict[str, torch.Tensor]:
    """Return values for what an encoder or a vision program would make.

    The last position of an encoder is masked where it can be. Of the image tokens the first keeps its own embedding.

    Args:
        program: Of a decoder; there are none for other models.
        batch: Rows.
    """
    generator = torch.Generator().manual_seed(12)
    sizes = {"batch": batch, "source": SOURCE_LENGTH, "features": SOURCE_LENGTH}
    made = {}
    for port in program.inputs:
        if port.name in STEP_INPUTS or port.name in program.caches:
            continue
        if port.name == INDEX:
            made[port.name] = torch.arange(batch * PROMPT_LENGTH) % (SOURCE_LENGTH + 1)
            continue
        shape = [size if isinstance(size, int) else sizes[size] for size in port.shape]
        dtype = getattr(torch, port.dtype)
        made[port.name] = (
            torch.randn(shape, generator=generator).to(dtype)
            if dtype.is_floating_point
            else torch.ones(shape, dtype=dtype)
        )
        if not dtype.is_floating_point:
            made[port.name][-1, -1] = 0
    return made


class _Check:
    """Steps of one run and what was found in them."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._sites = {site.node: site for site in subject.program.sites if site.kind == "op"}
        self._unset = {node for node, site in self._sites.items() if named(site.op).is_unwritten}
        self._skipped = {self._sites[node].name: "memory that nothing was written to" for node in self._unset}
        self._tolerance = max(TOLERANCES.get(site.dtype, 0.0) for site in self._sites.values())
        self._findings: list[Finding] = []
        self._held: list[tuple[int, str, torch.Tensor, torch.Tensor]] = []
        self._num_checked = 0
        self._step = -1
        self._undefined: dict[str, torch.Tensor | None] = {}

    def report(self) -> ConformanceReport:
        for step, name, tensor, copy in self._held:
            self._require(name, _bitwise(tensor, copy), "changed after the run that returned it", step=step)
        return ConformanceReport(self._num_checked, tuple(self._findings), self._skipped)

    def step(
        self,
        inputs: dict[str, torch.Tensor],
        expected_kv: dict[str, torch.Tensor],
        kv: dict[str, torch.Tensor],
        *,
        valid: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Run one step on both sides, both caches being brought up to date; return the reference's results."""
        self._step += 1
        program = self._subject.program
        values: dict[str, torch.Tensor] = {}
        given = {**inputs, **expected_kv}
        held = {port.node: given[port.name] for port in program.inputs} | program.weights()
        placeholders = program.graph.find_nodes(op="placeholder")
        known: dict[torch.fx.Node, tuple[Any, Any]] = {node: (held.get(node.name),) * 2 for node in placeholders}
        casts = Followed(UndefinedCasts())

        def observe(node: torch.fx.Node, value: object) -> None:
            known[node] = (value, value)
            casts.visit(node, known)
            if isinstance(value, torch.Tensor):
                self._undefined[node.name] = casts.excluded(node, known)
                values[node.name] = value.clone()

        expected = run_program(program, given, observe)
        before = {name: tensor.clone() for name, tensor in {**inputs, **kv}.items()}
        outputs = self._subject.run({**inputs, **kv})

        for past, present in program.caches.items():
            assert valid is not None
            expected_kv[past] = expected[present]
            if present in outputs:
                kv[past] = outputs[present]
            self._check_cache(past, before[past], kv[past], expected[present], inputs["cache_position"], valid)
        for name, tensor in inputs.items():
            self._require(name, _bitwise(tensor, before[name]), "the run changed this input")

        at_hand = DerivedValues(self._subject.observed, {**inputs, **kv}, outputs)
        for node in self._subject.nodes:
            if node in self._unset:
                continue
            self._compare(self._sites[node], at_hand[node], values[node], inputs, valid)
        for name, node in program.output_nodes.items():
            if name in outputs and name not in program.caches.values():
                self._compare(self._sites[node], outputs[name], expected[name], inputs, valid)
        self._held += [
            (self._step, name, tensor, tensor.clone())
            for name, tensor in outputs.items()
            if name not in program.caches.values()
        ]
        return expected

    def _check_cache(
        self,
        name: str,
        before: torch.Tensor,
        after: torch.Tensor,
        expected: torch.Tensor,
        slots: torch.Tensor,
        valid: torch.Tensor,
    ) -> None:
        """Compare a cache [B, H, T, D]: written slots with the reference, every other slot with what it was.

        A state [B, ...] is compared as a whole.
        """
        assert self._subject.program.layout is not None
        if name in {state.name for state in self._subject.program.layout.states}:
            rows = valid[:, slots[-1]]
            self._require(name, *self._close(after[rows], expected[rows], expected))
            return
        others = torch.ones(after.shape[2], dtype=torch.bool)
        others[slots] = False
        unchanged = _bitwise(after[:, :, others], before[:, :, others])
        self._require(name, unchanged, "a slot that this step does not write has changed")
        written, wanted = (cache[:, :, slots].transpose(1, 2)[valid[:, slots]] for cache in (after, expected))
        self._require(name, *self._close(written, wanted, expected))

    def _compare(
        self,
        site: Site,
        actual: torch.Tensor,
        expected: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        valid: torch.Tensor | None,
    ) -> None:
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            problem = f"is {actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"
            self._require(site.name, False, problem)
            return
        rows = torch.ones(expected.shape, dtype=torch.bool)
        if valid is not None:
            has_padding = not valid[:, inputs["cache_position"]].all()
            if has_padding and any(isinstance(size, str) and "*" in size for size in site.shape):
                self._skipped[site.name] = "tokens of all rows in one dimension: not compared in padded batches"
                return
            rows = _valid_positions(site, expected.shape, valid, inputs["cache_position"])
        undefined = self._undefined.get(site.node)
        if undefined is not None:
            rows &= ~undefined
        self._require(site.name, *self._close(actual[rows], expected[rows], expected))

    def _close(self, actual: torch.Tensor, expected: torch.Tensor, whole: torch.Tensor) -> tuple[bool, str]:
        """Return whether `actual` is near enough to `expected`, and what is wrong otherwise.

        Args:
            actual: Elements to judge.
            expected: The same elements of the reference.
            whole: The reference's tensor that they are from: its largest element sets the tolerance.
        """
        if not expected.is_floating_point():
            return torch.equal(actual, expected), f"{int((actual != expected).sum())} elements differ"
        finite = whole[whole.isfinite() & (whole.abs() < sentinel(whole.dtype))].double().abs()
        scale = float(finite.max()) if finite.numel() else 0.0
        # Equal elements are always fine: infinities and the lowest finite number have no useful difference.
        agree = (actual == expected) | (actual.isnan() & expected.isnan())
        error = (actual.double() - expected.double()).abs()[~agree]
        largest = float(error.nan_to_num(nan=float("inf")).max()) if error.numel() else 0.0
        return largest <= self._tolerance * scale, f"error of {largest:.3g} in a tensor of size {scale:.3g}"

    def _require(self, what: str, fine: bool, problem: str, *, step: int | None = None) -> None:
        self._num_checked += 1
        if not fine:
            self._findings.append(Finding(self._step if step is None else step, what, problem))


def _valid_positions(site: Site, shape: Sequence[int], valid: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return a mask of `shape`: False where the position, or the cache slot, of a row is padding or unused."""
    rows = torch.ones(tuple(shape), dtype=torch.bool)
    batch = site.axes.get("batch")
    if batch is not None and len(slots) == 1:
        view = [1] * len(shape)
        view[batch] = len(valid)
        rows &= valid[:, slots].reshape(view)
    for axis, table in (("sequence", valid[:, slots]), ("cache", valid)):
        at = site.axes.get(axis)
        if at is None or batch is None:
            continue
        view = [1] * len(shape)
        view[batch], view[at] = table.shape
        rows &= (table if batch < at else table.T).reshape(view)
    return rows


def _bitwise(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether both hold the same bytes."""
    return torch.equal(
        *(
            tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
            for tensor in (actual, expected)
        )
    )


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor whose elements do not lie side by side."""
    spread = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    spread[..., 0] = tensor
    return spread[..., 0]
