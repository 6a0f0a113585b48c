"""What names a tensor, and what a captured graph is kept under, does not depend on the hash seed.

Transformers' Gemma3 iterates over a set of layer types.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import warnings

CODE = """
    import json, torch
    torch.set_num_threads(1)
    from glassengine.capture.observers import run_program
    from glassengine.program.export.export import export_causal_lm
    from glassengine.testing import models
    program = export_causal_lm(models.gemma3())
    values = {}
    def observe(node, value):
        if isinstance(value, torch.Tensor):
            values[node.name] = value
    ids = torch.arange(3, 15).reshape(1, 12)
    run_program(program, dict(
        input_ids=ids, attention_mask=torch.ones(1, 16, dtype=torch.int64), position_ids=torch.arange(12)[None],
        cache_position=torch.arange(12), **program.layout.allocate(1, 16, torch.float32)), observe)
    table = {}
    for site in program.sites:
        value = values.get(site.node)
        if value is not None:
            whole = value.double().clamp(-1e30, 1e30)
            weights = torch.arange(1, whole.numel() + 1, dtype=torch.float64).reciprocal().reshape(whole.shape)
            table[site.name] = [list(value.shape), str(value.dtype), float((whole * weights).sum()), site.fingerprint]
    from glassengine.executable.graph import CapturedGraph, input_spec
    x = torch.ones(2, 3)
    held = {name: torch.tensor([float(len(name))]) for name in {"a", "bb", "ccc"}}
    function = lambda x: torch.softmax(x * held["bb"], -1, dtype=torch.float64)
    module = torch.fx.experimental.proxy_tensor.make_fx(function)(x)
    print(CapturedGraph(module, (input_spec(x, "x", "input"),), ("y",), "inference").hash)
    print(json.dumps(table))
"""


def start_export() -> subprocess.Popen[str]:
    """Start it with a seed that is not this process's."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CODE)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def export_here() -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(textwrap.dedent(CODE), {})
    return output.getvalue()


def table_of(output: str) -> dict[str, list[object]]:
    table: dict[str, list[object]] = json.loads(output.splitlines()[-1])
    return table


def test_names_fingerprints_and_hashes_are_the_same_under_two_hash_seeds() -> None:
    other = start_export()
    here = export_here()
    first = table_of(here)
    output, _ = other.communicate(timeout=600)
    assert other.returncode == 0
    second = table_of(output)
    graph_hash, graph_hash_there = here.splitlines()[-2], output.splitlines()[-2]
    assert graph_hash == graph_hash_there and len(graph_hash) == 32
    assert len(first) > 200
    assert set(first) == set(second)
    different = {name for name in first if first[name] != second[name]}
    # Calls of one module are numbered as they ran, and what runs first depends on the seed: the fingerprint tells.
    assert {module_of(name) for name in different} <= {"model.rotary_emb"}
    for name in different:
        assert first[name][-1] != second[name][-1], f"{name}: another tensor under the same fingerprint"
        assert first[name] in second.values()


def module_of(name: str) -> str:
    return re.split(r"[@:/]", name)[0]
