"""The two programs of a language model that takes images: one makes their features, the other decodes with them.

    vision    one image -> its features, through the projector; run once for each image
    decoder   the program of a causal language model, with the features of all images as an input that no step changes

Both are traced from the unchanged user model. Where features go is decided by the model's own code: it puts them, in
order, in the places of its image tokens. An image token without a feature (one that the model itself has generated, or
of a prompt without images) keeps its own embedding, as in transformers. So every step also gets an index: for each of
its image tokens in order the number of its feature, or 0 for its own embedding.

Shape legend: B batch, S new tokens, N features of all images, P features of one image, M image tokens of a step, C
channels, H and W height and width of an image, D hidden size.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPooling

from glassengine.errors import UsageError
from glassengine.program.kinds import causal_lm
from glassengine.program.kinds.causal_lm import USER_MODULE, KVLayout
from glassengine.program.kinds.example_inputs import example_inputs as made_up

PIXELS = "pixel_values"
"""Input of the vision program: one image [1, C, H, W], or with more leading dimensions of 1."""
FEATURES = "image_features"
"""Result of the vision program [P, D]; input of the decoder [N, D]."""
INDEX = "image_index"
"""Input of the decoder, which changes from step to step: [M] int64."""
ROWS = "image_rows"
"""What a session is given to make that input of: [B, S] int64, see `rows_of`."""
IMAGE_TOKEN = "image_token"  # noqa: S105 (of text)
"""Key of the metadata: the token in whose places features go."""
WHOLE_IMAGES = "whole_images"
"""Key of the metadata: whether the tokens of an image must run in one piece."""
WITHOUT_IMAGES = "without_images"
"""Key of the metadata, of models that take images but are built without: the reason."""

_TYPES = ("token_type_ids", "mm_token_type_ids")
_PIXEL_MASK = "pixel_attention_mask"
_OPTIONS = (PIXELS, _PIXEL_MASK, "vision_feature_layer", "vision_feature_select_strategy", "kwargs")
_SMALLEST = 2
"""Export assumes at least so many features and image tokens; what is beyond those of a step is not read."""


def image_token(module: nn.Module) -> int | None:
    """Return the image token of a model; None where it has none."""
    config: Any = getattr(module, "config", None)
    found = getattr(config, "image_token_id", None)
    return found if isinstance(found, int) else None


def reason_against(module: Any) -> str | None:
    """Return why a language model of transformers cannot be built with images; "" where it takes none at all."""
    if PIXELS not in inspect.signature(module.forward).parameters:
        return ""
    features = getattr(module, "get_image_features", None)
    if features is None or image_token(module) is None:
        return "it makes no features of images by themselves"
    if "mm_encoder_outputs" not in inspect.signature(module.base_model.forward).parameters:
        return "its decoder does not take features that were made before"
    if more := [name for name in inspect.signature(features).parameters if name not in _OPTIONS]:
        return f"its images come with {', '.join(more)}"
    if "token_type_ids" in inspect.signature(module.forward).parameters and not sees_whole_images(module):
        return "its mask depends on where the prompt ends"
    return None


def sees_whole_images(module: nn.Module) -> bool:
    """Whether tokens of one image see each other in both directions, as those of Gemma 3 do."""
    return hasattr(sys.modules[type(module).__module__], "get_block_sequence_ids_for_mask")


def type_arguments(module: nn.Module, is_image: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what tells a model which tokens are those of images, where it wants to know; `is_image` is a bool mask."""
    return {"token_type_ids": is_image.to(torch.int64)} if sees_whole_images(module) else {}


def described(module: nn.Module) -> dict[str, Any]:
    """Return what the metadata of a model with images says."""
    return {IMAGE_TOKEN: image_token(module), WHOLE_IMAGES: sees_whole_images(module)}


def reason_of(error: Exception) -> str:
    """Return in one line why a model could not be run or traced with images."""
    got = f"{error.what}: {error.got}" if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
    return got.splitlines()[0]


class Vision(nn.Module):
    """Wrapper that is exported: one image -> its features."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        setattr(self, USER_MODULE, model)

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `image_features` [P, D]."""
        return {FEATURES: _flat(_pooled(getattr(self, USER_MODULE), pixel_values))}


