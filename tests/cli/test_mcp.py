"""`glass mcp` without the SDK says what to install."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from glassengine.cli.main import main


def test_without_the_sdk_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delitem(sys.modules, "glassengine.cli.mcp_server", raising=False)
    assert main(["mcp", str(tmp_path)]) == 2
    assert "pip install 'glassengine[mcp]'" in capsys.readouterr().err
