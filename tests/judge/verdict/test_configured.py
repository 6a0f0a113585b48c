"""The name of a configuration's value is said where it is the one of that kind, and never guessed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from glassengine.judge.verdict.configured import value_named, with_configuration
from glassengine.results import Altered, Comparison, Hint
from tests.report.made_results import comparison

CONFIG = {
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "head_dim": 64,
    "rope_parameters.rope_theta": 1e4,
    "rope_theta": 1e4,
    "scale_a": 3.0,
    "scale_b": 3.0,
    "hidden_act": "silu",
}


@pytest.mark.parametrize(
    ("number", "kind", "wanted"),
    [
        (1e-6, "eps", "rms_norm_eps"),
        (1e-5, "eps", None),
        (0.02, "scale", None),
        (0.125, "scale", "head_dim"),
        (64, "scale", None),
        (10000.0, "position", "rope_parameters.rope_theta"),
        (3.0, "scale", None),
        ("silu", "activation", "hidden_act"),
        ("gelu", "activation", None),
    ],
)
def test_a_value_of_that_kind_is_named(number: object, kind: str, wanted: str | None) -> None:
    assert value_named(number, kind, CONFIG) == wanted


def _with(hint: Hint) -> Comparison:
    made = comparison()
    first = made.first_divergence
    assert first is not None
    return dataclasses.replace(made, first_divergence=dataclasses.replace(first, hints=(hint,)))


def test_the_sentence_has_it() -> None:
    hint = Hint("eps", "eps: 1e-06 here, 1e-05", 1.0, change=Altered(argument="eps", baseline=1e-6, candidate=1e-5))
    module = SimpleNamespace(config=SimpleNamespace(rms_norm_eps=1e-6, use_cache=True, layers=[1]))
    first = with_configuration(_with(hint), module).first_divergence
    assert first is not None and first.hints[0].change is not None
    assert first.hints[0].text.endswith("; the reference has config.rms_norm_eps = 1e-06")
    assert first.hints[0].change.configured == "rms_norm_eps"
    assert with_configuration(_with(hint), object()) == _with(hint)
