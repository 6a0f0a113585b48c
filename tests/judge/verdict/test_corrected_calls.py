"""A call as it should read, and None where it is not clear which argument is which."""

from __future__ import annotations

import pytest

from glassengine.judge.verdict.corrected_calls import exchanged, with_argument


def test_columns_are_those_of_whole_arguments() -> None:
    line = 'y = torch.sub(a["(,"], b[1:2], alpha=2)  # sub(a, b)'
    assert exchanged(line, "sub", (1, 0)) == 'y = torch.sub(b[1:2], a["(,"], alpha=2)  # sub(a, b)'


@pytest.mark.parametrize(
    "line", ["y = net.sub(a, b)", "y = sub(a, b)", "y = torch.sub(a, other=b)", "größe = F.sub(a, b)"]
)
def test_what_is_not_a_function_of_torch_is_left_alone(line: str) -> None:
    assert exchanged(line, "sub", (0, 1)) is None


@pytest.mark.parametrize(
    ("line", "name", "default", "value", "wanted"),
    [
        ("y = F.silu(F.layer_norm(x, (8,)))", "eps", 1e-5, 1e-6, "y = F.silu(F.layer_norm(x, (8,), eps=1e-06))"),
        ("y = F.layer_norm(x, (8,), w, b, 1e-3)", "eps", 1e-3, 1e-6, None),  # given by its place
        ("y = F.layer_norm(x, (8,))", "eps", 1e-3, 1e-6, None),  # another default: it is not this call
        ("y = F.layer_norm(x, (8,))", "epsilon", 1e-5, 1e-6, None),
        ("y = self.layer_norm(x)", "eps", 1e-5, 1e-6, None),
    ],
)
def test_an_argument_is_added_where_the_default_of_the_function_was_wrong(
    line: str, name: str, default: float, value: float, wanted: str | None
) -> None:
    assert with_argument(line, "layer_norm", name, default, value) == wanted
