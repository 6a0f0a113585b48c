"""`executorch:FILE.pte` without ExecuTorch: what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from glassengine.errors import UsageError
from glassengine.serving.protocol import open_served


def test_a_program_needs_its_record(tmp_path: Path) -> None:
    file = tmp_path / "model.pte"
    with pytest.raises(UsageError, match="no such program"):
        open_served(f"executorch:{file}")
    file.touch()
    with pytest.raises(UsageError, match="ETRecord"):
        open_served(f"executorch:{file}")
    (tmp_path / "model.etrecord").touch()
    served = open_served(f"executorch:{file}")
    assert served is not None and served.spec == f"executorch:{file}" and served.kind == "executorch"
