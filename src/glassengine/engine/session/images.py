"""Images of a session: their features are computed once, and each step gets the tokens that take them.

Shape legend: B batch, S tokens of the prompts, N features of all images, D hidden size, M image tokens of a step, C
channels, H and W height and width of an image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from glassengine.engine.manifest import Manifest
from glassengine.engine.session.checks import InputRow, row_of
from glassengine.engine.session.loaded import LoadedEngine
from glassengine.errors import UsageError
from glassengine.program.kinds.image_text import (
    FEATURES,
    IMAGE_TOKEN,
    PIXELS,
    ROWS,
    WHOLE_IMAGES,
    decode_index,
    index_of,
    one_by_one,
    padded_features,
    rows_of,
)


def encode_images(vision: LoadedEngine, **inputs: Any) -> torch.Tensor:
    """Return the features [N, D] of images.

    Args:
        vision: Engine of the vision program, which takes one image.
        **inputs: `pixel_values` [..., C, H, W] of all images; they are cast to the engine's dtype.

    Raises:
        UsageError: Something else was given, or an image of another size; the message is a table.
    """
    pixels = inputs.get(PIXELS)
    if not isinstance(pixels, torch.Tensor) or pixels.dim() < 3 or not pixels.numel() or len(inputs) > 1:
        shape = list(pixels.shape) if isinstance(pixels, torch.Tensor) else type(pixels).__name__
        raise UsageError(
            f"the engine {vision.manifest.name!r} makes features of images",
            got=", ".join(f"{name} {shape}" if name == PIXELS else name for name in inputs) or "nothing",
            expected=f"{PIXELS} [images, channels, height, width]",
        )
    entry = vision.manifest.inputs[0]
    if pixels.is_floating_point():
        pixels = pixels.to(getattr(torch, entry.dtype))
    images = one_by_one(pixels, len(entry.shape) - 3)
    return torch.cat([vision(pixel_values=image)[FEATURES] for image in images])


class PromptImages:
    """What a session of an engine that takes images gives to its steps beside tokens.

    `constants` are those of `engine.encode`, and `image_rows` where each feature goes; none for text alone.

    Attributes:
        constants: Inputs that no step changes: `image_features` [N, D].
        in_one_piece: Whether prompts with images cannot be cut.
    """

    def __init__(self, manifest: Manifest, constants: Mapping[str, torch.Tensor] | None) -> None:
        self._entry = next(entry for entry in manifest.inputs if entry.name == FEATURES)
        self._token = int(manifest.model[IMAGE_TOKEN])
        given = dict(constants or {})
        self._rows = given.pop(ROWS, None) if FEATURES in given else None
        self._is_default = self._rows is None
        self._num: int | None = None
        if FEATURES in given:
            if not isinstance(given[FEATURES], torch.Tensor) or given[FEATURES].dim() != 2:
                raise UsageError(f"{FEATURES} are a tensor [features, size]", hint="engine.encode(pixel_values=...)")
            self._num = len(given[FEATURES])
            given[FEATURES] = padded_features(given[FEATURES])
        else:
            width = int(self._entry.shape[-1])
            nothing = torch.zeros((0, width), dtype=getattr(torch, self._entry.dtype))
            given[FEATURES] = padded_features(nothing)
        self.constants = given
        self.in_one_piece = bool(manifest.model.get(WHOLE_IMAGES)) and self._num is not None

    def begin(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[InputRow]:
        """Lay out where features go in prompts [B, S]; return what to say of the images given."""
        if self._rows is None:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            # Without images an image token is a token like any other, as in transformers.
            self._rows = rows_of(input_ids, mask if self._num is not None else torch.zeros_like(mask), self._token)
        if self._num is None:
            return []
        features = self.constants[FEATURES]
        most, width = int(self._rows.max()), self._entry.shape[-1]
        built = f"{self._entry.dtype} cpu [{most}, {width}]"
        problem = ("", "")
        if features.shape[-1] != width:
            problem = (f"features of size {features.shape[-1]}", "engine.encode(pixel_values=...)")
        elif most > self._num or (self._is_default and most < self._num):
            problem = (f"{self._num} features for {most} image tokens", "as many image tokens as features")
        elif not torch.equal(self._rows >= 0, input_ids == self._token):
            # Compiled code would read behind the index.
            problem = (f"{ROWS} does not match the image tokens", "leave it out")
        return [row_of(FEATURES, features[: self._num], built, *problem)]

    def index(self, start: int, stop: int, batch: int) -> torch.Tensor:
        """Return the index [M] of a step that runs tokens `start` to `stop` of the sequences."""
        if self._rows is None or start >= self._rows.shape[1]:
            return decode_index(batch)
        return index_of(self._rows[:, start:stop])
