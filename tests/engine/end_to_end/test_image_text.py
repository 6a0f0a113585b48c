"""Engines of models of images and text: the tokens of transformers, with images or without, from one engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import glassengine as glass
from glassengine.cli.main import main
from glassengine.diagnose import check
from glassengine.engine import Engine
from glassengine.engine.run.forward import load_processor
from glassengine.errors import UsageError
from glassengine.program.kinds import image_text
from glassengine.testing import models
from glassengine.testing.checkpoints import VOCAB_SIZE, byte_tokenizer, save_checkpoint

TOKEN, NUM_FEATURES = VOCAB_SIZE, 4
IMAGE = [TOKEN] * NUM_FEATURES
TWO, ONE, NONE = [7, *IMAGE, 50, 60, *IMAGE, 9], [*IMAGE, 99, 17, 20, 33, 41, 8], [8, 9, 10, 11]
PIXELS = torch.randn((3, 3, 8, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> Any:
    return models.llava(num_layers=1, image_size=8, vocab_size=VOCAB_SIZE + 1, image_token=TOKEN)


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with a processor, whose tokenizer spells the image token `<image>`."""
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    directory = save_checkpoint(model, tmp_path_factory.mktemp("llava") / "tiny", tokenizer=False)
    tokenizer = byte_tokenizer("<image>")
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    size = {"height": 8, "width": 8}
    images = CLIPImageProcessorPil(size=size, crop_size=size)
    strategy = {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    LlavaProcessor(images, tokenizer, patch_size=4, **strategy).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    output = "model.language_model.layers.0.mlp"
    return glass.build(checkpoint, checkpoint.with_name("engine"), backend="eager", max_seq_len=64, add_output=[output])


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two files of images, neither of the size that the model takes."""
    directory = tmp_path_factory.mktemp("photos")
    noise = torch.randint(0, 255, (2, 13, 21, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    files = [directory / "a.png", directory / "b.png"]
    for file, pixels in zip(files, noise, strict=True):
        Image.fromarray(pixels.numpy()).save(file)
    return files


def expected(model: Any, row: list[int], pixels: torch.Tensor | None, **options: Any) -> list[list[int]]:
    """Return what transformers generates from one prompt."""
    images = {} if pixels is None else {"pixel_values": pixels}
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(torch.tensor([row]), **images, **settings)[:, len(row) :].tolist()


def found(generation: Any) -> list[list[int]]:
    return [list(row) for row in generation.token_ids]


@pytest.mark.parametrize(("row", "pixels"), [(ONE, PIXELS[:1]), (TWO, PIXELS[1:]), (NONE, None)])
def test_tokens_are_those_of_transformers(
    model: Any, engine: Engine, row: list[int], pixels: torch.Tensor | None
) -> None:
    given = {} if pixels is None else {"inputs": {"pixel_values": pixels}}
    assert found(engine.generate(input_ids=[row], max_new_tokens=6, **given)) == expected(model, row, pixels)


def test_images_change_the_tokens(model: Any, engine: Engine) -> None:
    """The tests beside this one would say little of a model that does not look."""
    first, second = (engine.generate(input_ids=[ONE], inputs={"pixel_values": PIXELS[i : i + 1]}) for i in (0, 1))
    assert found(first) != found(second)


@pytest.mark.parametrize("chunk", [None, 5])
def test_prompts_of_several_lengths_are_one_batch(model: Any, engine: Engine, chunk: int | None) -> None:
    """Padded on the left, and in pieces that cut through images; images belong to the rows in order."""
    rows = [ONE, NONE, TWO]
    made = engine.generate(input_ids=rows, inputs={"pixel_values": PIXELS}, max_new_tokens=6, prefill_chunk=chunk)
    images = [PIXELS[:1], None, PIXELS[1:]]
    assert found(made) == [expected(model, row, own)[0] for row, own in zip(rows, images, strict=True)]
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = (ids != 0).long()
    padded = {"input_ids": ids, "attention_mask": mask, "pixel_values": PIXELS}
    # What a processor says of the tokens beside is what they say themselves.
    for more in ({}, {"token_type_ids": (ids == TOKEN).long()}):
        assert found(engine.generate(inputs=padded | more, max_new_tokens=6)) == found(made)
    with pytest.raises(UsageError, match=r"not the tensors of images[\s\S]*token_type_ids"):
        engine.generate(inputs={**padded, "token_type_ids": torch.ones_like(ids)}, max_new_tokens=6)


def test_sequences_of_one_prompt_share_its_images(model: Any, engine: Engine) -> None:
    sampling = {"do_sample": True, "num_return_sequences": 3, "temperature": 2.0}
    made = engine.generate(input_ids=[TWO], inputs={"pixel_values": PIXELS[:2]}, max_new_tokens=6, seed=3, **sampling)
    torch.manual_seed(3)
    assert found(made) == expected(model, TWO, PIXELS[:2], **sampling)


def test_an_image_token_without_an_image_keeps_its_embedding(model: Any, engine: Engine) -> None:
    """As in transformers: one that was generated, and one in a prompt without images."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config())
    session = engine.session(1, 24, constants=engine.encode(pixel_values=PIXELS[:1]))
    with torch.no_grad():
        model(torch.tensor([ONE]), pixel_values=PIXELS[:1], past_key_values=cache)
        wanted = model(torch.tensor([[TOKEN]]), past_key_values=cache).logits
        without = model(torch.tensor([ONE])).logits
    session.prefill(torch.tensor([ONE]))
    torch.testing.assert_close(session.decode(torch.tensor([TOKEN])), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(engine.session(1, 24).prefill(torch.tensor([ONE])), without, rtol=1e-4, atol=1e-4)


def test_each_image_runs_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.encoder is not None
    runs: list[tuple[int, ...]] = []
    run = engine.encoder.executable.run
    monkeypatch.setattr(
        engine.encoder.executable, "run", lambda inputs: runs.append(tuple(inputs["pixel_values"].shape)) or run(inputs)
    )
    history: list[Any] = []
    given = {"inputs": {"pixel_values": PIXELS}, "debug": True, "on_step": lambda s: history.append(s.debug_buffers)}
    engine.generate(input_ids=[ONE, TWO], max_new_tokens=3, **given)
    assert runs == [(1, 3, 8, 8)] * 3 and len(history) == 3
    assert history[0]["image_features"].shape == (12, 64)
    assert torch.equal(history[2]["image_features"], history[0]["image_features"])
    assert history[0]["image_index"].tolist() == list(range(1, 13)) and history[2]["image_index"].tolist() == [0, 0]


def test_weights_of_the_tower_are_those_of_the_vision_program(engine: Engine) -> None:
    assert engine.encoder is not None
    own, of_images = ({site.name.split("/")[0] for site in e.sites} for e in (engine, engine.encoder))
    assert any(name.startswith("model.multi_modal_projector") for name in of_images)
    assert not any(name.startswith(("model.vision_tower", "model.multi_modal_projector")) for name in own)
    assert not any(name.startswith("model.language_model") for name in of_images)


def test_files_go_through_the_processor_of_the_model(
    model: Any, engine: Engine, photos: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["<image>ab<image>", "c <image>"]
    opened = [Image.open(file) for file in (*photos, photos[0])]
    processor = load_processor(engine.directory)
    rows = []
    for text, own in zip(texts, (opened[:2], opened[2:]), strict=True):
        read = processor(text=text, images=own, return_tensors="pt")
        assert int((read["input_ids"] == TOKEN).sum()) == NUM_FEATURES * len(own)
        rows.append(expected(model, read["input_ids"][0].tolist(), read["pixel_values"])[0])
    images = ["--image", str(photos[0]), "--image", str(photos[1]), "--image", str(photos[0])]
    command = ["run", str(engine.directory), "--input-text", texts[0], "--input-text", texts[1], *images]
    assert main([*command, "--max-new-tokens", "6", "--record", str(tmp_path / "r")]) == 0
    tokenizer = processor.tokenizer
    assert capsys.readouterr().out == "".join(
        f"Input: {text}\nOutput: {tokenizer.decode(row, skip_special_tokens=True)}\n"
        for text, row in zip(texts, rows, strict=True)
    )
    recording = glass.Recording.open(tmp_path / "r")
    assert recording.tensor("model.language_model.layers.0.mlp", 0).shape[:2] == (2, 2 * NUM_FEATURES + 2)
    made = engine.generate(texts[1], images=Image.open(photos[0]).convert("RGB"), max_new_tokens=6)
    assert found(made) == rows[1:]


def test_a_photo_that_was_taken_sideways_is_read_upright(engine: Engine, photos: list[Path], tmp_path: Path) -> None:
    turned = Image.open(photos[0]).transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it clockwise to see it as it was
    turned.save(tmp_path / "turned.png", exif=exif)
    seen: list[torch.Tensor] = []
    for file in (photos[0], tmp_path / "turned.png", photos[1]):
        engine.generate(
            "<image>",
            images=file,
            max_new_tokens=1,
            debug=["image_features"],
            on_step=lambda session: seen.append(session.debug_buffers["image_features"]),
        )
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])


def test_images_that_do_not_fit_are_told(engine: Engine, photos: list[Path], tmp_path: Path) -> None:
    def given(**inputs: Any) -> Any:
        return engine.generate(input_ids=[ONE], inputs={"pixel_values": PIXELS[:1], **inputs})

    with pytest.raises(UsageError, match=r"4 image tokens\n.*8, 4 for each of 2[\s\S]*--image FILE"):
        given(pixel_values=PIXELS[:2])
    with pytest.raises(UsageError, match=r"4 image tokens\n.*none: no image was given"):
        engine.generate(input_ids=[ONE])
    with pytest.raises(UsageError, match=r"dimension 3 must be 8"):
        given(pixel_values=torch.zeros(1, 3, 8, 9))
    with pytest.raises(UsageError, match=r"expected: pixel_values \[images"):
        given(pixel_values=torch.zeros(0, 3, 8, 8))
    with pytest.raises(UsageError, match=r"not the tensors of images[\s\S]*image_sizes"):
        given(image_sizes=torch.ones(1, 2))
    with pytest.raises(UsageError, match=r"token ids were given twice"):
        given(input_ids=torch.tensor([ONE]))
    with pytest.raises(UsageError, match=r"2 times <image>[\s\S]*1, one for each --image"):
        engine.generate("<image> and <image>", images=photos[0])
    with pytest.raises(UsageError, match=r"image cannot be read[\s\S]*none.png"):
        engine.generate("<image>", images=tmp_path / "none.png")
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(UsageError, match=r"image cannot be read[\s\S]*text.png"):
        engine.generate("<image>", images=[tmp_path / "text.png"])
    with pytest.raises(UsageError, match=r"with token ids"):
        engine.generate(input_ids=[ONE], images=photos[0])
    with pytest.raises(UsageError, match=r"image_features[\s\S]*4 features for 8 image tokens"):
        engine.session(1, 24, constants=engine.encode(pixel_values=PIXELS[:1])).prefill(torch.tensor([TWO]))
    for rows in ([[-1, *range(1, 5), *[-1] * 5]], [[1, 2, 3, *[-1] * 7]]):
        constants = {"image_features": torch.zeros(4, 64), "image_rows": torch.tensor(rows)}
        with pytest.raises(UsageError, match=r"image_rows does not match the image tokens"):
            engine.session(1, 24, constants=constants).prefill(torch.tensor([ONE]))
    with pytest.raises(UsageError, match=r"image_rows[\s\S]*not an input"):
        engine.session(1, 24, constants={"image_rows": torch.full((1, 10), 9)})
    with pytest.raises(UsageError, match=r"image_features are a tensor"):
        engine.session(1, 24, constants={"image_features": [1.0]})
    with pytest.raises(UsageError, match=r"features of size 63"):
        engine.session(1, 24, constants={"image_features": torch.zeros(4, 63)}).prefill(torch.tensor([ONE]))


def test_an_engine_without_a_processor_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"processor[\s\S]*--inputs FILE with pixel_values"):
        load_processor(tmp_path)


