"""Measures the cost of a file's weights: the engine's results beside those of the checkpoint as it was given.

The judge compares an engine with the weights that the engine has, to tell a mistake from what it rounds. A user has the
checkpoint and the file: both run here end to end on the same tokens, and every result of every step is compared as it
is. Then each quantized weight is put into the checkpoint alone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.judge.cases import Case
from glassengine.judge.end_to_end import EndToEnd
from glassengine.plugins.quantized.check import untied
from glassengine.plugins.quantized.effects import Weight, checkpoint_drift, one_by_one, outcome_of, watching
from glassengine.plugins.quantized.result import LEVEL, as_cost, finished
from glassengine.plugins.serving.check.weights import WeightsFound
from glassengine.program import Program
from glassengine.program.representation.signature import named_results
from glassengine.progress import Progress
from glassengine.results import Findings, Quantization, QuantizedWeight
from glassengine.results.findings import over_budget
from glassengine.serving.protocol import ServedWeight

_MOST_BYTES = 1 << 29
"""Of the parameters of a model that is run once for each weight without being asked to."""


class AsStored:
    """A file of rounded weights beside the unchanged checkpoint.

    Args:
        module: The checkpoint's, before it is given any weight of the file.
        cases: What both run on.
        weights: What was found of the weights.
        held: The weights of the file.
        drift: Whether it was asked which weights cost how much.
        progress: Called with an event when a stage begins.
    """

    @torch.no_grad()
    def __init__(
        self,
        module: nn.Module,
        cases: Sequence[Case],
        weights: WeightsFound,
        held: Mapping[str, ServedWeight],
        *,
        drift: bool,
        progress: Progress,
    ) -> None:
        self._cases, self._weights = cases, weights
        self._forwards = [_forward(case) for case in cases]
        self._ours = {
            case.name: {name: value.clone() for name, value in named_results(module(**forward)).items()}
            for case, forward in zip(cases, self._forwards, strict=True)
        }
        self._untouched = copy.deepcopy(module) if drift else None
        size = sum(parameter.nbytes for parameter in module.parameters())
        self._costs = self._alone(module, held, progress) if drift or size <= _MOST_BYTES else ()
        self._results: EndToEnd | None = None

    def _alone(
        self, module: nn.Module, held: Mapping[str, ServedWeight], progress: Progress
    ) -> tuple[QuantizedWeight, ...]:
        names = [one.name for one in self._weights.judged if one.error is not None]
        with untied(module, names):
            parameters = dict(module.named_parameters())
            found = []
            for one in self._weights.judged:
                if one.error is None or one.name not in parameters:
                    continue
                value, step = held[one.name].value, held[one.name].step
                if value is not None and step is not None:
                    found.append(Weight(one.name, dataclasses.replace(one.error, mistakes=one.hints), value, step))
            with watching(module, parameters, found):
                expected = outcome_of(module, self._forwards)
            one_by_one(module, parameters, found, self._forwards, expected, progress)
        return finished(found)

    def add(self, program: Program, theirs: Mapping[str, Tensor], case: Case, step: int) -> None:
        """Compare the results of a step of the engine with the checkpoint's."""
        self._results = self._results or EndToEnd(program, LEVEL)
        ours = self._ours[case.name]
        if case.input_ids is not None:
            length = case.input_ids.shape[1]
            place = slice(0, length) if step == 0 else slice(length + step - 1, length + step)
            ours = {name: value[:, place] for name, value in ours.items() if name in theirs}
        self._results.compare_signals(theirs, ours, (case.name, step))

    @torch.no_grad()
    def add_costs(self, found: Findings, module: nn.Module, method: str, min_snr: float | None) -> None:
        """Add what the file costs to the findings of the engine with the weights of the file.

        Args:
            found: The findings.
            module: The checkpoint's with these weights.
            method: How they are stored.
            min_snr: As for `check`, of the first result over all cases and steps.
        """
        if self._results is None or not self._results.compared:
            return
        results = [as_cost(one) for one in self._results.compared]
        rows, first = self._results.drift_rows(), results[0]
        rates = first.same_tokens / first.num_tokens if first.num_tokens else None
        found.costs = results
        found.over = over_budget([dataclasses.replace(first, snr_db=rows[0].snr_db)], min_snr)
        found.quantization = Quantization(
            method, first.num_tokens, rows[0].snr_db, first.mean_kl, rates, self._costs, self._weights.unexplained
        )
        if self._untouched is not None:
            found.drift = [*checkpoint_drift(self._untouched, module, self._forwards), *rows]
        notes = () if self._costs or not self._has_steps else ("--drift says what each weight costs",)
        found.notes = [*notes, *self._weights.types(), *found.notes]

    @property
    def _has_steps(self) -> bool:
        return any(one.error is not None for one in self._weights.judged)


def _forward(case: Case) -> dict[str, Any]:
    """Return the keyword arguments of one forward over all tokens of a case."""
    if case.input_ids is None:
        return dict(case.steps[0])
    ids = case.input_ids
    if case.tokens is not None:
        ids = torch.cat([ids, case.tokens.to(ids.dtype)], 1)
    ids = ids[:, : case.input_ids.shape[1] + case.num_steps - 1]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
