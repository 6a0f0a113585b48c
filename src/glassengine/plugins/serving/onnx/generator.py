"""The generation loop of onnxruntime-genai itself: what people run who are given its folder.

Its scores are taken as those of the decoder as deployed, so that what its own loop does with caches, masks and
positions is judged too, and not only the file.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from glassengine.errors import first_line
from glassengine.plugins.serving.onnx.decoder import OnnxDecoder
from glassengine.serving.protocol import ServingRun

OWN_LOOP = "the scores are of its own loop"
"""What a recording says of a loop that ran as it should."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Generated:
    """What the loop made.

    Attributes:
        logits: Of each step, [1, tokens, vocabulary]; of fewer than were asked for where it took another token.
        note: What it did otherwise, or why it did not run; "" for nothing.
    """

    logits: Sequence[Array]
    note: str = ""


def generated(decoder: OnnxDecoder, run: ServingRun) -> Generated | None:
    """Run the loop of onnxruntime-genai greedily; None for a file without a folder, or where it is not installed.

    Args:
        decoder: Of a folder with genai_config.json.
        run: With the tokens that are to follow.
    """
    if decoder.config is None or not decoder.place.is_dir():
        return None
    try:
        genai = importlib.import_module("onnxruntime_genai")
    except ImportError:
        return None
    logits: list[Array] = []
    try:
        return _steps(genai, decoder, run, logits)
    except Exception as error:  # whatever its C++ raises: it is said, and the file is judged
        reason = f"{type(error).__name__}: {first_line(error)}"
        return Generated(logits, f"onnxruntime-genai fails after {len(logits)} steps: {reason}")


def _steps(genai: Any, decoder: OnnxDecoder, run: ServingRun, logits: list[Array]) -> Generated:
    model = genai.Model(str(decoder.place))
    options = genai.GeneratorParams(model)
    options.set_search_options(do_sample=False, max_length=len(run.prompt) + run.steps + 1)
    generator = genai.Generator(model, options)
    generator.append_tokens(np.array([list(run.prompt)], np.int32))
    logits.append(np.array(generator.get_output(decoder.logits), np.float32))
    for step in range(run.steps):
        if generator.is_done():
            return Generated(logits, f"onnxruntime-genai ends after {step} tokens")
        generator.generate_next_token()
        picked = int(generator.get_next_tokens()[0])
        wanted = run.following[step] if run.following is not None and step < len(run.following) else picked
        if picked != wanted:
            note = f"onnxruntime-genai picks token {picked} in step {step}, the file by itself {wanted}"
            return Generated(logits, note)
        # Asked for its scores it runs the token that it has picked; until then a result is that of the step before.
        logits.append(np.array(generator.get_logits(), np.float32))
    return Generated(logits)