class ImageTextDecoder(causal_lm.CausalLM):
    """Wrapper that is exported: as `causal_lm.CausalLM`, with the features of images.

    Args:
        model: The user's model.
        layout: Of its cache.
        is_list: Whether the model makes a list of features, one tensor an image, or one tensor of all.
    """

    def __init__(self, model: nn.Module, layout: KVLayout, *, is_list: bool) -> None:
        super().__init__(model, layout)
        self._is_list = is_list

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        cache_position: torch.Tensor,
        cache: Sequence[torch.Tensor],
        image_features: torch.Tensor,
        image_index: torch.Tensor,
    ) -> torch.Tensor:
        """Return logits [B, S, V] as `causal_lm.CausalLM` does, with `image_features` [N, D].

        `image_index` [M] int64: 0 is the embedding of the image token itself, k the k-th feature.
        """
        user: Any = getattr(self, USER_MODULE)
        embedding = user.get_input_embeddings()
        # A token beyond the vocabulary has no embedding, and is never generated.
        token = image_token(user) or 0
        ids = torch.full((1,), token if token < embedding.weight.shape[0] else 0, device=input_ids.device)
        # Not called as a module: its call is the one in the user's model.
        own = embedding.forward(ids)
        given = image_features.index_select(0, (image_index - 1).clamp(min=0))
        chosen = torch.where(image_index[:, None] > 0, given, own)
        images = as_arguments(chosen, is_list=self._is_list)
        # By slots of the cache, as the mask is made; an image is never cut in two.
        nowhere = torch.zeros_like(attention_mask, dtype=torch.bool)
        types = type_arguments(user, nowhere.index_copy(1, cache_position, input_ids == token))
        return super().forward(input_ids, attention_mask, position_ids, cache_position, cache, **images, **types)


def as_arguments(features: torch.Tensor, *, is_list: bool) -> dict[str, Any]:
    """Return features [N, D] as the argument of a model; `is_list` as for `ImageTextDecoder`."""
    pooled: Any = [features] if is_list else features[None]
    return {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=pooled)}}


def _pooled(model: Any, pixel_values: torch.Tensor) -> Any:
    pooled = model.get_image_features(pixel_values=pixel_values, return_dict=True).pooler_output
    if pooled is None:
        raise UsageError("the features of images have an unknown form", got="no pooler_output", expected="one")
    return pooled


