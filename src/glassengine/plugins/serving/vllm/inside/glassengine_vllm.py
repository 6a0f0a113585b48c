"""A plug-in of vLLM that writes down what the modules of its model compute, forward by forward.

vLLM loads it in every one of its processes, by the entry point beside this file. Where GLASSENGINE_VLLM_RECORD names a
folder, each forward of the model is a file `rank{r}/forward-{n}.safetensors` there: what each module returned, what
each attention was given, the token ids and positions, and in the header which rows are of which request. A file is
there when it is whole, so that a server that is ended loses nothing but the forward it was in.

    PYTHONPATH=<this folder> GLASSENGINE_VLLM_RECORD=DIR vllm serve MODEL --enforce-eager

With `--compilation-config '{"mode": 2, "backend": "glassengine_vllm_graph.functional"}'` and VLLM_USE_AOT_COMPILE=0 in
its place, the graph that vLLM compiles is run, node by node: norms and activations are seen op by op.

GLASSENGINE_VLLM_MOST is the number of forwards that are kept; 256 by default.
"""

from __future__ import annotations

import importlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import torch
from torch import nn

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_MOST = 256
_LOGITS = ("lm_head", "logits_processor")
"""Modules of vLLM that it calls behind the forward; what they make is kept as `./logits`."""


class Recorder:
    """Writes the forwards of one model.

    Args:
        folder: Of this process.
        most: Forwards that are kept.

    Attributes:
        all_logits: Whether logits of all rows are computed and kept, where vLLM computes those of the last ones only.
        following: Prompt -> tokens that are taken in place of those that the sampler picks.
    """

    def __init__(self, folder: Path, most: int = _MOST) -> None:
        self.folder = folder
        self.most = most
        self.all_logits = False
        self.following: dict[tuple[int, ...], list[int]] = {}
        self._number = 0
        self._values: dict[str, torch.Tensor] | None = None
        self._requests: list[dict[str, Any]] = []
        self._now: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {}
        self._names: dict[int, list[str]] = {}
        self._calls: dict[str, int] = {}

    def attach(self, model: nn.Module, facts: dict[str, Any]) -> None:
        """Watch the modules of a model; facts are written into every file."""
        self._facts = facts
        if facts.get("graph"):
            graph = importlib.import_module("glassengine_vllm_graph")
            # vLLM compiles the first module that is wrapped for it.
            wrapped = (name for name, module in model.named_modules() if name and hasattr(module, "do_not_compile"))
            graph.root[0] = next(wrapped, "model")
            graph.watchers[:] = [self._named]
        if facts.get("compiled") or facts.get("graph"):
            return
        shared: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            if name and name not in _LOGITS:
                shared.setdefault(module, []).append(name)
        for module, names in shared.items():
            is_attention = hasattr(module, "layer_name") and hasattr(module, "impl")
            if is_attention or "norm" in type(module).__name__.lower():
                module.register_forward_pre_hook(self._given(names), with_kwargs=True)
            module.register_forward_hook(self._returned(names))

    def _named(self, name: str, value: torch.Tensor) -> None:
        if self._values is not None and value.dtype in _CODES:
            self._values[name] = value.detach().clone()

    def _given(self, names: list[str]) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for number, value in enumerate([*args, *kwargs.values()]):
                self._keep(names, f"in.{number}", value)

        return hook

    def _returned(self, names: list[str]) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            for number, value in enumerate(output if isinstance(output, (tuple, list)) else [output]):
                self._keep(names, f"out.{number}", value)

        return hook

    def _keep(self, names: list[str], port: str, value: Any) -> None:
        if self._values is None or not isinstance(value, torch.Tensor) or value.dtype not in _CODES:
            return
        first = f"{names[0]}/{port}"
        count = self._calls.get(first, 0)
        self._calls[first] = count + 1
        # A module that layers share has a name in each, and is called once for each.
        name = f"{names[count]}/{port}" if count < len(names) else f"{first}@{count}"
        self._values[name] = value.detach().clone()

    def restart(self, folder: Path) -> None:
        """Write what follows into another folder, from its first forward on."""
        self.folder, self._number = folder, 0

    def begin(self, requests: list[dict[str, Any]]) -> None:
        """Begin a forward: which rows are of which request, in order."""
        self._now = requests
        if self._number >= self.most:
            return
        self._values, self._requests, self._calls = {}, requests, {}

    def keep(self, name: str, value: torch.Tensor | None) -> None:
        """Keep one tensor of the forward."""
        if value is not None:
            self._keep(["."], name, value)

    def end(self) -> None:
        """Write the forward down."""
        values, self._values = self._values, None
        if values is None or not self._requests:
            return
        header: dict[str, Any] = {
            "__metadata__": {"forward": json.dumps({"requests": self._requests}), "facts": json.dumps(self._facts)}
        }
        at, parts = 0, []
        for name, value in values.items():
            data = value.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            header[name] = {
                "dtype": _CODES[value.dtype],
                "shape": list(value.shape),
                "data_offsets": [at, at + len(data)],
            }
            at += len(data)
            parts.append(data)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"forward-{self._number:06d}.safetensors"
        with path.with_suffix(".part").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for data in parts:
                file.write(data)
        path.with_suffix(".part").rename(path)
        self._number += 1

    def forced(self, sampled: torch.Tensor) -> None:
        """Write the tokens that are to follow over those that were sampled, [requests, 1]."""
        for row, one in enumerate(self._now[: sampled.shape[0]]):
            tokens = self.following.get(tuple(one["prompt"]))
            at = one["start"] + one["length"] - len(one["prompt"])
            if tokens is not None and 0 <= at < len(tokens):
                sampled[row, 0] = tokens[at]


