"""Finds out what image and audio processors do by trying them, and names the difference of two.

A processor is a function of an image or of samples. Constant images show its affine map, ramps its geometry, noise its
kernel; sines, silence and clicks show a spectrogram. Nothing of its code or configuration is believed.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from glassengine.prompt.side import Processed, PromptSide
from glassengine.results.without_tensors import PromptFinding

Image = Callable[[Any], Any]
"""Of an image of PIL, to an array or to what transformers returns."""
Sound = Callable[[Any, int], Any]
"""Of samples and their rate, to the same."""
_SIZE = (97, 61)
_WHITE = 200
_LEVELS = 2.0
"""Levels of 255, root mean square, by which right kernels of two libraries may differ on noise."""
_NEAR = 0.01
"""Of the spread of a spectrogram, by which right code in another precision may differ."""
_TONES = (250, 500, 1000, 2000, 4000, 7000)


def processed(image: Image | None, sound: Sound | None, rate: int = 16000) -> dict[str, Processed | str]:
    """Return what the processors of a side do, by "image" and "audio"; a text says why one cannot be tried.

    Args:
        image: Of images, if there is one.
        sound: Of sounds.
        rate: Samples per second that `sound` takes.
    """
    tried: dict[str, Callable[[], Processed]] = {}
    if image is not None:
        tried["image"] = lambda: _of_images(lambda picture: _picture(image(picture)))
    if sound is not None:
        tried["audio"] = lambda: _of_sounds(lambda samples, given: _array(sound(samples, given)), rate)
    return {name: _or_reason(function) for name, function in tried.items()}


def of_directory(path: Path, keys: Collection[str]) -> dict[str, Processed | str]:
    """Return what the processors of transformers in a directory do; `keys` are those of their configurations."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    is_sound = "feature_extractor" in keys or "feature_extractor_type" in keys
    is_image = "image_processor" in keys or not is_sound
    autos = {"image": AutoImageProcessor} if is_image else {}
    autos |= {"audio": AutoFeatureExtractor} if is_sound else {}
    options = {"local_files_only": True, "trust_remote_code": False}
    made = {name: _or_reason(partial(auto.from_pretrained, path, **options)) for name, auto in autos.items()}
    refused = {name: one for name, one in made.items() if isinstance(one, str)}
    image, sound = (None if name in refused else made.get(name) for name in ("image", "audio"))
    return refused | processed(
        image and (lambda picture: _unfolded(image, image(picture, return_tensors="np"))),
        sound and (lambda samples, rate: sound(samples, sampling_rate=rate, return_tensors="np")),
        getattr(sound, "sampling_rate", 16000),
    )


def _unfolded(processor: Any, facts: Mapping[str, Any]) -> Any:
    """Return the image of which Qwen2-VL and its relatives make rows of patches."""
    if "image_grid_thw" not in facts:
        return facts
    _, height, width = (int(one) for one in np.asarray(facts["image_grid_thw"])[0])
    m, p = int(processor.merge_size), int(processor.patch_size)
    rows = np.asarray(facts["pixel_values"]).reshape(height // m, width // m, m, m, 3, -1, p, p)[..., 0, :, :]
    return rows.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, height * p, width * p)


def _array(found: Any) -> Any:
    """Return the values of one image or sound, without the axes of a batch."""
    if isinstance(found, Mapping):
        names = ("pixel_values", "input_features", "input_values")
        found = next((found[name] for name in names if name in found), None)
        if found is None:
            raise ValueError(f"no {', '.join(names)} in what the processor returns")
    values = np.asarray(found, np.float64)
    while values.ndim > 1 and values.shape[0] == 1:
        values = values[0]
    return values


def _picture(found: Any) -> Any:
    """Return the values of one image, channels first."""
    values = _array(found)
    while values.ndim > 3:  # tiles of one image, of which the first is the whole
        values = values[0]
    if values.ndim == 2:
        values = values[None]
    return values.transpose(2, 0, 1) if values.shape[0] > 4 and values.shape[-1] <= 4 else values


def _or_reason(function: Callable[[], Any]) -> Any:
    """Return the result of a function, or why it has none."""
    try:
        return function()
    except Exception as error:  # of a processor, which is any code
        return f"{type(error).__name__}: {error}"


# Images


