"""Makes rollouts with vLLM on a processor, run by its interpreter: rollout.py MODEL FOLDER < prompts as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from glassengine.plugins.serving.vllm.inside.glassengine_vllm_run import ENVIRONMENT

os.environ.update(ENVIRONMENT)

# name -> dtype, mode of log-probabilities, sampling; the prompts of the file have a token less with "cut"
RUNS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "float32": ("float32", "raw_logprobs", {}),
    "raw": ("float32", "raw_logprobs", {"temperature": 0.7, "top_p": 0.9}),
    "prompt": ("float32", "raw_logprobs", {"prompt_logprobs": 0}),
    "cut": ("float32", "raw_logprobs", {}),
    "temperature": ("float32", "processed_logprobs", {"temperature": 0.7}),
    "top_p": ("float32", "processed_logprobs", {"temperature": 0.8, "top_p": 0.9}),
    "penalty": ("float32", "processed_logprobs", {"repetition_penalty": 1.15, "top_k": 20}),
    "bfloat16": ("bfloat16", "raw_logprobs", {}),
    "hot": ("bfloat16", "processed_logprobs", {"temperature": 1.3}),
}


def main(model: str, folder: str) -> None:
    """Write a file for each run."""
    import vllm

    prompts = json.load(sys.stdin)
    for dtype, mode in dict.fromkeys((dtype, mode) for dtype, mode, _ in RUNS.values()):
        llm = vllm.LLM(
            model,
            dtype=dtype,
            logprobs_mode=mode,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=128,
            seed=0,
        )
        for name, (own, its, sampling) in RUNS.items():
            if (own, its) == (dtype, mode):
                how = vllm.SamplingParams(
                    max_tokens=20, logprobs=0, detokenize=False, **{"temperature": 1.0, "seed": 3, **sampling}
                )
                made = llm.generate([{"prompt_token_ids": one} for one in prompts], how, use_tqdm=False)
                (Path(folder) / f"{name}.json").write_text(json.dumps([_plain(one, name == "cut") for one in made]))
        del llm


def _plain(made: Any, is_cut: bool) -> dict[str, Any]:
    prompt = list(made.prompt_token_ids)
    outputs = [
        {"token_ids": list(one.token_ids), "logprobs": [_values(found) for found in one.logprobs]}
        for one in made.outputs
    ]
    found = {"prompt_token_ids": prompt[:1] + prompt[2:] if is_cut else prompt, "outputs": outputs}
    if made.prompt_logprobs is not None:
        found = {
            "prompt_token_ids": prompt,
            "prompt_logprobs": [one and _values(one) for one in made.prompt_logprobs],
        }
    return found


def _values(found: Any) -> dict[str, Any]:
    return {str(token): {"logprob": one.logprob} for token, one in found.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
