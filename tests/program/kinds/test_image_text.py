"""What decides that a model is built with images, and which token of a step gets which feature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from glassengine.errors import UsageError
from glassengine.program import export_programs, generation, load_model
from glassengine.program.generation import CAUSAL, IMAGE_TEXT
from glassengine.program.kinds import causal_lm, image_text
from glassengine.program.kinds.image_text import index_of, padded_features, reason_against, require_features, rows_of
from glassengine.testing import models

TOKEN = 3


def test_features_go_to_image_tokens_in_the_order_of_the_rows() -> None:
    ids = torch.tensor([[3, 3, 8, 3, 3], [7, 3, 3, 9, 3]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    rows = rows_of(ids, mask, TOKEN)
    assert rows.tolist() == [[0, 0, -1, 1, 2], [-1, 3, 4, -1, 5]]
    # Padding that is an image token takes a place among those of the model's own code, and no feature.
    assert index_of(rows).tolist() == [0, 0, 1, 2, 3, 4, 5]
    assert index_of(rows[:, 3:]).tolist() == [1, 2, 5]
    assert index_of(rows[:, 2:3]).tolist() == [4, 0]


def test_features_beyond_the_image_tokens_are_padding() -> None:
    assert index_of(torch.full((1, 4), -1)).tolist() == [0, 0]
    assert padded_features(torch.ones(1, 6)).tolist() == [[1.0] * 6, [0.0] * 6]
    features = torch.ones(5, 6)
    assert torch.equal(padded_features(features), features)


def test_another_number_of_image_tokens_is_refused() -> None:
    require_features(8, 8, 2)
    with pytest.raises(UsageError, match=r"8 image tokens\n.*12, 4 for each of 3"):
        require_features(8, 12, 3)
    with pytest.raises(UsageError, match=r"none: no image was given"):
        require_features(8, 0, 0)


def test_blank_images_fill_up_the_prompts_of_a_batch() -> None:
    """Where each prompt has its images on an axis of its own: a processor adds blank ones."""
    pixels = torch.ones(2, 2, 3, 4, 4)
    pixels[1, 1] = 0
    mask = torch.ones(2, 2, 4, 4).long()
    mask[1, 1] = 0
    assert [tuple(image.shape) for image in image_text.one_by_one(pixels, 2)] == [(1, 1, 3, 4, 4)] * 3
    assert len(image_text.one_by_one(pixels, 1)) == 4
    with pytest.raises(UsageError, match="all images are blank"):
        image_text.one_by_one(0 * pixels, 2)
    ids = torch.tensor([[7, TOKEN]])
    given = {"input_ids": ids, "pixel_values": pixels, "pixel_attention_mask": mask, "mm_token_type_ids": ids == TOKEN}
    assert image_text.without_derived(given, TOKEN).keys() == {"input_ids", "pixel_values"}
    mask[0, 0, 0] = 0
    assert "pixel_attention_mask" in image_text.without_derived(given, TOKEN)
    assert "mm_token_type_ids" in image_text.without_derived({**given, "mm_token_type_ids": ids}, TOKEN)


def qwen2_vl() -> nn.Module:
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2], "rope_type": "default"}}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4}
    text = {**text, **rope, "num_key_value_heads": 1, "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2}
    tokens = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
    settings = {"text_config": text, "vision_config": vision, **tokens}
    return models.from_config("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", settings)


def test_models_that_images_are_not_built_for_say_why() -> None:
    loaded = load_model(qwen2_vl())
    assert loaded.generation is CAUSAL
    assert loaded.metadata[image_text.WITHOUT_IMAGES] == "its images come with image_grid_thw"
    text = load_model(models.llama())
    assert reason_against(text.module) == "" and image_text.WITHOUT_IMAGES not in text.metadata
    llava = load_model(models.llava(num_layers=1, image_size=8))
    assert llava.generation is IMAGE_TEXT and llava.metadata[image_text.IMAGE_TOKEN] == TOKEN


def test_a_model_that_cannot_be_traced_with_images_is_built_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UsageError("torch.export cannot trace Vision", got="TypeError: planted\nand more")

    monkeypatch.setattr(generation, "export_image_text", refuse)
    monkeypatch.setattr(generation, "export_causal_lm", lambda module, **_: f"of text: {type(module).__name__}")
    loaded = load_model(models.llava(num_layers=1, image_size=8))
    assert export_programs(loaded) == ("of text: LlavaForConditionalGeneration",)
    reason = "torch.export cannot trace Vision: TypeError: planted"
    assert loaded.metadata[image_text.WITHOUT_IMAGES] == reason


def gemma3() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    text = {**sizes, **kinds, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 64}
    vision = {**sizes, "image_size": 16, "patch_size": 4, "vision_use_head": False, "model_type": "siglip_vision_model"}
    tokens = {"image_token_index": TOKEN, "boi_token_index": 4, "eoi_token_index": 5, "mm_tokens_per_image": 4}
    settings = {"text_config": {**text, "model_type": "gemma3_text"}, "vision_config": vision, **tokens}
    return models.from_config("Gemma3ForConditionalGeneration", "Gemma3Config", settings)


def test_tokens_of_an_image_see_each_other_where_they_do_in_the_model() -> None:
    """The decoder's prefill and a step, beside the model's own: Gemma 3 masks by where images are."""
    model: Any = gemma3()
    assert load_model(model).metadata[image_text.WHOLE_IMAGES] is True
    pixels = torch.randn((1, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[7, 8, TOKEN, TOKEN, TOKEN, TOKEN, 9, 10]])
    layout = causal_lm.probe_layout(model)
    caches = list(layout.allocate(1, 10, torch.float32).values())
    decoder = image_text.ImageTextDecoder(model, layout, is_list=image_text.makes_list(model, {"pixel_values": pixels}))
    features = image_text.features_of(model, [pixels])
    mask = torch.ones(1, 10).long()
    slots = torch.arange(8)
    index = index_of(rows_of(ids, mask[:, :8], TOKEN))
    with torch.no_grad():
        found = decoder(ids, (torch.arange(10) < 8).long()[None], slots[None], slots, caches, features, index)
        later = torch.tensor([8])
        after = decoder(
            torch.tensor([[11]]), (torch.arange(10) < 9).long()[None], later[None], later, caches, features, index[:0]
        )
        types = (ids == TOKEN).long()
        cache = DynamicCache(config=model.config.get_text_config())
        wanted = model(ids, pixel_values=pixels, token_type_ids=types, past_key_values=cache).logits
        causal = model(ids, pixel_values=pixels).logits
        then = model(torch.tensor([[11]]), past_key_values=cache).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after, then, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(wanted, causal, rtol=1e-2, atol=1e-2)
