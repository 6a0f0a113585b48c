"""An encoder-decoder, judged on the two programs that its engine generates with: a climb of each, then one answer.

Invariant: neither program is blamed for the other.

    encoder   what fills the cross-attention cache, on each input
    decoder   prefill and decode steps; every side reads the cross-attention cache that the untouched encoder made
    joined    one comparison of both
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from glassengine.diagnose.ladder.climb import Climb, begun
from glassengine.errors import UsageError
from glassengine.judge.cases import Case, Inputs, StepInputs, causal_cases
from glassengine.judge.end_to_end import merged
from glassengine.judge.replay.replay import Cut, Replay
from glassengine.judge.sides.module import ModuleSide
from glassengine.numerics.exemptions import together
from glassengine.program import LoadedModel, export_programs
from glassengine.program.kinds.encoder_decoder import SOURCE_MASK, Encoder, start_token, takes_mask
from glassengine.program.kinds.example_inputs import encoder_inputs
from glassengine.program.user_code.module_state import own_copies
from glassengine.progress import Progress, Work
from glassengine.results import Findings, Rung, WeightsComparison, added, worst

DECODER_IDS = "decoder_input_ids"


@dataclass
class EncoderSide(ModuleSide):
    """The untouched model, asked for its cross-attention cache."""

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        """Run the encoder and one token of the decoder."""
        return Encoder(self.module)(own_copies(inputs))


@dataclass
class DecoderSide(ModuleSide):
    """The untouched model generating: its encoder runs in the first step, its own two caches from then on."""

    _source: Mapping[str, Any] | None = None

    def begin(self, case: Case) -> None:
        """Start with the inputs of the encoder and empty caches."""
        super().begin(case)
        self._source = case.source

    def decode(self, inputs: StepInputs, seen: int) -> tuple[torch.Tensor, Any]:
        """Run one step; as `ModuleSide.decode`."""
        assert self._source is not None
        if self._cache is None:
            self._cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        result = self.module(
            **self._source, decoder_input_ids=inputs.input_ids, past_key_values=self._cache, use_cache=True
        )
        states = BaseModelOutput(last_hidden_state=result.encoder_last_hidden_state)
        mask = {"attention_mask": self._source["attention_mask"]} if takes_mask(self.module) else {}
        self._source = {"encoder_outputs": states, **mask}
        return result.logits, self._cache.self_attention_cache


def beside_source(model: LoadedModel, inputs: Inputs) -> list[str]:
    """Return the keyword arguments among `inputs` that generating has no use for: labels, say, or masks of its own."""
    if inputs is None or isinstance(inputs, str):
        return []
    known = {model.module.main_input_name, DECODER_IDS} | ({"attention_mask"} if takes_mask(model.module) else set())
    return list(dict.fromkeys(key for step in inputs for key in step if key not in known))


def start_both(
    model: LoadedModel, inputs: Inputs, steps: int, stack: ExitStack, progress: Progress
) -> tuple[Climb, ...]:
    """Return the climbs of encoder and decoder, each with its first side.

    Args:
        model: An encoder-decoder.
        inputs: As `--inputs` gives them: prompts of the encoder, its tensors and `decoder_input_ids`, or None.
        steps: Number of decode steps after the prefill.
        stack: Ends with the check.
        progress: Called with an event when a stage begins.

    Raises:
        UsageError: The model cannot be traced, or the inputs do not fit it.
    """
    sources = _sources(model, inputs, steps)
    progress(Work.EXPORTING.says("exporting the programs of encoder and decoder"))
    encoder, decoder = export_programs(model)
    of_encoder, of_decoder = [], []
    made: dict[str, Any] = {"origin": "made up" if inputs is None else "given"}
    for name, source, ids in sources:
        with torch.no_grad():
            constants = {key: value.contiguous() for key, value in Encoder(model.module)(source).items()}
        if takes_mask(model.module):
            constants[SOURCE_MASK] = source["attention_mask"]
        of_encoder.append(Case(name, 1, steps=(source,), **made))
        mask = torch.ones_like(ids)
        of_both: dict[str, Any] = {"constants": constants, "source": source, **made}
        of_decoder.append(Case(name, steps + 1, input_ids=ids, attention_mask=mask, **of_both))
    encoding = EncoderSide(model.module, encoder, replay=Replay(encoder, cut=Cut.SEGMENT))
    decoding = DecoderSide(model.module, decoder, replay=Replay(decoder, cut=Cut.SEGMENT))
    return begun(model, stack, (encoder, of_encoder, encoding), (decoder, of_decoder, decoding))


def _sources(model: LoadedModel, inputs: Inputs, steps: int) -> list[tuple[str, dict[str, Any], torch.Tensor]]:
    """Return (name, inputs of the encoder, tokens that decoding begins with [B, S]) of each case."""
    main = str(model.module.main_input_name)
    if main == "input_ids" and (inputs is None or isinstance(inputs, str)):
        found = [(case.name, _right_padded(model, case)) for case in causal_cases(model, inputs, steps)]
    elif isinstance(inputs, str):
        raise UsageError(
            f"{model.spec} takes no text", got=inputs, hint="--inputs FILE with the tensors of its encoder"
        )
    else:
        given = encoder_inputs(model.module, model.directory) if inputs is None else inputs
        found = [(f"inputs {number}", dict(step)) for number, step in enumerate(given)]
    cases = []
    for name, source in found:
        begun = source.pop(DECODER_IDS, None)
        if main not in source:
            raise UsageError("the input of the encoder is missing", got=", ".join(source), expected=main)
        first = source[main]
        if takes_mask(model.module):
            source.setdefault("attention_mask", torch.ones_like(first))
        if begun is None:
            start = start_token(getattr(model.module, "generation_config", model.module.config))
            if start is None:
                raise UsageError(f"{model.spec} states no start token", hint="--inputs FILE with decoder_input_ids")
            begun = torch.full((first.shape[0], 1), start)
        cases.append((name, source, begun))
    return cases


def _right_padded(model: LoadedModel, case: Case) -> dict[str, Any]:
    """Return the prompts of a case as inputs of the encoder."""
    assert case.input_ids is not None and case.attention_mask is not None
    order = case.attention_mask.argsort(dim=1, descending=True, stable=True)
    source = {"input_ids": case.input_ids.gather(1, order)}
    return source | ({"attention_mask": case.attention_mask.gather(1, order)} if takes_mask(model.module) else {})


def joined(encoder: Findings, decoder: Findings) -> Findings:
    """Return what was found in both programs; coverage is the lower one of the two."""
    # A rung that only explains, or a pass, may be there for one of them.
    names = [rung.name for rung in max(encoder.rungs, decoder.rungs, key=len)]
    firsts = [found.first_divergence for found in (encoder, decoder) if found.first_divergence is not None]
    first = min(firsts, key=lambda one: names.index(one.rung or ""), default=None)
    rungs = (*encoder.rungs, *decoder.rungs)
    less = min(encoder, decoder, key=lambda found: found.coverage)
    assert encoder.counts is not None and decoder.counts is not None
    return replace(
        decoder,
        inside=worst([encoder.inside, decoder.inside]),
        inside_reason=None if first is not None else encoder.inside_reason or decoder.inside_reason,
        differences=[*encoder.differences, *decoder.differences],
        token_change=encoder.token_change or decoder.token_change,
        left=encoder.left or decoder.left,
        missing=less.missing,
        first_divergence=first,
        origins=[*encoder.origins, *decoder.origins],
        counts=added(encoder.counts, decoder.counts),
        pairs=(*encoder.pairs, *decoder.pairs),
        skipped=[*encoder.skipped, *decoder.skipped],
        coverage=less.coverage,
        rungs=[_joined_rung([rung for rung in rungs if rung.name == name]) for name in names],
        weights=_joined_weights(encoder.weights, decoder.weights),
        results=merged((*encoder.results, *decoder.results)),
        fineness=[*encoder.fineness, *decoder.fineness],
        inputs=[*encoder.inputs, *decoder.inputs],
        drift=[*encoder.drift, *decoder.drift],
        written_differently=[*encoder.written_differently, *decoder.written_differently],
        exemptions=together(*((found.exemptions, found.num_elements) for found in (encoder, decoder))),
        num_elements=encoder.num_elements + decoder.num_elements,
        notes=list(dict.fromkeys([*encoder.notes, *decoder.notes])),
        reads={**encoder.reads, **decoder.reads},
    )


def _joined_rung(found: Sequence[Rung]) -> Rung:
    """Return the rung of both programs; notes are the decoder's."""
    return replace(
        found[-1],
        verdict=worst(rung.verdict for rung in found),
        num_judged=sum(rung.num_judged for rung in found),
        coverage=min((rung.coverage for rung in found if rung.coverage is not None), default=None),
        first_divergence=next((rung.first_divergence for rung in found if rung.first_divergence is not None), None),
    )


def _joined_weights(encoder: WeightsComparison | None, decoder: WeightsComparison | None) -> WeightsComparison | None:
    """Return both; a weight that both programs read is counted in each."""
    if encoder is None or decoder is None:
        return encoder or decoder

    def union(one: Sequence[str], other: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*one, *other]))

    return WeightsComparison(
        encoder.compared + decoder.compared,
        union(encoder.different, decoder.different),
        union(encoder.only_baseline, decoder.only_baseline),
        union(encoder.only_candidate, decoder.only_candidate),
        union(encoder.how, decoder.how),
    )
