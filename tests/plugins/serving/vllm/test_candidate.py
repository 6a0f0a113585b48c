"""`vllm:DIR` without vLLM: what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from glassengine.errors import UsageError
from glassengine.serving.protocol import ServingOptions, ServingRun, open_served


def test_a_place_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no checkpoint"):
        open_served(f"vllm:{tmp_path}")
    (tmp_path / "config.json").write_text("{}")
    served = open_served(f"vllm:{tmp_path}", ServingOptions(python=tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="no such interpreter"):
        served.record(ServingRun([1], 0), tmp_path / "rec")  # type: ignore[union-attr]


def test_it_is_told_a_dtype_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for given, told in (("auto", "float32"), ("bfloat16", "bfloat16")):
        assert open_served(f"vllm:{tmp_path}", ServingOptions(dtype=given)).dtype == told  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="does not compute in this dtype"):
        open_served(f"vllm:{tmp_path}", ServingOptions(dtype="float64"))