def requests_of(runner: Any) -> list[dict[str, Any]]:
    """Return which rows of a forward are of which request: name, prompt, first position, number of tokens."""
    batch = runner.input_batch
    num = len(batch.req_ids)
    starts = batch.num_computed_tokens_cpu[:num].tolist()
    ends = runner.query_start_loc.np[: num + 1].tolist()
    found = []
    for row, name in enumerate(batch.req_ids):
        prompt = runner.requests[name].prompt_token_ids or []
        found.append(
            {
                "name": str(name),
                "prompt": [int(token) for token in prompt],
                "start": int(starts[row]),
                "length": int(ends[row + 1] - ends[row]),
            }
        )
    return found


_recorders: dict[int, Recorder] = {}


def recorder_of(runner: Any) -> Recorder:
    """Return what records a model runner's model."""
    found = _recorders.get(id(runner))
    if found is None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        folder = Path(os.environ["GLASSENGINE_VLLM_RECORD"]) / f"rank{rank}"
        found = _recorders[id(runner)] = Recorder(folder, int(os.environ.get("GLASSENGINE_VLLM_MOST") or _MOST))
        config = runner.vllm_config
        is_graph = str(config.compilation_config.backend).startswith("glassengine_vllm_graph")
        facts = {
            "architecture": str((config.model_config.hf_config.architectures or ["?"])[0]),
            "model": str(config.model_config.model),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "compiled": int(config.compilation_config.mode or 0) != 0 and not is_graph,
            "graph": is_graph,
            "world": int(config.parallel_config.world_size),
            "tensor_parallel": int(config.parallel_config.tensor_parallel_size),
            "block_size": int(config.cache_config.block_size or 0),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
            "version": str(importlib.import_module("vllm").__version__),
        }
        found.attach(runner.model, facts)
    return found


def register() -> None:
    """Wrap the calls of the model in vLLM's model runner; called by vLLM in each of its processes."""
    if not os.environ.get("GLASSENGINE_VLLM_RECORD"):
        return
    runner_class: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner

    if getattr(runner_class, "_glassengine", False):
        return
    runner_class._glassengine = True
    forward, execute, sample = runner_class._model_forward, runner_class.execute_model, runner_class._sample

    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = recorder_of(self)
        recorder.begin(requests_of(self))
        recorder.keep("in.input_ids", kwargs.get("input_ids"))
        recorder.keep("in.positions", kwargs.get("positions"))
        hidden = forward(self, *args, **kwargs)
        if isinstance(hidden, torch.Tensor):
            recorder.keep("out.0", hidden)
            if recorder.all_logits:
                recorder.keep("all_logits.0", self.model.compute_logits(hidden))
        return hidden

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return execute(self, *args, **kwargs)
        finally:
            found = _recorders.get(id(self))
            if found is not None:
                state = self.execute_model_state
                found.keep("logits.0", state.logits if state is not None else None)
                found.end()

    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        found = _recorders.get(id(self))
        if found is not None and found.following:
            found.forced(output.sampled_token_ids)
        return output

    runner_class._model_forward, runner_class.execute_model = _model_forward, execute_model
    runner_class._sample = _sample
