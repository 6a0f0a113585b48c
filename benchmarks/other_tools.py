"""Other tools that compare tensors or record models, those that are installed: for figures beside ours in one run.

torch.testing and numpy say whether two tensors are close; polygraphy has statistics of the difference as well. The
debugger of transformers, msprobe and torchlens record what the modules of a forward are given and return.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import logging
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

Run = Callable[[], Any]


def comparing(b: torch.Tensor, c: torch.Tensor, rtol: float, atol: float) -> dict[str, Run]:
    """Return name -> what compares two tensors."""

    def by_torch() -> None:
        with contextlib.suppress(AssertionError):
            torch.testing.assert_close(b, c, rtol=rtol, atol=atol)

    found: dict[str, Run] = {"torch.testing": by_torch}
    if b.dtype == torch.bfloat16:  # numpy has none
        return found
    x, y = b.numpy(), c.numpy()
    found["numpy.allclose"] = lambda: np.allclose(y, x, rtol=rtol, atol=atol)
    if importlib.util.find_spec("polygraphy"):
        comparator = importlib.import_module("polygraphy.comparator")
        importlib.import_module("polygraphy.logger").G_LOGGER.module_severity = logging.CRITICAL
        simple = comparator.CompareFunc.simple(rtol=rtol, atol=atol)
        sides = [comparator.IterationResult(OrderedDict(x=side), runner_name="side") for side in (x, y)]
        found["polygraphy"] = lambda: simple(*sides)
    return found


def recording(module: torch.nn.Module, ids: torch.Tensor, steps: int, folder: Path) -> dict[str, Run]:
    """Return name -> what records as many forwards."""

    def by_transformers() -> None:
        debugging = importlib.import_module("transformers.model_debugging_utils")
        for number in range(steps):
            place = str(folder / "debugger" / str(number))
            with debugging.model_addition_debugger_context(module, place, do_prune_layers=False, use_repr=False):
                _forward(module, ids)
        shutil.rmtree(folder / "debugger")

    found: dict[str, Run] = {"transformers debugger": by_transformers}
    if importlib.util.find_spec("torchlens"):
        trace = importlib.import_module("torchlens").trace
        found["torchlens"] = lambda: [trace(module, ids) for _ in range(steps)]
    if importlib.util.find_spec("msprobe"):
        probe = importlib.import_module("msprobe.pytorch").PrecisionDebugger
        debugger = probe(config_path=str(_settings(folder / "msprobe")))

        def by_msprobe() -> None:
            with contextlib.redirect_stdout(io.StringIO()):
                for _ in range(steps):
                    debugger.start(model=module)
                    _forward(module, ids)
                    debugger.stop()
                    debugger.step()
            for dump in (folder / "msprobe").glob("step*"):
                shutil.rmtree(dump)

        found["msprobe"] = by_msprobe
    return found


def _forward(module: torch.nn.Module, ids: torch.Tensor) -> None:
    with torch.no_grad():
        module(ids, use_cache=False)


def _settings(folder: Path) -> Path:
    folder.mkdir(mode=0o750)
    all_of_them = {"scope": [], "list": [], "data_mode": ["all"]}
    settings = {"task": "tensor", "dump_path": str(folder), "rank": [], "step": [], "level": "L0"}
    path = folder / "config.json"
    path.touch(mode=0o640)
    path.write_text(json.dumps({**settings, "tensor": all_of_them, "statistics": all_of_them}))
    return path