def _flat(pooled: Any) -> torch.Tensor:
    """Return features of one image or several, in one tensor or in several, as [N, D]."""
    parts = [pooled] if isinstance(pooled, torch.Tensor) else list(pooled)
    flat = [part.flatten(0, -2) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def made_up_image(model: nn.Module, directory: str | None) -> dict[str, torch.Tensor]:
    """Return `pixel_values` of one image, made up; `directory` as in `example_inputs`."""
    image = made_up(model, directory)[0][PIXELS][:1]
    try:
        makes_list(model, {PIXELS: image})
    except Exception:  # any kind: it needs the images of a prompt on an axis of their own
        image = image[None]
    return {PIXELS: image}


def features_of(model: nn.Module, images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the features [N, D] of images, of `one_by_one`, as the program makes them, in the model's dtype."""
    wrapper = Vision(model)
    with torch.no_grad():
        return torch.cat([wrapper(image)[FEATURES] for image in images])


def one_by_one(pixel_values: torch.Tensor, num_leading: int) -> tuple[torch.Tensor, ...]:
    """Return images [..., C, H, W] one by one, each with `num_leading` leading dimensions of 1.

    A model that takes the images of each prompt on an axis of their own fills that up with blank ones, which are no
    images to it.

    Raises:
        UsageError: There is none.
    """
    images = pixel_values.reshape(-1, *pixel_values.shape[-3:])
    if num_leading > 1:
        images = images[(images != 0).flatten(1).any(1)]
    if not len(images):
        raise UsageError("all images are blank", got=f"{PIXELS} {list(pixel_values.shape)}")
    return tuple(image.reshape(*[1] * num_leading, *image.shape) for image in images)


def makes_list(model: nn.Module, image: Mapping[str, torch.Tensor]) -> bool:
    """Whether a model makes a list of features, one tensor an image; nothing is computed."""
    # Some models look for images that are padding: how many are left is an unknown size.
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
        return not isinstance(_pooled(model, image[PIXELS]), torch.Tensor)


def input_names(layout: KVLayout) -> list[str]:
    """Return the names of the decoder's inputs in order."""
    return [*causal_lm.input_names(layout), FEATURES, INDEX]


def example_inputs(
    layout: KVLayout, dtype: torch.dtype, device: torch.device, width: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return example inputs of the decoder and their dynamic dimensions; `width` is D."""
    inputs, shapes = causal_lm.example_inputs(layout, dtype, device)
    inputs[FEATURES] = torch.zeros((7, width), dtype=dtype, device=device)
    inputs[INDEX] = torch.zeros((3,), dtype=torch.int64, device=device)
    shapes[FEATURES] = shapes[INDEX] = {0: torch.export.Dim.DYNAMIC}
    return inputs, shapes


def without_derived(inputs: Mapping[str, Any], token: int) -> dict[str, Any]:
    """Return inputs of a model without redundant ones of its processor.

    Args:
        inputs: By name.
        token: The image token. Types of tokens say which tokens are that, and a mask of pixels that all of them count.
    """
    given = dict(inputs)
    ids, pixels, mask = (given.get(name) for name in ("input_ids", PIXELS, _PIXEL_MASK))
    if isinstance(ids, torch.Tensor):
        for name in _TYPES:
            types = given.get(name)
            if isinstance(types, torch.Tensor) and torch.equal(types.bool(), ids == token):
                del given[name]
    if isinstance(mask, torch.Tensor) and isinstance(pixels, torch.Tensor) and mask.shape[:-2] == pixels.shape[:-3]:
        counts = mask.bool().flatten(-2).all(-1) | (pixels == 0).flatten(-3).all(-1)
        if bool(counts.all()):
            del given[_PIXEL_MASK]
    return given


def rows_of(input_ids: torch.Tensor, attention_mask: torch.Tensor, token: int) -> torch.Tensor:
    """Return where the features of images go.

    Args:
        input_ids: [B, S].
        attention_mask: [B, S], 0 for padding, which may be any token.
        token: The image token.

    Returns:
        [B, S] int64: -1 for other tokens, k for the image token that gets the k-th feature, in the order of the rows,
        and 0 for one that keeps its own embedding.
    """
    is_image = input_ids == token
    gets_one = is_image & attention_mask.bool()
    number = gets_one.flatten().cumsum(0).reshape(input_ids.shape)
    return torch.where(is_image, number * gets_one, -1)


def index_of(rows: torch.Tensor) -> torch.Tensor:
    """Return the program's index [M] of a step whose tokens have `rows` [B, S] (see `rows_of`)."""
    index = rows[rows >= 0]
    return functional.pad(index, (0, max(0, _SMALLEST - len(index))))


def decode_index(batch: int) -> torch.Tensor:
    """Return the index [M] of a decode step: no token of it gets a feature, though each may be an image token."""
    return torch.zeros((max(batch, _SMALLEST),), dtype=torch.int64)


def padded_features(features: torch.Tensor) -> torch.Tensor:
    """Return features [N, D] as the program takes them."""
    return functional.pad(features, (0, 0, 0, max(0, _SMALLEST - len(features))))


def first_constants(constants: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return inputs of the program in the prefill of what a session takes as constants; others are left as they are."""
    given = dict(constants)
    if ROWS in given:
        given[INDEX] = index_of(given.pop(ROWS))
        given[FEATURES] = padded_features(given[FEATURES])
    return given


def following_constants(constants: Mapping[str, torch.Tensor], batch: int) -> dict[str, torch.Tensor]:
    """Return `constants`, of `first_constants`, for a decode step of `batch` sequences."""
    return {**constants, INDEX: decode_index(batch)} if INDEX in constants else dict(constants)


def require_features(num_tokens: int, num_features: int, num_images: int) -> None:
    """Refuse prompts whose image tokens are not as many as there are features.

    Raises:
        UsageError: Says both numbers.
    """
    if num_tokens == num_features:
        return
    each = f", {num_features // num_images} for each of {num_images}" if num_images else ""
    raise UsageError(
        "the prompts have another number of image tokens than the images have features",
        got=f"{num_tokens} image tokens",
        expected=f"{num_features}{each}" if num_images else "none: no image was given",
        hint="--image FILE for every image in the prompts: the model's processor writes the tokens of each",
    )
