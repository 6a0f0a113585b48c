"""Every built-in back-end computes every tensor of every family."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from glassengine.program import example_inputs
from glassengine.program.example_inputs import encoder_inputs
from glassengine.program.export import named_inputs
from glassengine.testing import conformance, models
from glassengine.testing.architectures import ENCODER_DECODERS, FAMILIES, GENERATING, ONE_FORWARD

MakeSubject = Callable[..., conformance.Subject]

ALWAYS = {
    *(("eager", family) for family in ("llama", "gpt2", "qwen3", "mamba")),
    *(("onnxruntime", family) for family in ("llama", "gpt2", "qwen3")),
    ("inductor", "llama"),
    ("openvino", "llama"),
}
"""The others are slow; tokens of every family are compared with transformers, on the eager back-end, always."""

CASES = [
    pytest.param(family, backend, marks=() if (backend, family) in ALWAYS else pytest.mark.slow)
    for backend in ("eager", "onnxruntime", "openvino", "inductor")
    for family in GENERATING
]


@pytest.mark.parametrize(("model", "backend"), CASES)
def test_prefill_and_decode(subject_of: MakeSubject, model: str, backend: str) -> None:
    subject = subject_of(model, backend)
    for scenario in ({}, {"batch": 2, "left_padding": 3}, {"batch": 2, "strided": True}):
        report = conformance.check_generation(subject, **scenario)
        assert report.ok, (scenario, report.findings[:5])
        assert report.num_checked > 4 * len(subject.nodes)


@pytest.mark.parametrize(
    "backend", ["eager", "onnxruntime", "openvino", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("model", ["vision", "audio"])
def test_plain_modules(subject_of: MakeSubject, model: str, backend: str) -> None:
    subject = subject_of(model, backend)
    for batch in (2, 5):
        report = conformance.check_module(subject, getattr(models, f"{model}_inputs")(batch))
        assert report.ok, report.findings[:5]


BUCKETS = pytest.mark.xfail(strict=True, reason="F8: OpenVINO's logarithm moves positions between buckets of T5")


def marks_of_one_forward(family: str, backend: str) -> list[pytest.MarkDecorator]:
    marks = [BUCKETS] if (family, backend) == ("t5", "openvino") else []
    return marks if backend == "eager" and family not in ENCODER_DECODERS else [*marks, pytest.mark.slow]


ONCE = [
    pytest.param(family, backend, marks=marks_of_one_forward(family, backend))
    for family in ONE_FORWARD
    for backend in ("eager", "onnxruntime", "openvino", "inductor")
]


@pytest.mark.parametrize(("family", "backend"), ONCE)
def test_one_forward(subject_of: MakeSubject, family: str, backend: str) -> None:
    subject = subject_of(family, backend)
    for step in example_inputs(FAMILIES[family]()):
        report = conformance.check_module(subject, named_inputs(step))
        assert report.ok, report.findings[:5]
        assert report.num_checked > len(subject.nodes)


PARTS = [
    pytest.param(family, backend, marks=() if (family, backend) == ("t5", "eager") else pytest.mark.slow)
    for family in ENCODER_DECODERS
    for backend in ("eager", "onnxruntime", "inductor")
]


@pytest.mark.parametrize(("family", "backend"), PARTS)
def test_encoder_and_decoder(subject_of: MakeSubject, family: str, backend: str) -> None:
    encoder, decoder = (subject_of(f"{family} {part}", backend) for part in ("encoder", "decoder"))
    for step in encoder_inputs(FAMILIES[family]()):
        report = conformance.check_module(encoder, step)
        assert report.ok, report.findings[:5]
    for scenario in ({}, {"batch": 2, "strided": True}):
        report = conformance.check_generation(decoder, **scenario)
        assert report.ok, (scenario, report.findings[:5])
        assert report.num_checked > 4 * len(decoder.nodes)


def test_float16_on_onnxruntime(subject_of: MakeSubject) -> None:
    report = conformance.check_generation(subject_of("llama", "onnxruntime", "float16"), batch=2, left_padding=2)
    assert report.ok, report.findings[:5]
