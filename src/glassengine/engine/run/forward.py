"""Runs programs without steps: of an engine that does not generate, an encoder, or the vision program of a model.

Shape legend: B texts, S tokens of the longest.

Decoding of an encoder-decoder begins with a start token. Images go through the processor of the model, as
`AutoProcessor` of transformers loads it, which writes as many image tokens into a prompt as its image has features.

Shape legend: B sequences, S tokens, N images.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from glassengine.engine.manifest import Manifest
from glassengine.engine.prompts import Images, Prompts, Request, as_rows
from glassengine.engine.session.checks import require_module
from glassengine.engine.session.debug_buffers import select_names
from glassengine.engine.session.loaded import LoadedEngine
from glassengine.engine.session.record import EngineRecorder
from glassengine.errors import GlassError, UsageError
from glassengine.program import load_inputs
from glassengine.program.kinds.encoder_decoder import start_token
from glassengine.program.kinds.example_inputs import TEXT_INPUTS
from glassengine.program.kinds.image_text import (
    FEATURES,
    IMAGE_TOKEN,
    PIXELS,
    ROWS,
    WITHOUT_IMAGES,
    require_features,
    rows_of,
    without_derived,
)
from glassengine.program.representation.signature import named_inputs
from glassengine.reading.files import open_regular
from glassengine.results.engines import Forward


def forward(
    engine: LoadedEngine,
    request: Request | None,
    inputs: str | Mapping[str, Any] | None,
    *,
    debug: Sequence[str],
    record: str | Path | None,
    overwrite: bool,
) -> Forward:
    """Run once; `Engine.forward` describes the arguments.

    Raises:
        UsageError: Texts or tensors do not fit the engine, or the recording cannot be written.
        UnknownNameError: A pattern of `debug` names nothing.
    """
    require_module(engine.manifest)
    selected = select_names(engine, debug) if debug else None
    texts: tuple[str, ...] = ()
    rows: list[list[int]] = []
    if request is not None:
        read = request.read(engine)
        texts, rows = read.texts, read.rows
        given: Mapping[str, Any] = text_inputs(engine.manifest, rows, read.tokenizer)
    else:
        given = one_step(inputs)
    start = time.perf_counter()
    outputs = engine(**given)
    seconds = time.perf_counter() - start
    if record is not None:
        names = [entry.name for entry in engine.manifest.outputs]
        with EngineRecorder(record, engine, names, rows, padding="right", overwrite=overwrite) as recorder:
            recorder.write_step(0, outputs, token_ids=rows)
    if selected is not None:
        known = {**named_inputs(given), **outputs}
        outputs = {name: known[name] for name in selected}
    return Forward(texts, tuple(tuple(row) for row in rows), outputs, seconds, None if record is None else str(record))


def text_inputs(manifest: Manifest, rows: Sequence[Sequence[int]], tokenizer: Any) -> dict[str, torch.Tensor]:
    """Return token ids, mask and types [B, S] for those of them that the engine takes, padded on the right.

    Raises:
        UsageError: The engine takes no text, or more than text.
    """
    names = [entry.name for entry in manifest.inputs]
    others = [name for name in names if name not in TEXT_INPUTS]
    if "input_ids" not in names or others:
        raise UsageError(
            f"the engine {manifest.name!r} does not run from text alone",
            got=f"inputs {', '.join(names)}",
            hint="give the tensors: --inputs FILE, or --inputs file.py:factory",
        )
    vocabulary, highest = manifest.model.get("vocab_size"), max(max(row) for row in rows)
    if vocabulary is not None and highest >= vocabulary:
        raise UsageError(
            "a token id is outside the model's vocabulary",
            got=str(highest),
            expected=f"below {vocabulary}",
            hint="use the tokenizer that belongs to the model: --tokenizer DIRECTORY",
        )
    length = max(len(row) for row in rows)
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    padded = {
        "input_ids": [[*row, *[pad] * (length - len(row))] for row in rows],
        "attention_mask": [[1] * len(row) + [0] * (length - len(row)) for row in rows],
        "token_type_ids": [[0] * length for _ in rows],
    }
    if "attention_mask" not in names and len({len(row) for row in rows}) > 1:
        raise UsageError(
            "texts of several lengths need a mask, which this engine does not take",
            got=f"{min(map(len, rows))} to {length} tokens",
            hint="run them one by one",
        )
    return {name: torch.tensor(padded[name]) for name in names}


def one_step(inputs: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the keyword arguments of one forward, of a dict or of what `--inputs` takes.

    Raises:
        UsageError: There are none, or those of several steps.
    """
    if inputs is None:
        raise UsageError("nothing to run on", hint="--input-text TEXT, --input-ids FILE or --inputs FILE")
    if isinstance(inputs, Mapping):
        return inputs
    steps = load_inputs(inputs)
    if len(steps) != 1:
        raise UsageError(f"{inputs} holds {len(steps)} steps", expected="the inputs of one forward")
    return steps[0]


