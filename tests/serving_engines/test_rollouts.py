"""Rollouts of vLLM beside the checkpoint: rounding is called rounding, and what sampling does to values is named."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import glassengine as glass
from tests.rollouts.planted import TINY, prompts

PYTHON = os.environ.get("GLASS_SERVING_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="make test-serving installs the engines, and names their interpreter"
)

CAUSES: dict[str, dict[str, str] | None] = {
    "float32": {},
    "raw": {},
    "prompt": {},
    "bfloat16": {},
    "cut": None,
    "temperature": {"temperature": "0.7"},
    "top_p": {"temperature": "0.8", "top_p": "0.9"},
    "penalty": {"repetition": "1.15", "top_k": "20"},
    "hot": {"temperature": "1.3"},
}
"""Name in `rollout.py` -> causes; None where none is that is tried."""


def test_rollouts_of_vllm(tmp_path: Path) -> None:
    script = Path(__file__).with_name("rollout.py")
    given = json.dumps(prompts(8)).encode()
    subprocess.run([PYTHON, script, TINY, tmp_path], input=given, check=True, timeout=900)
    for name, causes in CAUSES.items():
        found = glass.check_rollout(str(TINY), tmp_path / f"{name}.json").rollout
        assert found is not None
        assert {one.setting: one.value for one in found.causes} == (causes or {}), (name, found.in_words())
        wanted = ("unexplained",) if causes is None else ("mistake",) if causes else ("none", "rounding")
        assert found.found in wanted, (name, found.in_words())
