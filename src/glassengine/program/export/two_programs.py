"""Export models that generate with two programs: what runs before the first step, and what decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from glassengine.program.export.export import traced_program
from glassengine.program.kinds import causal_lm, encoder_decoder, image_text
from glassengine.program.listing.listing import OnStage
from glassengine.program.representation.program import FIXED_INPUTS, SMALLEST, Program
from glassengine.program.representation.signature import example_of, leave_meta_device, small_sizes


def export_encoder_decoder(
    model: nn.Module,
    inputs: Sequence[Mapping[str, Any]],
    *,
    metadata: dict[str, Any] | None = None,
    on_stage: OnStage | None = None,
    on_encoder_stage: OnStage | None = None,
) -> tuple[Program, Program]:
    """Export an encoder-decoder of transformers (in evaluation mode) to its two programs; see `encoder_decoder`.

    Args:
        model: The model.
        inputs: Keyword arguments of the encoder, one dict per step, as for `export_module`.
        metadata: Kept in both programs.
        on_stage: Called for the decoder, as in `export_causal_lm`.
        on_encoder_stage: Likewise for the encoder.

    Returns:
        The encoder (a "module") and the decoder (a "causal_lm").

    Raises:
        UsageError: torch.export cannot trace it.
    """
    has_values = leave_meta_device(model)
    example, dynamic = example_of(inputs)
    layouts = encoder_decoder.probe_layouts(model, example, has_values=has_values)
    wrapper = encoder_decoder.Encoder(model)
    encoder = traced_program(
        wrapper,
        {"inputs": example},
        {"inputs": dynamic},
        prefix=causal_lm.USER_MODULE,
        input_names=list(example),
        output_names=encoder_decoder.cross_names(len(layouts.cross.layers)),
        metadata={**(metadata or {}), FIXED_INPUTS: {}},
        on_stage=on_encoder_stage,
        is_part=True,
    )
    if has_values and (smallest := small_sizes(wrapper, encoder, [{"inputs": step} for step in inputs])):
        encoder.metadata[SMALLEST] = smallest
    decoder_inputs, shapes = encoder_decoder.example_inputs(model, layouts)
    decoder = traced_program(
        encoder_decoder.Decoder(model, layouts.width),
        decoder_inputs,
        shapes,
        prefix=causal_lm.USER_MODULE,
        input_names=encoder_decoder.input_names(model, layouts),
        output_names=["logits"],
        layout=layouts.own,
        metadata=metadata or {},
        on_stage=on_stage,
        is_part=True,
    )
    return encoder, decoder


def export_image_text(
    model: nn.Module,
    image: Mapping[str, torch.Tensor],
    *,
    metadata: dict[str, Any] | None = None,
    on_stage: OnStage | None = None,
    on_encoder_stage: OnStage | None = None,
) -> tuple[Program, Program]:
    """Export a language model that takes images as `export_encoder_decoder` does; see `image_text`.

    `image` is `pixel_values` of one image; images of this size are what the programs are for.

    Returns:
        The vision program (a "module") and the decoder (a "causal_lm").

    Raises:
        UsageError: torch.export cannot trace it.
    """
    has_values = leave_meta_device(model)
    layout = causal_lm.probe_layout(model, has_values=has_values)
    vision = traced_program(
        image_text.Vision(model),
        dict(image),
        None,
        prefix=causal_lm.USER_MODULE,
        input_names=[image_text.PIXELS],
        output_names=[image_text.FEATURES],
        metadata={**(metadata or {}), FIXED_INPUTS: {}},
        on_stage=on_encoder_stage,
        is_part=True,
    )
    made = vision.node(vision.output_nodes[image_text.FEATURES]).meta["val"]
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    inputs, shapes = image_text.example_inputs(layout, made.dtype, parameter.device, int(made.shape[-1]))
    with causal_lm.exportable_experts(model):
        decoder = traced_program(
            image_text.ImageTextDecoder(model, layout, is_list=image_text.makes_list(model, image)),
            inputs,
            shapes,
            prefix=causal_lm.USER_MODULE,
            input_names=image_text.input_names(layout),
            output_names=["logits"],
            layout=layout,
            metadata=metadata or {},
            on_stage=on_stage,
            is_part=True,
        )
    return vision, decoder
