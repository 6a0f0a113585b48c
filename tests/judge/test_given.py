"""What a caller gives as inputs is a name, or one dict a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glassengine.errors import UsageError
from glassengine.judge.given import as_inputs, read_inputs


def test_what_a_caller_gives_is_a_name_or_one_dict_a_step(tmp_path: Path) -> None:
    step = {"x": torch.ones(2)}
    assert as_inputs(None) is None and as_inputs(tmp_path / "a.pt") == str(tmp_path / "a.pt")
    assert as_inputs(step) == read_inputs(as_inputs([step])) == [step]
    for wrong in (torch.ones(2), [torch.ones(2)], []):
        with pytest.raises(UsageError, match="inputs does not hold inputs"):
            as_inputs(wrong)
