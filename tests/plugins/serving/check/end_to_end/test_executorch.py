"""What ExecuTorch has computed, recorded in its interpreter: a right program raises no alarm.

`glass record executorch:FILE.pte` made the recording of a program that `tests/serving_engines/export.py` wrote.
"""

from __future__ import annotations

from pathlib import Path

import glassengine as glass
from glassengine.testing.checkpoints import save_small

RECORDED = Path(__file__).parents[4] / "serving_engines" / "recorded"


def test_a_recorded_program_is_judged_op_by_op(tmp_path: Path) -> None:
    checkpoint = save_small("llama", tmp_path / "checkpoint")
    found = glass.check(checkpoint, candidate=RECORDED / "executorch")
    assert found.ok and found.verdict == "rounding" and found.coverage == 1.0 and not found.origins, (
        found.not_ok_because
    )
