"""Starts the climbs of each kind of generation: one program, encoder and decoder, or vision and decoder.

Of two programs neither is blamed for the other. The decoder of every side reads the cross-attention cache, or the image
features, that the unchanged encoder made:

    encoder, vision    what fills the cross-attention cache; each image -> its features
    decoder            prefill and decode steps
    joined             the findings of both
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from glassengine.diagnose.ladder.climb import Climb, begun
from glassengine.diagnose.ladder.levels import start
from glassengine.engine.prompts import pad_left
from glassengine.errors import UsageError
from glassengine.judge.cases import Case, Inputs, StepInputs, beside_tokens, causal_cases
from glassengine.judge.end_to_end import merged
from glassengine.judge.replay.replay import Cut, Replay
from glassengine.judge.sides.module import ModuleSide
from glassengine.numerics.exemptions import together
from glassengine.program import LoadedModel, export_programs
from glassengine.program.generation import CAUSAL, ENCODER_DECODER, IMAGE_TEXT, PLAIN, RECURRENT, GenerationKind
from glassengine.program.kinds.encoder_decoder import SOURCE_MASK, Encoder, start_token, takes_mask
from glassengine.program.kinds.example_inputs import encoder_inputs
from glassengine.program.kinds.image_text import (
    FEATURES,
    IMAGE_TOKEN,
    PIXELS,
    ROWS,
    WITHOUT_IMAGES,
    Vision,
    as_arguments,
    features_of,
    image_token,
    made_up_image,
    makes_list,
    one_by_one,
    reason_of,
    require_features,
    rows_of,
    type_arguments,
    without_derived,
)
from glassengine.program.user_code.module_state import own_copies
from glassengine.progress import Progress, Work
from glassengine.results import Findings, LevelResult, WeightsComparison, worst
from glassengine.results.answer import Origin
from glassengine.results.pairs import added

DECODER_IDS = "decoder_input_ids"


@dataclass
class EncoderSide(ModuleSide):
    """The unchanged model, asked for its cross-attention cache."""

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        """Run the encoder and one token of the decoder."""
        return Encoder(self.module)(own_copies(inputs))


@dataclass
class DecoderSide(ModuleSide):
    """The unchanged model generating: its encoder runs in the first step, its own two caches from then on."""

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
    model: LoadedModel, inputs: Inputs, steps: int, stack: ExitStack, progress: Progress, _: Case | None = None
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
    # A level that only explains, or a pass, may be there for one of them.
    names = [level.name for level in max(encoder.levels, decoder.levels, key=len)]
    firsts = [found.first_divergence for found in (encoder, decoder) if found.first_divergence is not None]
    first = min(firsts, key=lambda one: names.index(one.level or ""), default=None)
    levels = (*encoder.levels, *decoder.levels)
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
        levels=[_joined_level([level for level in levels if level.name == name]) for name in names],
        weights=_joined_weights(encoder.weights, decoder.weights),
        results=merged((*encoder.results, *decoder.results)),
        granularity=[*encoder.granularity, *decoder.granularity],
        inputs=[*encoder.inputs, *decoder.inputs],
        drift=[*encoder.drift, *decoder.drift],
        written_differently=[*encoder.written_differently, *decoder.written_differently],
        exemptions=together(*((found.exemptions, found.num_elements) for found in (encoder, decoder))),
        num_elements=encoder.num_elements + decoder.num_elements,
        notes=list(dict.fromkeys([*encoder.notes, *decoder.notes])),
        reads={**encoder.reads, **decoder.reads},
    )


def _joined_level(found: Sequence[LevelResult]) -> LevelResult:
    """Return the level of both programs; notes are the decoder's."""
    return replace(
        found[-1],
        verdict=worst(level.verdict for level in found),
        num_judged=sum(level.num_judged for level in found),
        coverage=min((level.coverage for level in found if level.coverage is not None), default=None),
        first_divergence=next((level.first_divergence for level in found if level.first_divergence is not None), None),
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


@dataclass
class VisionSide(ModuleSide):
    """The unchanged model, asked for the features of an image."""

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        """Make the features of one image.

        That is no call of the model, and nothing outside of one is observed: for a moment it is what a call does.
        """
        before = vars(self.module).get("forward")
        self.module.forward = Vision(self.module).forward
        try:
            return self.module(**own_copies(inputs))
        finally:
            del self.module.forward
            if before is not None:
                self.module.forward = before


@dataclass
class ImageTextSide(ModuleSide):
    """The unchanged model generating, its prefill with features that it made before, as in transformers."""

    is_list: bool = False
    _images: Mapping[str, Any] | None = None

    def begin(self, case: Case) -> None:
        """Start with the features of the case and an empty cache."""
        super().begin(case)
        has_any = bool((case.constants[ROWS] > 0).any())
        self._images = as_arguments(case.constants[FEATURES], is_list=self.is_list) if has_any else {}

    def decode(self, inputs: StepInputs, seen: int) -> tuple[torch.Tensor, Any]:
        """Run one step; as `ModuleSide.decode`."""
        from transformers import DynamicCache

        assert self._images is not None
        module: Any = self.module
        if self._cache is None:
            self._cache = DynamicCache(config=module.config.get_text_config(decoder=True))
        result = module(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask[:, :seen],
            position_ids=inputs.position_ids,
            past_key_values=self._cache,
            use_cache=True,
            **self._images,
            **(
                type_arguments(module, torch.eq(inputs.input_ids, image_token(module) or 0)) if self._steps == 0 else {}
            ),
        )
        self._images = {}
        return result.logits, self._cache


def start_with_images(
    model: LoadedModel, inputs: Inputs, steps: int, stack: ExitStack, progress: Progress, _: Case | None = None
) -> tuple[Climb, ...]:
    """Return the climbs of vision and decoder, each with its first side; that of the decoder alone without images.

    Args:
        model: One that generates from images and text.
        inputs: As `--inputs` gives them: prompts, or `input_ids` with `attention_mask` and `pixel_values`; or None.
        steps: Number of decode steps after the prefill.
        stack: Ends with the check.
        progress: Called with an event when a stage begins.

    Raises:
        UsageError: The inputs do not fit the model.
    """
    try:
        image = made_up_image(model.module, model.directory)
        of_one = features_of(model.module, [image[PIXELS]])
    except Exception as error:  # the model's own code may raise anything
        model.metadata[WITHOUT_IMAGES] = reason_of(error)
        return (start(model.judged_as(model.generation.alone), inputs, steps, stack, progress),)
    images: list[torch.Tensor] = []
    cases = []
    for case, pixels in _cases(model, inputs, image[PIXELS], len(of_one), steps):
        assert case.input_ids is not None and case.attention_mask is not None
        rows = rows_of(case.input_ids, case.attention_mask, model.metadata[IMAGE_TOKEN])
        if pixels is None:
            # Image tokens are tokens like any other, and none of these is read.
            rows, features = rows.clamp(max=0), torch.zeros_like(of_one)
        else:
            own = one_by_one(pixels, image[PIXELS].dim() - 3)
            features = features_of(model.module, own)
            require_features(max(int(rows.max()), 0), len(features), len(own))
            images += own
        cases.append(replace(case, constants={FEATURES: features, ROWS: rows}))
    progress(Work.EXPORTING.says("exporting the programs of vision and decoder"))
    programs = export_programs(model)
    if len(programs) == 1:
        return (start(model.judged_as(model.generation.alone), inputs, steps, stack, progress),)
    vision, decoder = programs
    images = images or [image[PIXELS]]
    origin: Origin = "made up" if inputs is None or isinstance(inputs, str) else "given"
    of_vision = [Case("images", len(images), steps=tuple({PIXELS: one} for one in images), origin=origin)]
    is_list = makes_list(model.module, image)
    seeing = VisionSide(model.module, vision, replay=Replay(vision, cut=Cut.SEGMENT))
    decoding = ImageTextSide(model.module, decoder, replay=Replay(decoder, cut=Cut.SEGMENT), is_list=is_list)
    return begun(model, stack, (vision, of_vision, seeing), (decoder, cases, decoding))


def _cases(
    model: LoadedModel, inputs: Inputs, image: torch.Tensor, num: int, steps: int
) -> list[tuple[Case, torch.Tensor | None]]:
    """Return the cases, each with the pixel values of its images; None for text alone."""
    if isinstance(inputs, str):
        return [(case, None) for case in causal_cases(model, inputs, steps)]
    if inputs is not None:
        found = zip(causal_cases(model, inputs, steps), inputs, strict=True)
        return [(case, _pixels(step, image)) for case, step in found]
    limit = model.metadata.get("max_position_embeddings", 1 << 62) - num - steps
    if limit < 1:
        raise UsageError(
            f"{model.spec} has no room for an image and {steps} decode steps",
            got=f"{num} image tokens",
            expected=f"less than {model.metadata['max_position_embeddings']} tokens",
        )
    return _made_up(causal_cases(model, None, steps), int(model.metadata[IMAGE_TOKEN]), num, limit, image)


def _pixels(step: Mapping[str, Any], image: torch.Tensor) -> torch.Tensor | None:
    if PIXELS not in step:
        return None
    pixels = torch.as_tensor(step[PIXELS])
    if pixels.dim() < 3 or pixels.shape[-3:] != image.shape[-3:]:
        raise UsageError(
            "an image has another size than the model's",
            got=f"{PIXELS} {list(pixels.shape)}",
            expected=f"{PIXELS} [images, {', '.join(map(str, image.shape[-3:]))}]",
        )
    return pixels.to(image.dtype) if pixels.is_floating_point() else pixels


def _made_up(
    texts: Sequence[Case], token: int, num: int, limit: int, image: torch.Tensor
) -> list[tuple[Case, torch.Tensor | None]]:
    """Return the built-in prompts, the first with an image of `num` tokens; `limit` tokens beside it."""
    rows = []
    for case in texts[:2]:
        assert case.input_ids is not None
        row = case.input_ids[0, :limit].tolist()
        rows.append([other if other != token else (token - 1 if token else 1) for other in row])
    rows[0][1:1] = [token] * num

    def made(name: str, chosen: list[list[int]]) -> Case:
        ids, mask = pad_left(chosen, 0 if token else 1)
        return replace(texts[0], name=name, input_ids=ids, attention_mask=mask)

    return [
        (made("prompt 0 with an image", rows[:1]), image),
        (made("prompt 1", rows[1:]), None),
        (made("prompt 0 with an image and prompt 1, left-padded", rows), image),
    ]


Start = Callable[[LoadedModel, Inputs, int, ExitStack, Progress, Case | None], Sequence[Climb]]


@dataclass(frozen=True)
class GenerationRequest:
    """What a check asks of a kind of generation.

    Attributes:
        start: Returns the climb of each program, in the order in which they run, with its first side.
        beside: Returns the names of given inputs that its steps cannot take: with them one forward is judged.
        given: Returns the inputs without what it makes itself.
    """

    start: Start
    beside: Callable[[LoadedModel, Inputs], list[str]]
    given: Callable[[LoadedModel, Inputs], Inputs] = lambda model, inputs: inputs


def _start_one(
    model: LoadedModel, inputs: Inputs, steps: int, stack: ExitStack, progress: Progress, case: Case | None
) -> Sequence[Climb]:
    return (start(model, inputs, steps, stack, progress, case),)


def _beside_images(model: LoadedModel, inputs: Inputs) -> list[str]:
    return [name for name in beside_tokens(inputs) if name != PIXELS]


def _without_derived(model: LoadedModel, inputs: Inputs) -> Inputs:
    if inputs is None or isinstance(inputs, str):
        return inputs
    return [without_derived(step, model.metadata[IMAGE_TOKEN]) for step in inputs]


def _beside_prompts(model: LoadedModel, inputs: Inputs) -> list[str]:
    return beside_tokens(inputs)


JUDGED: Mapping[GenerationKind, GenerationRequest] = {
    PLAIN: GenerationRequest(_start_one, lambda model, inputs: []),
    CAUSAL: GenerationRequest(_start_one, _beside_prompts),
    RECURRENT: GenerationRequest(_start_one, _beside_prompts),
    ENCODER_DECODER: GenerationRequest(start_both, beside_source),
    IMAGE_TEXT: GenerationRequest(start_with_images, _beside_images, _without_derived),
}
