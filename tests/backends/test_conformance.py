"""Every built-in back-end computes every tensor of every family."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from glassengine.testing import conformance, models

MakeSubject = Callable[..., conformance.Subject]

SLOW = [(model, backend) for backend in ("onnxruntime", "inductor") for model in ("gemma3", "phi3", "mixtral")]
# What inductor makes of these two is compared with transformers in tests/engine/test_tokens_of_transformers.py.
SLOW += [("gpt2", "inductor"), ("qwen3", "inductor")]
CASES = [
    *((model, backend) for backend in ("eager", "onnxruntime") for model in ("llama", "gpt2", "qwen3")),
    ("llama", "inductor"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]


@pytest.mark.parametrize(("model", "backend"), CASES)
def test_prefill_and_decode(subject_of: MakeSubject, model: str, backend: str) -> None:
    subject = subject_of(model, backend)
    for scenario in ({}, {"batch": 2, "left_padding": 3}, {"batch": 2, "strided": True}):
        report = conformance.check_generation(subject, **scenario)
        assert report.ok, (scenario, report.findings[:5])
        assert report.num_checked > 4 * len(subject.nodes)


@pytest.mark.parametrize("backend", ["eager", "onnxruntime", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["vision", "audio"])
def test_plain_modules(subject_of: MakeSubject, model: str, backend: str) -> None:
    subject = subject_of(model, backend)
    for batch in (2, 5):
        report = conformance.check_module(subject, getattr(models, f"{model}_inputs")(batch))
        assert report.ok, report.findings[:5]


def test_float16_on_onnxruntime(subject_of: MakeSubject) -> None:
    report = conformance.check_generation(subject_of("llama", "onnxruntime", "float16"), batch=2, left_padding=2)
    assert report.ok, report.findings[:5]
