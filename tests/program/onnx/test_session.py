"""Sessions of ONNX Runtime, as they are started here."""

from __future__ import annotations

import onnxruntime
import pytest

from glassengine.program.onnx.session import start


def test_a_session_that_fails_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """The runtime prints "EP Error" to stdout before it tries again, where a command writes its document."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception, match=r"INVALID_PROTOBUF|[Pp]rotobuf"):
        start(b"\xff\x00", options)
    assert capfd.readouterr().out == ""
