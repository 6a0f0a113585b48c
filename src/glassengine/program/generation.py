"""Kinds of generation, their registry, and exports with two programs: one before the first step, one to decode.

    plain             one forward, nothing follows
    causal            prefill and decode steps over a cache of keys and values
    recurrent         one token a step, over states
    encoder-decoder   an encoder once, then decode steps (`diagnose/ladder/generations`)
    image-text        features of images once, then prefill and decode steps (`diagnose/ladder/generations`)

Who loads, builds or judges a model reads these objects, and never compares the names of kinds. What a kind is judged by
is beside them in `diagnose.ladder.generations`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from glassengine.program.export.export import export_causal_lm, export_module, export_specialized, traced_program
from glassengine.program.kinds import causal_lm, encoder_decoder, image_text
from glassengine.program.kinds.causal_lm import is_pretrained, keeps_states
from glassengine.program.kinds.example_inputs import encoder_inputs, example_inputs, explain_made_up_inputs
from glassengine.program.representation.listing import OnStage
from glassengine.program.representation.program import FIXED_INPUTS, SMALLEST, Program
from glassengine.program.representation.signature import example_of, leave_meta_device, small_sizes
from glassengine.program.user_code.forward import forward_parameters
from glassengine.program.user_code.module_state import ModuleState, applied_state


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


Inputs = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class Stages:
    """Receiver of the stages of an export, and whether the trace may see the values of one step."""

    on_stage: OnStage | None = None
    on_encoder_stage: OnStage | None = None
    specialized: bool = False

    @property
    def of_two(self) -> dict[str, OnStage | None]:
        """The receivers, as the export of two programs takes them."""
        return {"on_stage": self.on_stage, "on_encoder_stage": self.on_encoder_stage}


@dataclass(frozen=True, eq=False)
class GenerationKind(ABC):
    """A kind of generation.

    Attributes:
        name: In messages.
        takes_tokens: Whether any forward takes tokens and their mask, and gives logits of all of them.
        decodes_tokens: Whether prompts are decoded with the last program alone, whatever that needs beside tokens.
        generates: Whether an engine of it has a session.
        has_encoder: Whether an engine of it has two programs, the first of which runs before the first step.
        one_token: Whether a step has one token, also those of the prompt.
    """

    name: str
    takes_tokens: bool = False
    decodes_tokens: bool = False
    generates: bool = True
    has_encoder: bool = False
    one_token: bool = False

    @property
    @abstractmethod
    def alone(self) -> GenerationKind:
        """How a model of this kind is judged beside one that has not its programs: a port, or a record."""

    @abstractmethod
    def recognizes(self, module: Any) -> bool:
        """Whether a model, as it is written, is of this kind."""

    def describes(self, module: Any) -> dict[str, Any]:
        """Return what the metadata of a model of this kind says beside the usual."""
        return {}

    @abstractmethod
    def export(self, model: LoadedModel, inputs: Inputs, stages: Stages) -> tuple[Program, ...]:
        """Export a model's programs; the last one decodes.

        Args:
            model: Of this kind.
            inputs: Of one forward; None exports what generates, and makes inputs up for a plain module.
            stages: Receiver of progress.

        Raises:
            UsageError: torch.export cannot trace it.
        """


@dataclass(frozen=True, eq=False)
class Plain(GenerationKind):
    """One forward."""

    name: str = "plain"
    generates: bool = False

    @property
    def alone(self) -> GenerationKind:
        """Itself."""
        return self

    def recognizes(self, module: Any) -> bool:
        """Everything is a module."""
        return True

    def export(self, model: LoadedModel, inputs: Inputs, stages: Stages) -> tuple[Program, ...]:
        """Export one forward."""
        if inputs is None:
            inputs = example_inputs(model.module, model.directory)
        keeps = model.state is not None
        held = applied_state(model.module, model.state, as_buffers=True) if keeps else contextlib.nullcontext()
        options: dict[str, Any] = {"metadata": model.metadata, "on_stage": stages.on_stage, "keeps_state": keeps}
        with explain_made_up_inputs(model.module, inputs), held:
            if stages.specialized:
                (step,) = [inputs] if isinstance(inputs, Mapping) else inputs
                return (export_specialized(model.module, step, **options),)
            return (export_module(model.module, inputs, **options),)


@dataclass(frozen=True, eq=False)
class Causal(GenerationKind):
    """Tokens in, logits of the next ones out; keys and values are kept."""

    name: str = "causal"
    takes_tokens: bool = True
    decodes_tokens: bool = True

    @property
    def alone(self) -> GenerationKind:
        """Itself: a port that generates has one such program, too."""
        return self

    def recognizes(self, module: Any) -> bool:
        """Whether it is a decoder of transformers with a head."""
        return is_decoder(module) and not keeps_states(module)

    def describes(self, module: Any) -> dict[str, Any]:
        """Return why it takes no images though its forward does."""
        reason = image_text.reason_against(module)
        return {image_text.WITHOUT_IMAGES: reason} if reason else {}

    def export(self, model: LoadedModel, inputs: Inputs, stages: Stages) -> tuple[Program, ...]:
        """Export the steps, whatever the inputs of a forward are."""
        return (export_causal_lm(model.module, metadata=model.metadata, on_stage=stages.on_stage),)


@dataclass(frozen=True, eq=False)
class Recurrent(Causal):
    """A decoder whose layers keep states: the prompt, too, is read a token a step."""

    name: str = "recurrent"
    takes_tokens: bool = False
    one_token: bool = True

    @property
    def alone(self) -> GenerationKind:
        """One forward of the whole sequence."""
        return PLAIN

    def recognizes(self, module: Any) -> bool:
        """Whether it is a decoder of transformers whose layers keep states."""
        return is_decoder(module) and keeps_states(module)

    def describes(self, module: Any) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def export(self, model: LoadedModel, inputs: Inputs, stages: Stages) -> tuple[Program, ...]:
        """Export the steps, or a forward of given inputs."""
        return super().export(model, None, stages) if inputs is None else PLAIN.export(model, inputs, stages)


PLAIN: GenerationKind = Plain()
CAUSAL: GenerationKind = Causal()
RECURRENT: GenerationKind = Recurrent()


def is_decoder(module: Any) -> bool:
    """Whether a model is a decoder of transformers, without an encoder, that gives logits of a next token."""
    return is_pretrained(module) and not module.config.is_encoder_decoder and has_head(module)


def has_head(model: Any) -> bool:
    """Whether a model of transformers gives logits of a next token."""
    return bool(model.can_generate()) and model.get_output_embeddings() is not None


@dataclass(frozen=True, eq=False)
class EncoderDecoder(GenerationKind):
    """An encoder reads the prompt once; the decoder reads what it made in every step."""

    name: str = "encoder-decoder"
    has_encoder: bool = True

    @property
    def alone(self) -> GenerationKind:
        """One forward of both."""
        return PLAIN

    def recognizes(self, module: Any) -> bool:
        """Whether it is an encoder-decoder of transformers with a head."""
        return is_pretrained(module) and module.config.is_encoder_decoder and has_head(module)

    def export(self, model: LoadedModel, inputs: Inputs, stages: Stages) -> tuple[Program, ...]:
        """Export encoder and decoder, or a forward of given inputs."""
        if inputs is not None:
            return PLAIN.export(model, inputs, stages)
        given = encoder_inputs(model.module, model.directory)
        with explain_made_up_inputs(model.module, given):
            return export_encoder_decoder(model.module, given, metadata=model.metadata, **stages.of_two)


@dataclass(frozen=True, eq=False)
class ImageText(GenerationKind):
    """A decoder that reads the features of images instead of some tokens."""

    name: str = "image-text"
    takes_tokens: bool = True
    decodes_tokens: bool = True
    has_encoder: bool = True

    @property
    def alone(self) -> GenerationKind:
        """Its decoder, from text."""
        return CAUSAL

    def recognizes(self, module: Any) -> bool:
        """Whether it is a decoder whose images can be made into features before the first step."""
        return CAUSAL.recognizes(module) and image_text.reason_against(module) is None

    def describes(self, module: Any) -> dict[str, Any]:
        """Return the token of an image, and how its features are seen."""
        return image_text.described(module)

    def export(self, model: LoadedModel, inputs: Inputs, stages: Stages) -> tuple[Program, ...]:
        """Export vision and decoder; the language model alone, saying so, where they cannot be traced."""
        if inputs is not None:
            return CAUSAL.export(model, inputs, stages)
        try:
            image = image_text.made_up_image(model.module, model.directory)
            return export_image_text(model.module, image, metadata=model.metadata, **stages.of_two)
        except Exception as error:  # the model's own code may raise anything
            model.metadata[image_text.WITHOUT_IMAGES] = image_text.reason_of(error)
            return CAUSAL.export(model, inputs, stages)


ENCODER_DECODER = EncoderDecoder()
IMAGE_TEXT = ImageText()

GENERATIONS: tuple[GenerationKind, ...] = (RECURRENT, ENCODER_DECODER, IMAGE_TEXT, CAUSAL, PLAIN)
"""All kinds; the first one that recognizes a model is its."""


def generation_of(module: Any) -> GenerationKind:
    """Return how a model, as it is written, generates."""
    return next(kind for kind in GENERATIONS if kind.recognizes(module))


@dataclass(frozen=True)
class LoadedModel:
    """A model as the user wrote it, put into evaluation mode.

    Attributes:
        module: The model.
        spec: What was loaded, as given.
        dtype: torch dtype name of its floating parameters.
        directory: Hugging Face directory or id with configuration and tokenizer, if it came from one.
        metadata: JSON values for engines and recordings.
        generation: How it generates, if it does.
        stored: The program that it is already, of an ONNX file or a .pt2 file: nothing is exported.
        state: What it remembers when it is exported and run, where a forward changes that.
        training: Paths of the modules that were in training mode when it was given.
    """

    module: nn.Module
    spec: str
    dtype: str
    directory: str | None
    metadata: dict[str, Any] = field(default_factory=dict)
    generation: GenerationKind = PLAIN
    stored: Program | None = None
    state: ModuleState | None = None
    training: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """What manifests call it: "causal_lm" where any forward takes tokens, else "module"."""
        return "causal_lm" if self.generation.takes_tokens else "module"

    @property
    def input_names(self) -> list[str]:
        """Parameters of the forward, in order; none of a stored program."""
        return [] if self.stored is not None else list(forward_parameters(self.module))

    def judged_as(self, generation: GenerationKind) -> LoadedModel:
        """Return the same model, to be exported and run as another kind is."""
        return replace(self, generation=generation)