DECODER_IDS = "decoder_input_ids"

Encode = Callable[..., dict[str, torch.Tensor]]
"""`Engine.encode`."""
PLACEHOLDER = "<image>"
"""For processors that do not say how they spell it."""


def encoded(
    manifest: Manifest,
    encoder: Manifest,
    encode: Encode,
    read: Prompts,
    inputs: str | Mapping[str, Any] | None,
    settings: Any,
) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """Run the encoder; return what the decoder begins with, one list of tokens per sequence, and its constant inputs.

    `inputs` are tensors of the encoder, and `decoder_input_ids` where there are more than the start token, which
    `settings` state; without them it runs on the texts that were `read`.

    Raises:
        UsageError: Texts or tensors do not fit the encoder, or the model has no start token.
    """
    if inputs is None:
        given: dict[str, Any] = dict(text_inputs(encoder, read.rows, read.tokenizer))
    else:
        given = dict(one_step(inputs))
        if (settings.num_return_sequences or 1) > 1:
            raise UsageError(
                "several sequences of one input are generated from text alone",
                got=f"num_return_sequences={settings.num_return_sequences}",
                hint="repeat the rows of the tensors",
            )
    given.pop("use_cache", None)
    begun = given.pop(DECODER_IDS, None)
    constants = encode(**given)
    batch = next(iter(constants.values())).shape[0]
    if begun is not None:
        return as_rows(begun, DECODER_IDS), constants
    start = start_token(settings)
    if start is None:
        raise UsageError(
            f"{manifest.name} states no start token",
            expected="decoder_start_token_id in its generation_config.json",
            hint="--inputs FILE with decoder_input_ids",
        )
    return [[start]] * batch, constants


def read_request(engine: LoadedEngine, request: Request) -> Prompts:
    """Return prompts as token ids, with the images that belong to them.

    Raises:
        UsageError: As `Request.read`; or the images do not fit the engine or the prompts.
    """
    if request.images is not None:
        if not engine.takes_images:
            why = engine.manifest.model.get(WITHOUT_IMAGES)
            expected = "text alone" if why is None else f"text alone: {why}"
            raise UsageError(f"the engine {engine.manifest.name!r} takes no images", got="--image", expected=expected)
        if request.inputs is not None or request.input_ids is not None:
            raise UsageError(
                "images go through the processor with the text around them",
                got="--image together with token ids or tensors",
                hint="--image FILE --input-text TEXT, or --inputs FILE with pixel_values",
            )
        return _processed(engine, request, request.images)
    if not engine.takes_images or request.inputs is None:
        return request.read(engine)
    given = without_derived(one_step(request.inputs), int(engine.manifest.model[IMAGE_TOKEN]))
    pixels, ids, mask = (given.pop(name, None) for name in (PIXELS, "input_ids", "attention_mask"))
    if given or not isinstance(pixels, torch.Tensor):
        raise UsageError(
            "these are not the tensors of images and their prompts",
            got=", ".join([*given, *([] if pixels is None else [PIXELS])]) or "no pixel_values",
            expected="pixel_values, and input_ids and attention_mask unless the prompts are text",
        )
    beside = dataclasses.replace(request, inputs=None)
    if ids is not None:
        if beside.input_ids is not None:
            raise UsageError("token ids were given twice", got="--input-ids, and input_ids in --inputs")
        beside = dataclasses.replace(beside, input_ids=_without_padding(ids, mask))
    return dataclasses.replace(beside.read(engine), pixel_values=pixels)


def _without_padding(ids: Any, mask: Any) -> list[list[int]]:
    rows = as_rows(ids, "input_ids")
    if mask is None:
        return rows
    kept = as_rows(mask, "attention_mask")
    if [len(row) for row in kept] != [len(row) for row in rows]:
        raise UsageError("attention_mask has another shape than input_ids", expected=str(list(torch.tensor(ids).shape)))
    return [
        [token for token, real in zip(row, marks, strict=True) if real] for row, marks in zip(rows, kept, strict=True)
    ]


