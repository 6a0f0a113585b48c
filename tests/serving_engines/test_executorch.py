"""ExecuTorch itself, in the interpreter that GLASS_SERVING_PYTHON names: `make test-serving`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import glassengine as glass
from glassengine.testing.checkpoints import save_small

PYTHON = os.environ.get("GLASS_SERVING_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="make test-serving installs the engines, and names their interpreter"
)

# mistake of a conversion -> where the first divergence is
PLANTS = {
    "eps": "model.layers.1.post_attention_layernorm/",
    "rope_base": "model.rotary_emb/",
    "attention_scale": "model.layers.1.self_attn/",
    "swapped_gate": "model.layers.0.mlp.gate_proj/linear.0",
    "transposed": "model.layers.1.self_attn.o_proj/linear.0",
    "norm_plus_one": "model.norm/mul.1",
    "other_act": "model.layers.0.mlp.act_fn/",
}


def exported(family: str, folder: Path, plants: list[str], backend: str = "portable", tokens: int | str = 9) -> Path:
    checkpoint = save_small(family, folder / "checkpoint")
    request = {
        "checkpoint": str(checkpoint),
        "folder": str(folder),
        "tokens": tokens,
        "backend": backend,
        "plants": plants,
    }
    script = Path(__file__).with_name("export.py")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([PYTHON, str(script)], input=json.dumps(request), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return checkpoint


@pytest.mark.parametrize(
    ("family", "backend"),
    [("llama", "xnnpack"), *((family, "portable") for family in ("qwen3", "gemma3", "gpt2", "mixtral"))],
)
def test_right_ones_raise_no_alarm(family: str, backend: str, tmp_path: Path) -> None:
    checkpoint = exported(family, tmp_path, ["healthy"], backend)
    least = 0.0 if backend == "xnnpack" else 0.9  # a delegate shows its results alone
    place = f"executorch:{tmp_path}/healthy/model.pte"
    found = glass.check(checkpoint, candidate=place, python=PYTHON, min_coverage=least)
    print(f"{family:10} {'healthy':20} {backend:10} {found.verdict} coverage {found.coverage:.2f}")  # noqa: T201
    assert found.ok and not found.origins, found.not_ok_because
    fine = found.granularity[0]
    if backend == "xnnpack":  # a delegate shows its results alone: the answer says how many ops were judged by them
        assert fine.in_large_regions > 0.9 and fine.largest_region_end == "lm_head/linear.0"
    else:
        assert fine.op_by_op > 0.0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_program_with_a_cache_is_judged_step_by_step(family: str, tmp_path: Path) -> None:
    """As transformers exports it; the plant is in what a step after the first computes, too."""
    plants = ["healthy", *(["attention_scale"] if family == "llama" else [])]
    checkpoint = exported(family, tmp_path, plants, tokens="cache")
    for name in plants:
        found = glass.check(checkpoint, candidate=f"executorch:{tmp_path}/{name}/model.pte", python=PYTHON, steps=2)
        first = found.first_divergence
        print(f"{family:10} {name:20} cache      {first.site if first else found.verdict}")  # noqa: T201
        assert {pair.step for pair in found.pairs if pair.level == "record"} == {0, 1, 2}
        if name == "healthy":
            assert found.ok and found.coverage == 1.0 and not found.origins, found.not_ok_because
        else:
            assert first is not None and first.site.startswith(PLANTS[name])


def test_planted_mistakes_are_named(tmp_path: Path) -> None:
    checkpoint = exported("llama", tmp_path, ["healthy", *PLANTS])
    unnamed = []
    for name, place in {"healthy": "", **PLANTS}.items():
        found = glass.check(checkpoint, candidate=f"executorch:{tmp_path}/{name}/model.pte", python=PYTHON)
        first = found.first_divergence
        print(f"llama      {name:20} portable   {first.site if first else found.verdict}")  # noqa: T201
        if name == "healthy":
            assert found.ok and found.coverage == 1.0, found.not_ok_because
        elif first is None or not first.site.startswith(place):
            unnamed.append(f"{name}: {first.site if first else found.verdict}")
    assert not unnamed