def _of_images(function: Image) -> Processed:
    from PIL import Image as pil

    def flat(*color: int) -> Any:
        return function(pil.new("RGB", _SIZE, color))

    black, white = flat(0, 0, 0), flat(_WHITE, _WHITE, _WHITE)
    channels, height, width = black.shape
    facts: dict[str, Any] = {"shape": black.shape}
    at = (slice(None), height // 2, width // 2)
    # What each of red, green and blue does to each channel.
    primaries = [tuple(_WHITE * (one == color) for one in range(3)) for color in range(3)]
    response = np.stack([flat(*primary)[at] for primary in primaries]) - black[at]
    order = [int(one) for one in np.abs(response).argmax(0)]
    facts["channels"] = "".join("RGB"[one] for one in order)
    slope, offset = response.sum(0) / _WHITE, black[at]
    if not np.all(np.abs(slope) > 1e-9):  # normalized by each image's own values
        return Processed(facts, _samples(function), 0.01)
    colors = np.argsort(order, kind="stable") if len({*order}) == channels else np.arange(channels)
    facts["slope"], facts["offset"] = tuple(slope[colors].tolist()), tuple(offset[colors].tolist())
    shown = np.abs((white - black) / slope[:, None, None] - _WHITE).max(0) < 1
    rows, columns = np.flatnonzero(shown.any(1)), np.flatnonzero(shown.any(0))
    top, left = int(rows[0]), int(columns[0])
    inner = (slice(None), slice(top, int(rows[-1]) + 1), slice(left, int(columns[-1]) + 1))
    facts["padding"] = (top, left, height - 1 - int(rows[-1]), width - 1 - int(columns[-1]))

    def levels(picture: Any) -> Any:
        return ((function(picture) - offset[:, None, None]) / slope[:, None, None])[inner]

    ramps = np.zeros((*_SIZE[::-1], 3), np.uint8)
    ramps[..., 0], ramps[..., 1] = np.linspace(20, 235, _SIZE[0])[None], np.linspace(20, 235, _SIZE[1])[:, None]
    if {0, 1} <= {*order}:
        seen = levels(pil.fromarray(ramps))
        lines = seen[order.index(0)].mean(0), seen[order.index(1)].mean(1)
        windows = [_window(line, size) for line, size in zip(lines, _SIZE, strict=True)]
        facts["source"], facts["first"] = (tuple(one[place] for one in windows) for place in range(2))
        noise = pil.fromarray(np.random.default_rng(0).integers(0, 256, (*_SIZE[::-1], 3), dtype=np.uint8))
        facts["kernel"] = _kernel(noise, levels(noise), order, windows)
    return Processed(facts, _samples(function), _LEVELS * float(np.abs(slope).max()))


def _window(line: Any, size: int) -> tuple[float, float]:
    """Return source pixels per pixel, and the first of them, from a ramp over `size` pixels."""
    number = len(line)
    low, high = number // 4, max(number * 3 // 4, number // 4 + 1)
    if high >= number:
        return float(size), 0.0
    places = (line - 20) / 215 * (size - 1) + 0.5
    scale = float(places[high] - places[low]) / (high - low)
    return scale, float(places[low]) - (low + 0.5) * scale


def _kernel(noise: Any, seen: Any, order: list[int], windows: list[tuple[float, float]]) -> str:
    """Return the name of the resampling that makes the pixels that are seen."""
    import torch
    from PIL import Image as pil

    height, width = seen.shape[1:]
    plain = torch.from_numpy(np.asarray(noise, np.float32).transpose(2, 0, 1).copy())[None]
    best, name = _LEVELS, "unknown"
    (sx, ox), (sy, oy) = windows
    if min(sx, sy) <= 0.01:
        return name
    for w, h in itertools.product(_near(_SIZE[0] / sx, 1), _near(_SIZE[1] / sy, 1)):
        whole = {
            kernel: np.asarray(noise.resize((w, h), getattr(pil.Resampling, kernel.upper())), float)
            for kernel in ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
        }
        for kernel in ("bilinear", "bicubic"):
            resized = torch.nn.functional.interpolate(plain, size=(h, w), mode=kernel, align_corners=False)
            whole[f"{kernel} without antialias"] = resized[0].permute(1, 2, 0).clamp(0, 255).numpy()
        for (kernel, values), y, x in itertools.product(whole.items(), _near(oy / sy), _near(ox / sx)):
            part = values[y : y + height, x : x + width].transpose(2, 0, 1)[order]
            if part.shape == seen.shape and (error := _distance(part, seen)) < best:
                best, name = error, kernel
    return name


def _near(value: float, least: int = 0) -> set[int]:
    return {max(least, round(value) + step) for step in (-1, 0, 1)}


def _samples(function: Image) -> dict[str, Any]:
    from PIL import Image as pil

    draw = np.random.default_rng(1)
    noise = pil.fromarray(draw.integers(0, 256, (37, 53, 3), dtype=np.uint8))
    deep = pil.fromarray((draw.integers(0, 1 << 16, (37, 53))).astype(np.uint16))
    turned = io.BytesIO()
    exif = pil.Exif()
    exif[0x0112] = 6  # Orientation
    noise.save(turned, "png", exif=exif)
    clear = noise.convert("RGBA")
    clear.putalpha(pil.linear_gradient("L").resize(clear.size))
    pictures = {
        "small": noise,
        "tall": noise.resize((31, 203)),
        "wide": noise.resize((301, 47)),
        "grayscale": noise.convert("L"),
        "alpha": clear,
        "palette": noise.convert("P"),
        "16 bit": deep,
        "EXIF rotation": pil.open(turned),
    }
    return {name: _or_reason(partial(function, picture)) for name, picture in pictures.items()}


def _image_causes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if a["channels"] != b["channels"]:
        yield "channel order", f"{a['channels']} in the baseline, {b['channels']} in the candidate"
    yield from _affine_causes(a, b)
    if a["shape"] != b["shape"]:
        yield "size", f"an image of {_SIZE} becomes {a['shape']} in the baseline, {b['shape']} in the candidate"
    elif a.get("padding") != b.get("padding"):
        yield "padding", f"{a.get('padding')} (top, left, bottom, right) and {b.get('padding')} pixels"
    elif "source" in a and "source" in b:
        same_scale = np.allclose(a["source"], b["source"], rtol=0.03)
        words = f"a pixel is {_numbers(a['source'])} of the image in the baseline, {_numbers(b['source'])}"
        if not same_scale:
            squashed = [abs(one["source"][0] / one["source"][1] - 1) > 0.05 for one in (a, b)]
            yield ("aspect ratio" if squashed[0] != squashed[1] else "crop"), f"{words} in the candidate"
        elif not np.allclose(a["first"], b["first"], atol=0.6 * max(*a["source"], 1.0)):
            yield "crop", f"begins at {_numbers(a['first'])} in the baseline, {_numbers(b['first'])} in the candidate"
        elif a["kernel"] != b["kernel"]:
            yield "resampling", f"{a['kernel']} in the baseline, {b['kernel']} in the candidate"


def _affine_causes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "slope" not in a or "slope" not in b or len(a["slope"]) != len(b["slope"]):
        return
    (s, v), (t, w) = ((np.array(one["slope"]), np.array(one["offset"])) for one in (a, b))
    if np.allclose(s, t, rtol=2e-3) and np.allclose(v, w, atol=4e-3 * np.abs(255 * s).max()):
        return
    ratio = t / s
    plain = [np.allclose(y, 0, atol=1e-6) and np.ptp(x) < 1e-3 * abs(x[0]) for x, y in ((s, v), (t, w))]
    # Another standard deviation would move a mean as well.
    is_scale = np.any(np.abs(v) > 0.1) or abs(np.log2(abs(ratio[0]))) > 6
    if np.ptp(ratio) < 2e-3 * abs(ratio[0]) and is_scale and np.allclose(v, w, atol=2e-3):
        yield "rescale", f"values are {ratio[0]:.4g} times as large in the candidate"
    elif plain[0] != plain[1]:
        where = "candidate" if plain[1] else "baseline"
        yield "normalization", f"the {where} subtracts no mean and divides by no standard deviation"
    else:
        means, stds = [-y / (255 * x) for x, y in ((s, v), (t, w))], [1 / (255 * x) for x in (s, t)]
        if not np.allclose(means[0], means[1], atol=4e-3):
            yield "mean", f"{_numbers(means[0])} in the baseline, {_numbers(means[1])} in the candidate"
        if not np.allclose(stds[0], stds[1], rtol=2e-3):
            yield "std", f"{_numbers(stds[0])} in the baseline, {_numbers(stds[1])} in the candidate"


# Sounds


def _of_sounds(function: Sound, rate: int) -> Processed:
    time = np.arange(rate) / rate

    def given(samples: Any) -> Any:
        return function(np.asarray(samples, np.float32), rate)

    def sine(hertz: float, loud: float = 0.5) -> Any:
        return given(loud * np.sin(2 * np.pi * hertz * time))

    noise = 0.1 * np.random.default_rng(1).standard_normal(rate)
    loud = sine(1000)
    facts: dict[str, Any] = {"rate": rate, "shape": loud.shape}
    tall = given(noise)
    if loud.ndim == 2:
        low, high = sine(500), sine(4000)
        # Another tone is in another bin, and in the same frames.
        turns = abs(int(low.mean(0).argmax()) - int(high.mean(0).argmax())) > abs(
            int(low.mean(1).argmax()) - int(high.mean(1).argmax())
        )
        facts["layout"] = "frames first" if turns else "bins first"
        _spectrum(facts, lambda samples: given(samples).T if turns else given(samples), sine, turns, rate)
    else:
        facts["of half amplitude"] = float(np.std(loud) / max(np.std(sine(1000, 0.25)), 1e-12))
        facts["mean"] = float(given(noise + 0.3).mean())
    return Processed(facts, _sounds(function, rate, noise), _NEAR * float(np.std(tall)))


def _spectrum(
    facts: dict[str, Any], given: Callable[[Any], Any], sine: Callable[..., Any], turns: bool, rate: int
) -> None:
    def tone(hertz: float, loud: float = 0.5) -> Any:
        found = sine(hertz, loud)
        return (found.T if turns else found)[:, 10:30].mean(1)

    tones = {hertz: tone(hertz) for hertz in _TONES}
    facts["bins"] = len(tones[1000])
    facts["peaks"] = tuple(int(one.argmax()) for one in tones.values())
    peak = facts["peaks"][2]
    facts["of half amplitude"] = float(tones[1000][peak] - tone(1000, 0.25)[peak])
    silence = given(np.zeros(rate))
    facts["silence"] = float(silence[:, 10].mean())
    places = []
    for place in (rate // 4, rate * 3 // 4):
        click = np.zeros(rate)
        click[place] = 1
        energy = given(click).sum(0)
        places.append(float(np.flatnonzero(energy > energy.min() + 0.5 * np.ptp(energy)).mean()))
    facts["hop"] = round(rate / 2 / max(places[1] - places[0], 1e-3))
    facts["first"] = places[0]
    noise = given(np.random.default_rng(2).standard_normal(rate) * 0.1)[:, 5:60].mean(1)
    step = abs(facts["of half amplitude"]) or 1.0
    facts["tilt"] = float(np.polyfit(np.linspace(0, 1, len(noise)), noise, 1)[0] / step)
    # Side lobes of a strong tone, in steps of half the amplitude: the window, and the length of the transform.
    lobes = tone(2020)
    peak = int(lobes.argmax())
    facts["side lobes"] = tuple(float(lobes[peak] - lobes[peak - far]) / step for far in (2, 4, 8))


def _sounds(function: Sound, rate: int, noise: Any) -> dict[str, Any]:
    samples = {
        "noise": (noise, rate),
        "short": (noise[: rate // 20], rate),
        "silence": (np.zeros(rate), rate),
        "stereo": (np.stack([noise, noise[::-1]]), rate),
        "8000 Hz": (noise[:8000], 8000),
        "two seconds": (np.concatenate([noise, noise[::-1]]), rate),
    }
    return {
        name: _or_reason(partial(function, one.astype(np.float32), given)) for name, (one, given) in samples.items()
    }


def _sound_causes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    def sides(name: str) -> str:
        return f"{_numbers(a[name])} in the baseline, {_numbers(b[name])} in the candidate"

    for name in ("rate", "layout"):
        if a.get(name) != b.get(name):
            yield {"rate": "sampling rate"}.get(name, name), f"{a.get(name)} and {b.get(name)}"
            return
    if "peaks" not in a:
        if not np.isclose(a["of half amplitude"], b["of half amplitude"], rtol=0.1):
            yield "normalization", f"twice the amplitude gives {sides('of half amplitude')} times the values"
        return
    if a["bins"] != b["bins"]:
        yield "mel bins", sides("bins")
        return
    if abs(a["hop"] - b["hop"]) > 0.02 * a["hop"]:
        yield "hop", f"{sides('hop')} samples"
    elif abs(a["first"] - b["first"]) > 0.4 or a["shape"] != b["shape"]:
        yield "padding", f"{a['shape']} and {b['shape']} values; a click is in frame {sides('first')}"
    scaled = list(_scale_causes(a, b, sides))
    yield from scaled
    lobes = abs(a["side lobes"][2] - b["side lobes"][2])
    if a["peaks"] != b["peaks"]:
        scales = _mel_scale(a), _mel_scale(b)
        if scales[0] != scales[1]:
            yield "mel scale", f"{scales[0]} in the baseline, {scales[1]} in the candidate"
        else:
            cause = "frequency range" if lobes < 0.4 else "FFT length" if lobes < 3 else "window"
            yield cause, f"tones of {_TONES} Hz are in other bins: {sides('peaks')}"
        return
    tilt = abs(a["tilt"] - b["tilt"])
    if tilt > 0.3:
        yield ("preemphasis" if tilt > 3 else "filter norm"), "white noise rises or falls otherwise over the bins"
    elif lobes > 0.2 and not scaled:
        yield "window", f"side lobes of a tone are {sides('side lobes')} halvings lower"


def _scale_causes(a: Mapping[str, Any], b: Mapping[str, Any], sides: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    name = "of half amplitude"
    if not np.isclose(a[name], b[name], rtol=0.02):
        ratio = max(a[name] / b[name], b[name] / a[name])
        # Decibel and natural logarithm against that to the base of ten, without and with Whisper's division by 4.
        cause = next((words for one, words in _RATIOS.items() if np.isclose(ratio, one, rtol=0.02)), "scaling")
        yield cause, f"twice the amplitude adds {sides(name)}"
    elif not np.isclose(a["silence"], b["silence"], rtol=0.02, atol=0.02):
        yield "log floor", f"silence is {sides('silence')}"


_RATIOS = {2.0: "power", 2.3026: "log", 9.21: "log", 10.0: "log", 40.0: "log", 4.343: "log"}
"""Ratio of two steps of loudness -> what makes it."""


def _mel_scale(facts: Mapping[str, Any]) -> str:
    """Return the scale whose filters would have tones in the bins in which they are."""
    from transformers.audio_utils import hertz_to_mel

    def distance(scale: str) -> float:
        low, high, *tones = (hertz_to_mel(float(one), mel_scale=scale) for one in (0, facts["rate"] / 2, *_TONES))
        places = [(tone - low) / (high - low) * (facts["bins"] + 1) - 1 for tone in tones]
        return _distance(places, np.array(facts["peaks"]))

    return min(("slaney", "htk"), key=distance)


def compare_processors(baseline: PromptSide, candidate: PromptSide) -> tuple[list[PromptFinding], int]:
    """Return the differences of the processors that both sides have, and the number of samples that were compared."""
    ours, theirs = baseline.process(), candidate.process()
    found, number = [], 0
    for kind, causes in (("image", _image_causes), ("audio", _sound_causes)):
        a, b = ours.get(kind), theirs.get(kind)
        if a is None and b is None:
            continue
        for name, one in (("baseline", a), ("candidate", b)):
            if not isinstance(one, Processed):
                reason = one or "it has none"
                detail = f"the {kind} processor of the {name} is not compared: {reason}"
                found.append(PromptFinding("processor", f"{kind}: not compared", "note", detail))
        if not (isinstance(a, Processed) and isinstance(b, Processed)):
            continue
        number += len(a.outputs)
        others = [name for name, x in a.outputs.items() if not _alike(x, b.outputs[name], max(a.near, b.near))]
        named = list(causes(a.facts, b.facts))
        if others and not named:
            is_plain = bool({*others} & _PLAIN)
            named = [("values" if is_plain else f"input ({', '.join(others)})", _words(a, b, others[0]))]
        for cause, words in named:
            of = len(a.outputs)
            found.append(PromptFinding("processor", f"{kind}: {cause}", "wrong", words, len(others), of))
    return found, number


_PLAIN = {"small", "tall", "wide", "noise", "two seconds"}
"""Samples that any processor takes."""


def _alike(x: Any, y: Any, near: float) -> bool:
    if isinstance(x, str) or isinstance(y, str):
        return isinstance(x, str) and isinstance(y, str)  # each in words of its own
    return x.shape == y.shape and not _distance(x, y) > near


def _words(a: Processed, b: Processed, name: str) -> str:
    x, y = a.outputs[name], b.outputs[name]
    if isinstance(x, str) or isinstance(y, str):
        side, reason = ("baseline", x) if isinstance(x, str) else ("candidate", y)
        return f"the {side} refuses this: {reason[:200]}"
    if x.shape != y.shape:
        return f"{x.shape} values in the baseline, {y.shape} in the candidate"
    return f"values are {_distance(x, y):.3g} apart (root mean square)"


def _numbers(values: Any) -> str:
    if not np.shape(values):
        return values if isinstance(values, str) else f"{values:.4g}"
    return "(" + ", ".join(f"{one:.4g}" for one in np.asarray(values).tolist()) + ")"


def _distance(a: Any, b: Any) -> float:
    return float(np.sqrt(np.mean((np.asarray(a) - b) ** 2)))
