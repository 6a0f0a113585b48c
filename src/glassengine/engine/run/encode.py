"""What an encoder-decoder generates from: its encoder runs once, decoding begins with a start token.

Shape legend: B sequences, E tokens of the longest input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from glassengine.engine.prompts.files import as_rows
from glassengine.engine.prompts.prompts import Prompts
from glassengine.engine.run.forward import one_step, text_inputs
from glassengine.engine.store.manifest import Manifest
from glassengine.errors import UsageError
from glassengine.program.kinds.encoder_decoder import start_token

DECODER_IDS = "decoder_input_ids"

Encode = Callable[..., dict[str, torch.Tensor]]
"""`Engine.encode`."""


def encoded(
    manifest: Manifest,
    encoder: Manifest,
    encode: Encode,
    read: Prompts,
    inputs: str | Mapping[str, Any] | None,
    settings: Any,
) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """Run the encoder; return what the decoder begins with, one list of tokens per sequence, and its constant inputs.

    Args:
        manifest: Of an encoder-decoder.
        encoder: Of its encoder.
        encode: Runs it.
        read: Texts as token ids; empty where tensors were given.
        inputs: Tensors of the encoder, and `decoder_input_ids` where there are more than the start token.
        settings: `transformers.GenerationConfig`, which states the start token.

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
