"""The kinds that generate with two programs, and the registry of all kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from glassengine.program.export.two import export_encoder_decoder, export_image_text
from glassengine.program.generation.generation import (
    CAUSAL,
    PLAIN,
    RECURRENT,
    Exported,
    Generation,
    Inputs,
    Stages,
    has_head,
)
from glassengine.program.kinds import image_text
from glassengine.program.kinds.causal_lm import is_pretrained
from glassengine.program.kinds.example_inputs import encoder_inputs, said_of_made_up
from glassengine.program.listing.listing import stage_of
from glassengine.program.representation.program import Program


@dataclass(frozen=True, eq=False)
class EncoderDecoder(Generation):
    """An encoder reads the prompt once; the decoder reads what it made in every step."""

    name: str = "encoder-decoder"
    has_encoder: bool = True

    @property
    def alone(self) -> Generation:
        """One forward of both."""
        return PLAIN

    def recognizes(self, module: Any) -> bool:
        """Whether it is an encoder-decoder of transformers with a head."""
        return is_pretrained(module) and module.config.is_encoder_decoder and has_head(module)

    def export(self, model: Exported, inputs: Inputs, stages: Stages) -> tuple[Program, ...]:
        """Export encoder and decoder, or a forward of given inputs."""
        if inputs is not None:
            return PLAIN.export(model, inputs, stages)
        given = encoder_inputs(model.module, model.directory)
        told = {"on_stage": stages.on_stage, "on_encoder_stage": stages.on_encoder_stage}
        with said_of_made_up(model.module, given):
            encoder, decoder = export_encoder_decoder(model.module, given, metadata=model.metadata, **told)
        if stages.on_encoder_stage is not None:
            stages.on_encoder_stage(stage_of(encoder, "functional"))
        return encoder, decoder


@dataclass(frozen=True, eq=False)
class ImageText(Generation):
    """A decoder that reads the features of images instead of some tokens."""

    name: str = "image-text"
    takes_tokens: bool = True
    decodes_tokens: bool = True
    has_encoder: bool = True

    @property
    def alone(self) -> Generation:
        """Its decoder, from text."""
        return CAUSAL

    def recognizes(self, module: Any) -> bool:
        """Whether it is a decoder whose images can be made into features before the first step."""
        return CAUSAL.recognizes(module) and image_text.reason_against(module) is None

    def describes(self, module: Any) -> dict[str, Any]:
        """Return the token of an image, and how its features are seen."""
        return image_text.described(module)

    def export(self, model: Exported, inputs: Inputs, stages: Stages) -> tuple[Program, ...]:
        """Export vision and decoder; the language model alone, saying so, where they cannot be traced."""
        if inputs is not None:
            return CAUSAL.export(model, inputs, stages)
        told = {"on_stage": stages.on_stage, "on_encoder_stage": stages.on_encoder_stage}
        try:
            image = image_text.made_up_image(model.module, model.directory)
            vision, decoder = export_image_text(model.module, image, metadata=model.metadata, **told)
        except Exception as error:  # the model's own code may raise anything
            model.metadata[image_text.WITHOUT_IMAGES] = image_text.reason_of(error)
            return CAUSAL.export(model, inputs, stages)
        if stages.on_encoder_stage is not None:
            stages.on_encoder_stage(stage_of(vision, "functional"))
        return vision, decoder


ENCODER_DECODER = EncoderDecoder()
IMAGE_TEXT = ImageText()

GENERATIONS: tuple[Generation, ...] = (RECURRENT, ENCODER_DECODER, IMAGE_TEXT, CAUSAL, PLAIN)
"""All kinds; the first one that recognizes a model is its."""


def generation_of(module: Any) -> Generation:
    """Return how a model, as it is written, generates."""
    return next(kind for kind in GENERATIONS if kind.recognizes(module))
