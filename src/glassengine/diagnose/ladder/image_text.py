"""A model of images and text, judged on the two programs that its engine generates with: a climb of each.

Invariant: neither program is blamed for the other.

    vision     each image -> its features
    decoder    prefill and decode steps; every side reads the features that the untouched model made

What is made of the two climbs is as for an encoder-decoder (see `two_programs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from glassengine.diagnose.ladder.climb import Climb, begun
from glassengine.diagnose.ladder.rungs import start
from glassengine.engine.prompts.prompts import pad_left
from glassengine.errors import UsageError
from glassengine.judge.cases import Case, Inputs, StepInputs, causal_cases
from glassengine.judge.replay.replay import Cut, Replay
from glassengine.judge.sides.module import ModuleSide
from glassengine.program import LoadedModel, export_programs
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
)
from glassengine.program.user_code.module_state import own_copies
from glassengine.progress import Progress, Work
from glassengine.results.answer import Origin


@dataclass
class VisionSide(ModuleSide):
    """The untouched model, asked for the features of an image."""

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
    """The untouched model generating, its prefill with features that it made before, as in transformers."""

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
    model: LoadedModel, inputs: Inputs, steps: int, stack: ExitStack, progress: Progress
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
    """Return the cases, each with the pixel values of its images; None for text alone.

    Args:
        model: As for `start_with_images`.
        inputs: Likewise.
        image: A made-up one.
        num: Its features.
        steps: As for `start_with_images`.
    """
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
