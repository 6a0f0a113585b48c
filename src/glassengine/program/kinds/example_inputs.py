"""Inputs to export a model of transformers other than a causal language model: what its forward takes.

The steps differ in the sizes that may change when the engine runs (batch, tokens, mel frames where the model allows
it), and a dimension that differs between steps is exported as dynamic. Values are random but the same every time; a
row is padded on its right, so that the masks are exercised.

Shape legend: B batch, S tokens, C channels, H and W height and width of an image, F frames, M mel bins.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import nn

from glassengine.errors import GlassError, UsageError
from glassengine.program.kinds.causal_lm import is_pretrained, keeps_states
from glassengine.program.user_code.calls import described
from glassengine.reading.documents import read_document
from glassengine.results.answer import Origin

SIZES = ((2, 6), (3, 9), (1, 1))
"""(B, S) of the steps: what differs is dynamic, and the last shows whether sizes of 1 will do."""

DEFAULT_IMAGE_SIZE = 224
"""For models of images whose configuration and preprocessor state no size."""

TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Inputs that a tokenizer makes."""


def example_inputs(module: nn.Module, directory: str | None = None) -> MadeUp:
    """Return steps of keyword arguments for `module.forward`.

    Args:
        module: A model of transformers.
        directory: Hugging Face directory, whose preprocessor may state the size of images.

    Raises:
        UsageError: It is no model of transformers, or takes something that cannot be made up.
    """
    name = type(module).__name__
    if not is_pretrained(module):
        raise _needs_inputs(name, "its inputs do not follow from its configuration")
    parameters = inspect.signature(module.forward).parameters
    steps = MadeUp(recipes=_RECIPES)
    # A recurrence is unrolled, token by token.
    sizes = [(batch, SIZES[0][1]) for batch, _ in SIZES] if keeps_states(module) else SIZES
    for seed, (batch, tokens) in enumerate(sizes):
        maker = _Maker(module, directory, batch, torch.Generator().manual_seed(seed))
        try:
            step = {key: make(maker, tokens) for key, make in _MAKERS.items() if _takes(module, key, parameters)}
        except (AttributeError, TypeError, ValueError) as error:
            raise _needs_inputs(name, f"its configuration does not say their sizes ({error})") from error
        missing = [
            key
            for key, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            and key not in step
        ]
        if missing or module.main_input_name not in step:
            raise _needs_inputs(name, f"nothing is known about {', '.join(missing) or module.main_input_name}")
        # A cache would be one more result; what has a cache that counts is exported as a causal language model.
        steps.append(step | ({"use_cache": False} if "use_cache" in parameters else {}))
    return steps


def encoder_inputs(module: nn.Module, directory: str | None = None) -> MadeUp:
    """Return steps of keyword arguments for the encoder of an encoder-decoder; as `example_inputs`."""
    others = ("decoder_input_ids", "use_cache")
    steps = example_inputs(module, directory)
    kept = ({key: value for key, value in step.items() if key not in others} for step in steps)
    return MadeUp(kept, recipes=steps.recipes)


@contextlib.contextmanager
def explain_made_up_inputs(module: nn.Module, steps: object) -> Iterator[None]:
    """Say of a module that cannot be traced with made-up inputs that it may be for others.

    Args:
        module: What is exported.
        steps: Its inputs; other than `MadeUp` are not described.

    Raises:
        UsageError: It cannot be traced.
    """
    try:
        yield
    except Exception as error:
        is_told = isinstance(error, UsageError)
        if not isinstance(steps, MadeUp) or (is_told and error.__cause__ is None):
            raise
        shapes = (f"{key} {list(value.shape)}" for key, value in steps[0].items() if isinstance(value, torch.Tensor))
        raise UsageError(
            error.what if isinstance(error, UsageError) else "the model cannot run on these inputs",
            got=error.got if isinstance(error, UsageError) else described(error),
            expected=f"a forward for inputs like those that were made up: {', '.join(shapes)}",
            hint="--inputs file.py:factory, which returns a dict of keyword arguments; one dict keeps its sizes",
        ) from error


def _needs_inputs(name: str, reason: str) -> UsageError:
    return UsageError(
        f"{name} is not a causal language model, so its inputs must be given",
        got=reason,
        hint="--inputs file.py:factory, which returns a dict of keyword arguments",
    )


def _takes(module: Any, key: str, parameters: Mapping[str, Any]) -> bool:
    """Whether an argument is needed, or used where it is given, for the main input of the model."""
    if key not in parameters:
        return False
    if key == "token_type_ids":
        return (getattr(module.config, "type_vocab_size", 0) or 0) > 1
    if key == "decoder_input_ids":
        return bool(module.config.is_encoder_decoder)
    if key in ("input_ids", "attention_mask"):
        # Speech models take a mask over samples, which changes nothing without padding.
        return module.main_input_name == "input_ids" or (key == "input_ids" and "pixel_values" in parameters)
    return key == module.main_input_name or (key == "pixel_values" and "input_ids" in parameters)


