"""The table of candidates: every kind has a handler, and README and help list every form."""

from __future__ import annotations

from pathlib import Path

import pytest

import glassengine as glass
from glassengine.candidates import ENGINE, FLAGS, KINDS, MODEL, RECORD, SERVED, flags_of, forms, refuse, require_kind
from glassengine.diagnose.router import HANDLERS
from glassengine.errors import UsageError


def test_every_kind_has_one_handler() -> None:
    assert sorted(handler.kind.name for handler in HANDLERS) == sorted(kind.name for kind in KINDS)


def test_help_lists_every_form_and_the_readme_every_engine(root: Path) -> None:
    assert forms().split(", ") == [form for kind in (MODEL, ENGINE, RECORD, SERVED) for form in kind.forms]
    text = (root / "README.md").read_text()
    assert [form for form in (*ENGINE.forms, *SERVED.forms) if f"--candidate {form}" not in text] == []


def test_refused_flags_exist() -> None:
    assert {flag for kind in KINDS for flag in kind.refuses} <= set(FLAGS.values())


def test_an_option_that_a_kind_cannot_honor_is_refused_with_its_reason() -> None:
    given = flags_of(all_levels=True, jobs=1, tensor_parallel=1, passes=(), map=None)
    assert given == ["--all-levels"]
    with pytest.raises(UsageError, match="--all-levels and --bisect-outputs are for engines"):
        refuse(MODEL, given, "port.py:make")
    with pytest.raises(UsageError, match="--all-levels is not for a serving engine"):
        refuse(SERVED, given, "gguf:model.gguf")
    refuse(MODEL, ["--session-options"], "model.onnx")
    refuse(SERVED, ["--session-options"], "genai:folder", honored=["--session-options"])


@pytest.mark.parametrize("candidate", ["gguff:x.gguf", "vlm:/models/llama"])
def test_a_misspelled_kind_is_named_with_the_nearest(candidate: str) -> None:
    with pytest.raises(UsageError, match="unknown kind of candidate") as error:
        require_kind(candidate)
    assert "nearest: gguf" in str(error.value) or "nearest: vllm" in str(error.value)
    assert "openvino:DIR" in str(error.value)


@pytest.mark.parametrize("candidate", ["gguf:x", "s3://bucket/run", "port.py:make", "package.port:make", "C:\\x", None])
def test_other_candidates_pass(candidate: str | None) -> None:
    require_kind(candidate)


def test_an_unknown_candidate_is_told_every_form(root: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("no model")
    with pytest.raises(UsageError, match="cannot be a MODEL") as error:
        glass.check(root / "examples" / "tiny-llama", candidate=tmp_path / "plain.txt")
    assert all(form in str(error.value) for kind in KINDS for form in kind.forms)