def test_an_engine_of_text_alone_takes_no_images(engine: Engine, photos: list[Path]) -> None:
    plain = Engine(
        engine.directory,
        dataclasses.replace(
            engine.manifest,
            inputs=tuple(entry for entry in engine.manifest.inputs if not entry.name.startswith("image_")),
            model={**engine.manifest.model, "without_images": "its images come with image_grid_thw"},
        ),
        engine.executable,
        engine.sites,
    )
    with pytest.raises(UsageError, match=r"takes no images[\s\S]*image_grid_thw"):
        plain.generate("a", images=photos[0])


_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_TOKENS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 96}
_TEXT = {**_SIZES, **_TOKENS, "num_key_value_heads": 1}
_COHERE = {
    **_TEXT,
    "model_type": "cohere2",
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
}
_GEMMA = {**_COHERE, "model_type": "gemma3_text", "head_dim": 16}
_VISION = {**_SIZES, "image_size": 16, "patch_size": 4}
_SIGLIP = {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
_SAM = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64}
OTHERS: dict[str, dict[str, Any]] = {
    "VipLlava": {
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_feature_layers": [-1, -2],
    },
    "InternVL": {
        "vision_config": {**_VISION, "image_size": [16, 16], "patch_size": [4, 4]},
        "text_config": {**_TEXT, "model_type": "qwen2"},
    },
    "AyaVision": {"vision_config": _SIGLIP, "text_config": _COHERE, "downsample_factor": 2},
    "Cohere2Vision": {
        "vision_config": _SIGLIP,
        "text_config": _COHERE,
        "downsample_factor": 2,
        "alignment_intermediate_size": 64,
    },
    "GotOcr2": {
        "vision_config": {**_SAM, "patch_size": 4, "mlp_dim": 64, "global_attn_indexes": [1], "window_size": 2},
        "text_config": {**_TEXT, "model_type": "qwen2"},
    },
    "SmolVLM": {"vision_config": _VISION, "text_config": {**_TEXT, "model_type": "llama"}, "scale_factor": 2},
    "Gemma3": {
        "vision_config": _SIGLIP,
        "text_config": _GEMMA,
        "mm_tokens_per_image": 4,
        "boi_token_index": 4,
        "eoi_token_index": 5,
    },
}
"""Family -> settings of a tiny model of it."""


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_generate_and_are_judged(family: str) -> None:
    """Two images in one prompt, one in another, none in a third: one batch, each row as transformers has it alone."""
    names = {"image_token_index": 3, "image_token_id": 3}
    classes = f"{family}ForConditionalGeneration", f"{family}Config"
    model: Any = models.from_config(*classes, {**OTHERS[family], **names})
    image = image_text.made_up_image(model, None)["pixel_values"]
    pixels = torch.randn((3, *image.shape[-3:]), generator=torch.Generator().manual_seed(1))
    places = [3] * len(image_text.features_of(model, [image]))
    rows = [[7, *places, 50, 60, *places, 9], [*places, 40, 17, 20, 33], [8, 9, 10, 11]]
    images = [pixels[:2], pixels[2:], None]
    engine = glass.build(model, backend="eager", max_seq_len=96)
    made = engine.generate(input_ids=rows, inputs={"pixel_values": pixels}, max_new_tokens=6, eos_token_id=None)
    wanted = []
    for row, own in zip(rows, images, strict=True):
        types = {"token_type_ids": (torch.tensor([row]) == 3).long()} if family == "Gemma3" and own is not None else {}
        of_prompt = own[None] if own is not None and image.dim() == 5 else own
        wanted += expected(model, row, of_prompt, eos_token_id=None, **types)
    assert found(made) == wanted
    result = check(model, backend="eager", steps=1)
    assert result.ok and result.coverage == 1.0 and result.counts["wrong"] == 0
    if family == "Gemma3":
        with pytest.raises(UsageError, match=r"cannot run in pieces[\s\S]*--prefill-chunk"):
            engine.generate(input_ids=rows, inputs={"pixel_values": pixels}, prefill_chunk=4)


