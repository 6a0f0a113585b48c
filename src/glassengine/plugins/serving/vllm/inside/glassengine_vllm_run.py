"""Runs vLLM without a server on prompts that are given as token ids; started by this package in vLLM's interpreter.

Reads a request from standard input: {"model", "folder", "dtype", "steps", "prompts", "following", "runs", "options",
"graph"}; with "graph" the model is run node by node of the graph that vLLM compiles.
Each of "runs" is "alone", one prompt after the other with nothing shared between them, or "together", all of them at
once, behind requests of their first halves, so that what those left in the prefix cache is used, and with so few tokens
in a forward that prompts are taken in chunks, as a busy server takes them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_USE_AOT_COMPILE": "0",
    "HF_HUB_OFFLINE": "1",
}


def main() -> int:
    """Run what standard input says."""
    request = json.load(sys.stdin)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["GLASSENGINE_VLLM_RECORD"] = request["folder"]
    llm = importlib.import_module("vllm.entrypoints.llm").LLM(request["model"], **options_of(request))
    run(llm, request)
    return 0


def options_of(request: dict[str, Any]) -> dict[str, Any]:
    """Return how vLLM is started: called module by module, with room for the prompts."""
    compilation = {"mode": 2, "backend": "glassengine_vllm_graph.functional"}
    called = (
        {"enforce_eager": False, "compilation_config": compilation} if request.get("graph") else {"enforce_eager": True}
    )
    return {
        "dtype": request["dtype"],
        "max_model_len": max(map(len, request["prompts"])) + request["steps"] + 1,
        "max_num_seqs": max(4, len(request["prompts"])),
        "seed": 0,
        **called,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        **request["options"],
    }


def run(llm: Any, request: dict[str, Any]) -> None:
    """Make each of the runs with a model that is loaded."""
    plugin = importlib.import_module("glassengine_vllm")
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    recorder = plugin.recorder_of(runner)
    prompts: list[list[int]] = request["prompts"]
    given = request["following"]
    if given is not None:
        recorder.following = {tuple(prompt): tokens for prompt, tokens in zip(prompts, given, strict=True)}
    for kind in request["runs"]:
        recorder.restart(Path(request["folder"]) / kind / "rank0")
        recorder.all_logits = True
        llm.reset_prefix_cache()
        if kind == "alone":
            made = []
            for prompt in prompts:
                made += _generate(llm, [prompt], request["steps"] + 1)
                llm.reset_prefix_cache()
            if given is None:
                recorder.following = {tuple(p): tokens for p, tokens in zip(prompts, made, strict=True)}
            continue
        _chunked(llm, max(len(prompts) + 1, max(map(len, prompts)) // 2 + 1))
        block = int(runner.vllm_config.cache_config.block_size)
        halves = [prompt[: len(prompt) // 2 + 1] for prompt in prompts if len(prompt) // 2 >= block]
        if halves:
            _generate(llm, halves, 1)
        _generate(llm, prompts, request["steps"] + 1)


def _chunked(llm: Any, tokens: int) -> None:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    scheduler.max_num_scheduled_tokens = min(scheduler.max_num_scheduled_tokens, tokens)


def _generate(llm: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    how = importlib.import_module("vllm").SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
    )
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


if __name__ == "__main__":
    sys.exit(main())
