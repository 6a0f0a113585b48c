"""Inputs that are made up for models of transformers, and what is said where they do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from glassengine.errors import UsageError
from glassengine.program import example_inputs, export_program, load_model
from glassengine.testing.models import ENCODER, IMAGE_ENCODER, from_config

_CONVOLUTIONS = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}


def _wav2vec2_bert(**changes: Any) -> nn.Module:
    return from_config("Wav2Vec2BertModel", "Wav2Vec2BertConfig", {**ENCODER, **changes})


def test_spectrograms_have_the_sizes_that_the_configuration_states() -> None:
    patches = {"patch_size": 8, "max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8}
    model = from_config("ASTForAudioClassification", "ASTConfig", {**ENCODER, **patches})
    assert [step["input_values"].shape for step in example_inputs(model)] == [(2, 32, 16), (3, 32, 16), (1, 32, 16)]
    shapes = [step["input_features"].shape for step in example_inputs(_wav2vec2_bert(feature_projection_input_dim=16))]
    assert [shape[::2] for shape in shapes] == [(2, 16), (3, 16), (1, 16)]
    assert len({shape[1] for shape in shapes}) == 3
    settings = {"d_model": 64, "input_feat_per_channel": 8, "input_channels": 2, "vocab_size": 64}
    made = example_inputs(from_config("Speech2TextForConditionalGeneration", "Speech2TextConfig", settings))
    assert {step["input_features"].shape[2] for step in made} == {16}


def test_every_model_takes_what_is_made_up_for_it() -> None:
    sizes = {"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], **_CONVOLUTIONS}
    for model in (
        _wav2vec2_bert(feature_projection_input_dim=16),
        from_config("HubertModel", "HubertConfig", {**ENCODER, **sizes}),
    ):
        for step in example_inputs(model):
            with torch.no_grad():
                assert model(**step).last_hidden_state.shape[0] == len(next(iter(step.values())))


def test_layers_of_kinds_that_no_cache_knows() -> None:
    settings = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_types": ["basic", "bottleneck"]}
    model = from_config("ResNetModel", "ResNetConfig", {**settings, "num_hidden_layers": 2})
    assert [tuple(step) for step in example_inputs(model)] == [("pixel_values",)] * 3


def test_a_configuration_that_does_not_state_a_size() -> None:
    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    parakeet = {"encoder_config": {**config, "num_mel_bins": 16, "subsampling_conv_channels": 8}, "vocab_size": 32}
    with pytest.raises(UsageError, match=r"inputs must be given\n.*num_mel_bins[\s\S]*--inputs"):
        example_inputs(from_config("ParakeetForCTC", "ParakeetCTCConfig", parakeet))


def test_a_trace_that_fails_says_that_its_inputs_were_made_up() -> None:
    # A video has one dimension more than an image.
    model = from_config("VideoMAEForVideoClassification", "VideoMAEConfig", {**IMAGE_ENCODER, "num_frames": 4})
    with pytest.raises(UsageError, match=r"made up: pixel_values \[2, 3, 16, 16\][\s\S]*--inputs"):
        export_program(load_model(model))
    with pytest.raises(UsageError, match="cannot run on these inputs") as raised:
        export_program(load_model(model), inputs=[dict(step) for step in example_inputs(model)])
    assert "made up" not in str(raised.value)


def test_the_advice_of_torch_to_its_developers_is_left_out() -> None:
    class Loops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([row + 1 for row in x[x[:, 0] > 0]])

    with pytest.raises(UsageError, match="data-dependent") as raised:
        export_program(load_model(Loops()), inputs={"x": torch.ones(3, 2)})
    assert "TORCH_LOGS" not in str(raised.value)