@pytest.mark.slow
def test_tiles_that_a_processor_cuts_images_into(photos: list[Path], tmp_path: Path) -> None:
    """Idefics 3: more tiles than images, other numbers of them in each prompt, and masks of pixels that all count."""
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    words = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles]
    tokenizer = byte_tokenizer(*words)
    tokenizer.add_tokens(words, special_tokens=True)
    text = {**_TEXT, "model_type": "llama", "vocab_size": VOCAB_SIZE + len(words), "max_position_embeddings": 128}
    settings = {"vision_config": _VISION, "text_config": text, "scale_factor": 2, "image_token_id": VOCAB_SIZE}
    model: Any = models.from_config("Idefics3ForConditionalGeneration", "Idefics3Config", settings)
    directory = save_checkpoint(model, tmp_path / "tiny", tokenizer=False)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4)
    processor.save_pretrained(directory)
    engine = glass.build(directory, tmp_path / "engine", backend="eager")
    wanted = []
    for prompt, files in (("<image>a<image>", photos), ("b <image>", photos[:1])):
        read = processor(text=[prompt], images=[[Image.open(file) for file in files]], return_tensors="pt")
        assert read["pixel_values"].shape[1] > len(files)
        wanted += model.generate(**read, max_new_tokens=5, do_sample=False)[:, read["input_ids"].shape[1] :].tolist()
    made = engine.generate(["<image>a<image>", "b <image>"], images=[*photos, photos[0]], max_new_tokens=5)
    assert found(made) == wanted
