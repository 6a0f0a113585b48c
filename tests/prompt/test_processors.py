"""Processors of images and sounds: each planted difference is named, and what is the same is no difference."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ImageOps

from glassengine.cli.main import main
from glassengine.prompt.processors import compare_processors, of_directory, processed
from glassengine.prompt.side import OpenedSide, Processed, PromptSide
from glassengine.results.without_tensors import PromptFinding

CLIP: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 32},
    "crop_size": {"height": 32, "width": 32},
}
WHISPER: dict[str, Any] = {"feature_extractor_type": "WhisperFeatureExtractor", "chunk_length": 1}
Function = Callable[..., Any]


class Side(PromptSide):
    """A side that has processors only."""

    def __init__(self, found: dict[str, Processed | str]) -> None:
        self.opened, self._found = OpenedSide("test", None, has_processor=True), found

    def process(self) -> dict[str, Processed | str]:
        return self._found


def configured(document: dict[str, Any], folder: Path) -> PromptSide:
    (folder / "preprocessor_config.json").write_text(json.dumps(document))
    return Side(of_directory(folder, document.keys()))


@cache
def image_processor(**changes: Any) -> Function:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    clip = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, **changes)
    return lambda picture: clip(picture, return_tensors="np")["pixel_values"]


@cache
def of_clip() -> PromptSide:
    return Side(processed(image_processor(), None))


def wrong(found: list[PromptFinding]) -> list[str]:
    return [one.cause for one in found if one.level == "wrong"]


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        (None, {}),
        ("mean", {"image_mean": [0.5, 0.5, 0.5]}),
        ("std", {"image_std": [0.5, 0.5, 0.5]}),
        ("rescale", {"do_rescale": False}),
        ("rescale", {"rescale_factor": 1 / 256}),
        ("normalization", {"do_normalize": False}),
        ("resampling", {"resample": 2}),
        ("resampling", {"resample": 0}),
        ("resampling", {"resample": 1}),
        ("aspect ratio", {"size": {"height": 32, "width": 32}}),
        ("size", {"size": {"shortest_edge": 36}, "crop_size": {"height": 36, "width": 36}}),
        ("crop", {"size": {"shortest_edge": 40}}),
        ("size", {"do_center_crop": False}),
        ("input (grayscale, alpha", {"do_convert_rgb": False}),
    ],
)
def test_a_planted_difference_of_image_processors_is_named(
    cause: str | None, change: dict[str, Any], tmp_path: Path
) -> None:
    found, number = compare_processors(of_clip(), configured({**CLIP, **change}, tmp_path))
    first = wrong(found)[0] if found else None
    assert number >= 8 and (first is None if cause is None else str(first).startswith(f"image: {cause}")), found


def padded(picture: Any) -> Any:
    return image_processor()(ImageOps.pad(picture.convert("RGB"), (32, 32)))


def interpolated(picture: Any) -> Any:
    """Resize as torch does without antialiasing, in float32."""
    import torch

    values = torch.from_numpy(np.asarray(picture.convert("RGB"), np.float32)).permute(2, 0, 1)[None]
    short = min(values.shape[2:])
    size = [int(one * 32 / short) for one in values.shape[2:]]
    values = torch.nn.functional.interpolate(values, size=size, mode="bilinear")
    top, left = ((one - 32) // 2 for one in size)
    values = values[..., top : top + 32, left : left + 32] / 255
    mean, std = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
    return (values - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


@pytest.mark.parametrize(
    ("cause", "function"),
    [
        ("channel order", lambda picture: image_processor()(picture.convert("RGB"))[:, ::-1]),
        ("crop", lambda picture: image_processor()(picture.crop((0, 0, min(picture.size), min(picture.size))))),
        ("padding", padded),
        ("resampling", interpolated),
        (
            "input (EXIF rotation)",
            lambda picture: image_processor()(ImageOps.exif_transpose(picture)),
        ),
        (None, lambda picture: image_processor()(picture) + 1e-4),
        (None, lambda picture: np.asarray(image_processor()(picture))[0].transpose(1, 2, 0)),  # channels last
    ],
)
def test_any_function_is_a_processor_of_images(cause: str | None, function: Function) -> None:
    found, _ = compare_processors(of_clip(), Side(processed(function, None)))
    assert (wrong(found)[:1] == [f"image: {cause}"]) if cause else not wrong(found), found


def spectrogram_of(
    *,
    scale: str = "slaney",
    norm: str | None = "slaney",
    window: str = "hann",
    fft: int = 400,
    hop: int = 160,
    log: str = "log10",
    scaled: bool = True,
    center: bool = True,
    bins: int = 80,
    low: float = 0.0,
    high: float = 8000.0,
    power: float = 2.0,
    preemphasis: float | None = None,
) -> Function:
    """Whisper's features, in code of another author."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    filters = mel_filter_bank(1 + fft // 2, bins, low, high, 16000, norm=norm, mel_scale=scale)
    shape = window_function(400, window)

    def features(samples: Any, rate: int) -> Any:
        if rate != 16000:
            raise ValueError("16000 samples per second")
        rows = []
        for row in np.atleast_2d(np.asarray(samples, np.float64)):
            cut = np.pad(row[:16000], (0, max(0, 16000 - len(row))))
            found = spectrogram(
                *(cut, shape, 400, hop, fft),
                power=power,
                mel_filters=filters,
                log_mel=log,
                center=center,
                preemphasis=preemphasis,
            )[:, :-1]
            rows.append((np.maximum(found, found.max() - 8.0) + 4.0) / 4.0 if scaled else found)
        return np.stack(rows)

    return features


