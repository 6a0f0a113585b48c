"""Runs a model and writes down what each of its modules computed: `values-STEP.pt`, and `about.json`."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch

_PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "accelerate")
_RECORDED = re.compile(
    r"(TORCH|PYTORCH|OMP|MKL|KMP|GOMP|ATEN|DNNL|ONEDNN|CUDA|CUBLAS|NVIDIA|HF|TRANSFORMERS|TORCHINDUCTOR)_\w*"
)
_RENAMED_DTYPE = (4, 56)
"""Version of transformers in which `torch_dtype` became `dtype`."""


def main() -> int:
    """Run what standard input says: a model, its inputs, and a folder for the values."""
    warnings.simplefilter("ignore")
    request = json.load(sys.stdin)
    folder = Path(request["folder"])
    module = load(request)
    steps = torch.load(request["inputs"], weights_only=True)
    tokens = []
    with torch.no_grad():
        if request["decodes"]:
            tokens = decode(module, steps[0], int(request["steps"]), folder)
        else:
            for step, given in enumerate(steps):
                torch.save(observe(module, given)[0], str(folder / f"values-{step}.pt"))
    about = {"environment": environment(), "class": type(module).__name__, "tokens": tokens}
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")
    return 0


def refuse(what: str, got: str, expected: str, hint: str) -> NoReturn:
    """End, and say why; `plugins.serving.interpreter` makes an error of it."""
    sys.exit("Refused: " + json.dumps({"what": what, "got": got, "expected": expected, "hint": hint}))


def load(request: dict[str, Any]) -> torch.nn.Module:
    """Return the model: of a directory by transformers, or what a function makes, with the weights that are given."""
    target, dtype = request["target"], request["dtype"]
    where, _, name = target.rpartition(":")
    if request["weights"] is None:
        return of_transformers(target, getattr(torch, dtype), request["loading"])
    if where.endswith(".py"):
        sys.path.insert(0, str(Path(where).parent))
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = made
        spec.loader.exec_module(made)
    else:
        made = importlib.import_module(where)
    module: torch.nn.Module = getattr(made, name)()
    module.load_state_dict(torch.load(request["weights"], weights_only=True), strict=False)
    return module.eval()


def of_transformers(target: str, dtype: torch.dtype, loading: dict[str, Any]) -> torch.nn.Module:
    """Return the model of a directory, of the class that its configuration names."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        refuse("a checkpoint needs transformers", "none there", "transformers", "install it, or give file.py:factory")
    config = transformers.AutoConfig.from_pretrained(target, **loading)
    known = [getattr(transformers, name, None) for name in config.architectures or ()]
    kind = next((one for one in known if one is not None), transformers.AutoModelForCausalLM)
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    spelled = "dtype" if version >= _RENAMED_DTYPE else "torch_dtype"
    module: torch.nn.Module = kind.from_pretrained(target, **{spelled: dtype}, **loading)
    return module.eval()


def decode(module: torch.nn.Module, given: dict[str, Any], steps: int, folder: Path) -> list[list[int]]:
    """Write the prefill and the steps after it; return the tokens that were chosen, a row each."""
    ids, mask, cache = given["input_ids"], given["attention_mask"], None
    chosen = []
    for step in range(steps + 1):
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        taken = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        values, result = observe(module, {**taken, "use_cache": True})
        cache = result.past_key_values
        torch.save({**values, **kept(cache)}, str(folder / f"values-{step}.pt"))
        ids = result.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        chosen.append(ids)
    return torch.cat(chosen[:-1], 1).tolist() if steps else [[] for _ in ids]


def observe(module: torch.nn.Module, given: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
    """Return what every module gives in one call, by the names of a recording, and the result."""
    found, calls = {}, Counter()  # type: ignore[var-annotated]

    def hook(path: str) -> Any:
        def after(_: Any, __: Any, result: Any) -> None:
            name = f"{path}@{calls[path]}" if calls[path] else path
            calls[path] += 1
            for port, tensor in leaves("", result):
                site = f"{name}:out{port}" if port else name
                found[site] = tensor.detach().cpu().clone()

        return after

    with ExitStack() as hooks:
        for path, one in module.named_modules():
            hooks.enter_context(one.register_forward_hook(hook(path or ".")))
        return found, module(**given)


def leaves(port: str, tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (port, tensor) of every tensor; a cache is none."""
    if isinstance(tree, torch.Tensor):
        yield port, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(f"{port}.{key}", value)
    elif isinstance(tree, (list, tuple)):
        for at, value in enumerate(tree):
            yield from leaves(f"{port}[{at}]", value)


def kept(cache: Any) -> dict[str, torch.Tensor]:
    """Return what a cache of transformers keeps: layer by layer, named by number."""
    layers = getattr(cache, "layers", None)
    if layers is not None:
        pairs = [(getattr(one, "keys", None), getattr(one, "values", None)) for one in layers]
    elif hasattr(cache, "key_cache"):
        pairs = list(zip(cache.key_cache, cache.value_cache))  # noqa: B905  # Python 3.9
    else:
        pairs = [tuple(one[:2]) for one in cache] if isinstance(cache, tuple) else []
    states = {}
    for number, pair in enumerate(pairs):
        for name, tensor in zip(("key", "value"), pair):  # noqa: B905  # Python 3.9
            if isinstance(tensor, torch.Tensor):
                states[f"<{number}>:kv.{name}"] = tensor.detach().cpu().clone()
    return states


def environment() -> dict[str, Any]:
    """Return versions, processor settings and variables, as a recording keeps them."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        if name in sys.modules:
            versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    variables = {name: value for name, value in sorted(os.environ.items()) if _RECORDED.fullmatch(name)}
    variables = {name: value for name, value in variables.items() if not re.search("TOKEN|KEY|SECRET", name)}
    return {
        "versions": versions,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "variables": variables,
        "num_threads": torch.get_num_threads(),
        "cpu_capability": getattr(torch.backends.cpu, "get_cpu_capability", lambda: "unknown")(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
