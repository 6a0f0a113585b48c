"""Tiny random models: one per family that the suite covers, the same weights in every process.

Weights are drawn so that activations neither vanish nor saturate (transformers' default initialization makes a model of
this size almost linear, and a wrong attention would then hide below any tolerance), biases and norm weights included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

HIDDEN_SIZE = 64
VOCAB_SIZE = 256

_COMMON = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ENCODER = {"hidden_size": HIDDEN_SIZE, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
"""Sizes of tiny encoders of texts and images."""

IMAGE_ENCODER = {**ENCODER, "image_size": 16, "patch_size": 4}


def llama(**changes: Any) -> nn.Module:
    """Return a Llama with grouped-query attention; `changes` replace entries of its configuration."""
    return _causal_lm("LlamaConfig", _COMMON, changes)


def gpt2(**changes: Any) -> nn.Module:
    """Return a GPT-2: learned positions, LayerNorm, biases, one matrix product for query, key and value."""
    config = {"n_embd": HIDDEN_SIZE, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": VOCAB_SIZE}
    return _causal_lm("GPT2Config", {**config, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}, changes)


def qwen3(**changes: Any) -> nn.Module:
    """Return a Qwen3: normalized queries and keys, tied embeddings off."""
    return _causal_lm("Qwen3Config", {**_COMMON, "head_dim": 16}, changes)


def gemma3(**changes: Any) -> nn.Module:
    """Return a Gemma3 text model: one layer with a sliding window of 8, one with full attention, tied embeddings."""
    kinds = ["sliding_attention", "full_attention"]
    return _causal_lm(
        "Gemma3TextConfig", {**_COMMON, "head_dim": 16, "sliding_window": 8, "layer_types": kinds}, changes
    )


def phi3(**changes: Any) -> nn.Module:
    """Return a Phi3: one matrix product for query, key and value, one for gate and up."""
    return _causal_lm("Phi3Config", _COMMON, changes)


def mixtral(**changes: Any) -> nn.Module:
    """Return a Mixtral: four experts, two per token."""
    return _causal_lm("MixtralConfig", {**_COMMON, "num_local_experts": 4}, changes)


CAUSAL_LMS: dict[str, Callable[..., nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "phi3": phi3,
    "mixtral": mixtral,
}
"""Name -> function that makes the model."""


def vit() -> nn.Module:
    """Return a vision transformer for 16 x 16 images."""
    return from_config("ViTForImageClassification", "ViTConfig", {**IMAGE_ENCODER, "num_labels": 10})


def resnet() -> nn.Module:
    """Return a small ResNet: convolutions, batch norms with statistics of their own, pooling."""
    config = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "layer_type": "basic", "num_labels": 10}
    model = from_config("ResNetForImageClassification", "ResNetConfig", config)
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        elif name.endswith("running_var"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return model


def llava(
    *, num_layers: int = 2, image_size: int = 16, vocab_size: int = VOCAB_SIZE, image_token: int = 3
) -> nn.Module:
    """Return a LLaVA: a CLIP tower, a projector and a Llama, with a feature for each 4 x 4 pixels of an image."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    layers = {"num_hidden_layers": num_layers}
    vision = CLIPVisionConfig(**{**IMAGE_ENCODER, **layers, "image_size": image_size, "projection_dim": 32})
    text = LlamaConfig(**{**_COMMON, **layers, "vocab_size": vocab_size})
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=image_token, vision_feature_layer=-1)
    return drawn(lambda: LlavaForConditionalGeneration(config))


class VisionModel(nn.Module):
    """Convolutional stem, one attention block over patches, classifier: image [B, 3, 16, 16] -> logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, kernel_size=4, stride=4)
        self.norm = nn.LayerNorm(32)
        self.query_key_value = nn.Linear(32, 96)
        self.project = nn.Linear(32, 32)
        self.classify = nn.Linear(32, 10)

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return {"logits": [B, 10], "patches": [B, 16, 32]}."""
        patches = self.stem(pixel_values).flatten(2).transpose(1, 2)
        query, key, value = (
            part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.query_key_value(self.norm(patches)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        patches = patches + self.project(attended.transpose(1, 2).flatten(2))
        return {"logits": self.classify(patches.mean(1)), "patches": patches}


class AudioModel(nn.Module):
    """Two strided convolutions and causal attention over frames: samples [B, 1, 160] -> frames [B, 39, 24]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 24, kernel_size=5, stride=2, padding=1)
        self.second = nn.Conv1d(24, 24, kernel_size=3, stride=2)
        self.query_key_value = nn.Linear(24, 72)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return frames."""
        frames = nn.functional.gelu(self.second(nn.functional.gelu(self.first(samples)))).transpose(1, 2)
        query, key, value = (
            part.unflatten(-1, (2, 12)).transpose(1, 2) for part in self.query_key_value(frames).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return frames + attended.transpose(1, 2).flatten(2)


def vision() -> nn.Module:
    """Return a `VisionModel`."""
    return drawn(VisionModel)


def vision_inputs(batch: int = 2) -> dict[str, torch.Tensor]:
    """Return images for `vision`."""
    return {"pixel_values": torch.randn((batch, 3, 16, 16), generator=torch.Generator().manual_seed(7))}


def audio() -> nn.Module:
    """Return an `AudioModel`."""
    return drawn(AudioModel)


def audio_inputs(batch: int = 2) -> dict[str, torch.Tensor]:
    """Return samples for `audio`; tests ask for the inputs of a model by its name."""
    return {"samples": torch.randn((batch, 1, 160), generator=torch.Generator().manual_seed(8))}


def _causal_lm(config_class: str, config: dict[str, Any], changes: dict[str, Any]) -> nn.Module:
    import transformers

    made = getattr(transformers, config_class)(**{**config, **changes})
    return drawn(lambda: transformers.AutoModelForCausalLM.from_config(made))


def from_config(model_class: str, config_class: str, settings: Mapping[str, Any], **options: Any) -> nn.Module:
    """Return a model of transformers, drawn.

    Args:
        model_class: Its name there.
        config_class: Likewise, of its configuration.
        settings: Of the configuration.
        options: Of the model's class.
    """
    import transformers

    made = getattr(transformers, config_class)(**settings)
    return drawn(lambda: getattr(transformers, model_class)(made, **options))


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    """Return what `make` makes, in evaluation mode, every parameter redrawn from a fixed seed.

    Matrices get the variance 1 / fan-in; vectors (biases, norm weights) are moved by 0.1 from where they were.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    fan_in = parameter[0].numel()
                    parameter.copy_(torch.randn(parameter.shape) / math.sqrt(fan_in))
                else:
                    parameter.add_(0.1 * torch.randn(parameter.shape))
    return model