def _processed(engine: LoadedEngine, request: Request, images: Images) -> Prompts:
    """Return the prompts of a request as the processor writes them, and the pixel values of its images."""
    read = request.read(engine)
    processor = load_processor(engine.directory)
    placeholder = str(getattr(processor, "image_token", None) or PLACEHOLDER)
    opened = list(_opened(images))
    counts = [text.count(placeholder) for text in read.texts]
    if sum(counts) != len(opened):
        raise UsageError(
            "the prompts have another number of places for images than there are images",
            got=f"{sum(counts)} times {placeholder} in {len(counts)} prompts",
            expected=f"{len(opened)}, one for each --image",
            hint=f"write {placeholder} where an image belongs: --input-text '{placeholder} What is this?'",
        )
    rows, pixels = [], []
    rest = iter(opened)
    # What a chat template wrote has its special tokens already.
    options = {"add_special_tokens": False} if request.chat is not None else {}
    for text, count in zip(read.texts, counts, strict=True):
        own = [next(rest) for _ in range(count)]
        try:
            made = processor(text=[text], images=own or None, return_tensors="pt", **options)
        except Exception as error:
            raise UsageError(
                "the processor refuses the prompt and its images", got=f"{type(error).__name__}: {error}"
            ) from error
        rows.append(made["input_ids"][0].tolist())
        if own:
            pixels.append(_pixels_alone(engine.manifest, made))
    return dataclasses.replace(read, rows=rows, pixel_values=torch.cat(pixels) if pixels else None)


def _pixels_alone(manifest: Manifest, made: Mapping[str, Any]) -> torch.Tensor:
    """Return the pixel values [N, C, H, W] of what a processor made of one prompt.

    Raises:
        UsageError: There is more to its images: a size of each, say.
    """
    given = without_derived(made, int(manifest.model[IMAGE_TOKEN]))
    if more := [name for name in given if name.startswith(("image_", "pixel_")) and name != PIXELS]:
        raise UsageError(
            f"the processor says more of the images than the engine {manifest.name!r} takes",
            got=", ".join(more),
            expected=f"{PIXELS} alone",
        )
    pixels: torch.Tensor = given[PIXELS]
    return pixels.reshape(-1, *pixels.shape[-3:])


def load_processor(directory: str | Path) -> Any:
    """Load a processor of transformers; code that comes with it is never run.

    Raises:
        UsageError: There is none, or it cannot be read.
    """
    from transformers import AutoProcessor

    hint = "build from a directory with preprocessor_config.json, or give --inputs FILE with pixel_values"
    try:
        processor = AutoProcessor.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError("the processor cannot be loaded", got=f"{directory}: {first}", hint=hint) from error
    if not hasattr(processor, "image_processor"):
        raise UsageError("the engine has no processor of images", got=str(directory), hint=hint)
    return processor


def _opened(images: Images) -> Iterator[Any]:
    """Yield every image as one of Pillow.

    Raises:
        UsageError: Pillow is missing, or a file is not an image.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise UsageError("images are read with Pillow, which is not installed", hint="pip install pillow") from error
    for image in images if isinstance(images, (list, tuple)) else [images]:
        if not isinstance(image, (str, Path)):
            yield image
            continue
        try:
            with open_regular(image) as opened, Image.open(opened) as file:
                # Upright, as transformers reads a file.
                yield ImageOps.exif_transpose(file).convert("RGB")
        except GlassError as error:
            raise UsageError("the image cannot be read", got=error.got, hint="--image FILE") from error
        except Exception as error:  # hostile files raise all sorts
            raise UsageError(
                "the image cannot be read", got=f"{image}: {type(error).__name__}: {error}", hint="--image FILE"
            ) from error


def image_constants(
    manifest: Manifest,
    encode: Encode,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    pixel_values: torch.Tensor | None,
    num_each: int,
) -> dict[str, torch.Tensor]:
    """Return what a session takes as `constants`: the features of all images, and where they go.

    Args:
        manifest: Of an engine that takes images.
        encode: Runs its vision program.
        input_ids: [B, S] of all sequences.
        attention_mask: [B, S].
        pixel_values: Of all images [N, C, H, W]; None for text alone.
        num_each: Sequences of each prompt, which share its images.

    Raises:
        UsageError: The image tokens of the prompts are not as many as the features, or an image has another size.
    """
    rows = rows_of(input_ids[::num_each], attention_mask[::num_each], int(manifest.model[IMAGE_TOKEN]))
    num_tokens = max(int(rows.max()), 0)
    if pixel_values is None:
        require_features(num_tokens, 0, 0)
        return {}
    features = encode(pixel_values=pixel_values)[FEATURES]
    require_features(num_tokens, len(features), pixel_values.shape[:-3].numel())
    return {FEATURES: features, ROWS: rows.repeat_interleave(num_each, dim=0)}
