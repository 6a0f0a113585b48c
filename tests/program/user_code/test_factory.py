"""What transformers says while a model is loaded."""

from __future__ import annotations

import logging

import pytest
import transformers  # noqa: F401  # its logger has a handler from then on

from glassengine.program.user_code.factory import without_bars


def test_s14_what_transformers_logs_of_a_file_is_escaped() -> None:
    handler = logging.getLogger("transformers").handlers[0]
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch, without_bars():
        patch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
        logging.getLogger("transformers.x").warning("%s is not used\n\x1b[1mtitle\x1b[0m", "a\x1b[2J\u202eb")
    assert said == ["a\\x1b[2J\\u202eb is not used\ntitle"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
        logging.getLogger("transformers.x").warning("as it is: \x1b[1m")
    assert said[1] == "as it is: \x1b[1m"