@cache
def of_whisper() -> PromptSide:
    from transformers import WhisperFeatureExtractor

    whisper = WhisperFeatureExtractor(chunk_length=1)
    return Side(processed(None, lambda one, rate: whisper(one, sampling_rate=rate, return_tensors="np")))


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        (None, {}),
        ("mel scale", {"scale": "htk"}),  # as onnxruntime-extensions had it before PR 969
        ("mel scale", {"scale": "kaldi"}),
        ("filter norm", {"norm": None}),
        ("log", {"log": "log"}),
        ("log", {"log": "dB"}),
        ("hop", {"hop": 128}),
        ("FFT length", {"fft": 512}),
        ("scaling", {"scaled": False}),
        ("padding", {"center": False}),
        ("mel bins", {"bins": 128}),
        ("window", {"window": "hamming"}),
        ("window", {"window": "boxcar"}),
        ("frequency range", {"low": 20.0}),
        ("frequency range", {"high": 7600.0}),
        ("power", {"power": 1.0}),
        ("preemphasis", {"preemphasis": 0.97}),
    ],
)
def test_a_planted_difference_of_audio_processors_is_named(cause: str | None, change: dict[str, Any]) -> None:
    found, number = compare_processors(of_whisper(), Side(processed(None, spectrogram_of(**change))))
    assert number >= 6 and (wrong(found)[:1] == [f"audio: {cause}"] if cause else not wrong(found)), found


@pytest.mark.parametrize(
    ("cause", "change"),
    [(None, {}), ("mel bins", {"feature_size": 128}), ("padding", {"chunk_length": 2}), ("hop", {"hop_length": 80})],
)
def test_a_configuration_of_an_audio_processor_is_read_by_transformers(
    cause: str | None, change: dict[str, Any], tmp_path: Path
) -> None:
    found, _ = compare_processors(of_whisper(), configured({**WHISPER, **change}, tmp_path))
    assert wrong(found)[:1] == ([f"audio: {cause}"] if cause else []), found


def test_waves_are_compared_by_two_loudnesses(tmp_path: Path) -> None:
    document = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": True}
    ours = configured(document, tmp_path)
    assert wrong(compare_processors(ours, ours)[0]) == []
    found, _ = compare_processors(ours, configured({**document, "do_normalize": False}, tmp_path))
    assert wrong(found) == ["audio: normalization"]
    found, _ = compare_processors(ours, configured({**document, "sampling_rate": 8000}, tmp_path))
    assert wrong(found) == ["audio: sampling rate"]


@pytest.mark.parametrize(
    ("document", "change", "cause"),
    [
        (
            {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 3136, "longest_edge": 12544}},
            {"image_mean": [0.5] * 3},
            "mean",
        ),
        (
            {"image_processor_type": "SiglipImageProcessor", "size": {"height": 28, "width": 28}},
            {"resample": 2},
            "resampling",
        ),
        (
            {"image_processor_type": "ViTImageProcessor", "size": {"height": 28, "width": 28}},
            {"do_rescale": False},
            "rescale",
        ),
        ({"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 28}}, {"crop_pct": 0.5}, "crop"),
    ],
)
def test_processors_of_other_models(
    document: dict[str, Any], change: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    ours = configured(document, tmp_path)
    assert wrong(compare_processors(ours, ours)[0]) == []
    found, _ = compare_processors(ours, configured({**document, **change}, tmp_path))
    assert wrong(found)[0] == f"image: {cause}", found


def test_a_processor_that_cannot_be_tried_is_a_note(tmp_path: Path) -> None:
    theirs = configured({"image_processor_type": "NoSuchProcessor"}, tmp_path)
    found, number = compare_processors(of_clip(), theirs)
    assert number == 0 and [(one.level, one.cause) for one in found] == [("note", "image: not compared")]


def test_a_directory_of_an_image_model_needs_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, change in (("ours", {}), ("same", {}), ("theirs", {"resample": 2})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "preprocessor_config.json").write_text(json.dumps({**CLIP, **change}))
    assert main(["check-prompt", str(tmp_path / "ours"), str(tmp_path / "same")]) == 0
    assert capsys.readouterr().out.startswith("ok: the same processors, as far as they were compared")
    assert main(["check-prompt", str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("NOT OK: processor: image: resampling") and "compared 8 images and sounds" in shown
