"""Rollouts of llama.cpp's server: its cache in float16 is rounding, and its processors are found with their order."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import glassengine as glass
from tests.rollouts.planted import TINY, prompts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    xllamacpp = pytest.importorskip("xllamacpp")
    engine = tmp_path_factory.mktemp("llama.cpp") / "engine"
    glass.build(str(TINY), engine, backend="gguf")
    options = xllamacpp.CommonParams()
    options.model.path = str(next(engine.rglob("*.gguf")))
    options.n_ctx, options.n_parallel, options.warmup, options.cpuparams.n_threads = 512, 1, False, 1
    return xllamacpp.Server(options)


def _rollout(server: Any, path: Path, **sampling: Any) -> Any:
    """Write what the server answers; where processed probabilities are asked for, their logarithms."""
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "cache_prompt": False}
    answers = []
    for seed, prompt in enumerate(prompts(6)):
        asked = {"prompt": prompt, "max_tokens": 24, "logprobs": 1, "seed": seed, **neutral, **sampling}
        answer = server.handle_completions(asked)
        for choice in answer["choices"]:
            choice["prompt_token_ids"] = prompt
            for token in choice["logprobs"]["content"]:
                token.setdefault("logprob", math.log(token["prob"]) if "prob" in token else None)
        answers.append(answer)
    path.write_text(json.dumps(answers))
    found = glass.check_rollout(str(TINY), path).rollout
    assert found is not None
    return found


def test_raw_values_differ_by_rounding(server: Any, tmp_path: Path) -> None:
    found = _rollout(server, tmp_path / "a.json", temperature=0.7, top_p=0.9)
    assert found.found == "rounding" and found.rest_is.startswith("rounding in float16 of keys and values")


@pytest.mark.parametrize(
    ("sampling", "causes"),
    [
        ({"temperature": 0.7}, {"temperature": "0.7"}),
        ({"repeat_penalty": 1.2}, {"repetition": "1.2"}),
        ({"temperature": 0.7, "top_p": 0.9}, {"temperature": "0.7", "top_p": "0.9"}),
    ],
)
def test_processed_values(server: Any, tmp_path: Path, sampling: dict[str, Any], causes: dict[str, str]) -> None:
    found = _rollout(server, tmp_path / "a.json", post_sampling_probs=True, **sampling)
    assert {one.setting: one.value for one in found.causes} == causes
    assert len(causes) == 1 or any("after tokens are left out" in one.text for one in found.causes)