class _Maker:
    """Makes the arguments of one step."""

    def __init__(self, module: Any, directory: str | None, batch: int, generator: torch.Generator) -> None:
        self._module, self._directory, self._batch, self._generator = module, directory, batch, generator

    def ids(self, tokens: int) -> torch.Tensor:
        """[B, S] int64. The highest ids are left out: they are often markers with a meaning."""
        vocabulary = max(int(self._module.config.get_text_config().vocab_size) - 8, 2)
        return torch.randint(min(8, vocabulary - 1), vocabulary, (self._batch, tokens), generator=self._generator)

    def decoder_ids(self, tokens: int) -> torch.Tensor:
        """[B, S] int64, one token less than the encoder has, but at least one."""
        ids = self.ids(max(tokens - 1, 1))
        start = getattr(self._module.config, "decoder_start_token_id", None)
        ids[:, 0] = 0 if start is None else start
        return ids

    def mask(self, tokens: int) -> torch.Tensor:
        """[B, S] int64; the last row has two tokens of padding on its right, one before it has one on its left."""
        mask = torch.ones((self._batch, tokens), dtype=torch.int64)
        if tokens > 2:
            mask[-1, -2:] = 0
            if self._batch > 2:
                mask[1, 0] = 0
        return mask

    def types(self, tokens: int) -> torch.Tensor:
        """[B, S] int64: a first and a second text, with another boundary in each row."""
        starts = torch.tensor([max(1, tokens // (2 + row)) if row < 2 else 1 for row in range(self._batch)])
        return (torch.arange(tokens) >= starts[:, None]).long()

    def images(self, _: int) -> torch.Tensor:
        """[B, C, H, W]."""
        config: Any = getattr(self._module.config, "vision_config", self._module.config)
        channels = int(getattr(config, "num_channels", 3))
        size = getattr(config, "image_size", None) or _preprocessor_size(self._directory) or DEFAULT_IMAGE_SIZE
        height, width = (size, size) if isinstance(size, int) else size
        return self._drawn(channels, int(height), int(width))

    def features(self, tokens: int) -> torch.Tensor:
        """[B, M, F] of a spectrogram, of the length that the positions of the encoder are made for, or [B, F, M]."""
        config: Any = self._module.config
        if hasattr(config, "input_feat_per_channel"):
            return self._drawn(8 * tokens, int(config.input_feat_per_channel) * int(config.input_channels))
        if hasattr(config, "feature_projection_input_dim"):
            return self._drawn(8 * tokens, int(config.feature_projection_input_dim))
        return self._drawn(int(config.num_mel_bins), 2 * int(config.max_source_positions))

    def samples(self, tokens: int) -> torch.Tensor:
        """[B, samples] of sound; [B, F, M] where the model takes a spectrogram by this name."""
        config: Any = self._module.config
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
            return self._drawn(int(config.max_length), int(config.num_mel_bins))
        return self._drawn(1600 + 400 * tokens)  # enough for the convolutions before the first frame

    def _drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn((self._batch, *shape), generator=self._generator).to(self._module.dtype)


_MAKERS = {
    "input_ids": _Maker.ids,
    "attention_mask": _Maker.mask,
    "token_type_ids": _Maker.types,
    "pixel_values": _Maker.images,
    "input_features": _Maker.features,
    "input_values": _Maker.samples,
    "decoder_input_ids": _Maker.decoder_ids,
}


_RECIPES = {
    "input_ids": "token ids, several values a row",
    "attention_mask": "zeros and ones: padding ends the last row and begins another, none in the first",
    "token_type_ids": "a first and a second text, with another boundary in each row",
    "pixel_values": "random, of the size that the configuration states",
    "input_features": "random, of the size that the configuration states",
    "input_values": "random sound, long enough for the convolutions before the first frame",
    "decoder_input_ids": "token ids, several values a row, after the token that starts a decoder",
    "use_cache": "one forward is judged, without a cache",
}


_MAX_CONFIG_BYTES = 4 << 20
_Pixels = Annotated[int, msgspec.Meta(ge=1, le=1 << 14)]


class _Preprocessor(msgspec.Struct):
    crop_size: _Pixels | dict[str, _Pixels] | None = None
    size: _Pixels | dict[str, _Pixels] | None = None


def _preprocessor_size(directory: str | None) -> int | tuple[int, int] | None:
    """Return what `preprocessor_config.json` says images are brought to."""
    path = Path(directory or "") / "preprocessor_config.json"
    if directory is None or not path.is_file():
        return None
    try:
        data = read_document(path, _Preprocessor, most=_MAX_CONFIG_BYTES, nonfinite=True)
    except GlassError:
        return None
    size = data.crop_size or data.size
    if isinstance(size, int):
        return size
    if size is not None and "height" in size and "width" in size:
        return size["height"], size["width"]
    return None if size is None else size.get("shortest_edge")


class MadeUp(list[dict[str, Any]]):
    """Generated steps.

    Args:
        steps: Keyword arguments of each.
        recipes: How each input was made, by name, in words.
        origin: Where they come from.
        num_in_file: How many of them, the first ones, are stored in the file of the model.
    """

    def __init__(
        self,
        steps: Iterable[dict[str, Any]] = (),
        *,
        recipes: Mapping[str, str] | None = None,
        origin: Origin = "made up",
        num_in_file: int = 0,
    ) -> None:
        super().__init__(steps)
        self.recipes = dict(recipes or {})
        self.origin: Origin = origin
        self.num_in_file = num_in_file
