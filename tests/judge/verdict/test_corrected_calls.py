"""A call as it should read, and None where it is not clear which argument is which."""

from __future__ import annotations

import pytest

from glassengine.judge.verdict.corrected_calls import exchanged, transposed, with_argument, with_bias


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


@pytest.mark.parametrize(
    ("line", "bias", "wanted"),
    [
        ("y = F.linear(x, self.out.weight)", "out.bias", "y = F.linear(x, self.out.weight, self.out.bias)"),
        ("y = F.linear(x[0], w.out.weight) + 1", "h.0.out.bias", "y = F.linear(x[0], w.out.weight, w.out.bias) + 1"),
        ("y = F.linear(x, self.out.weight, None)", "out.bias", None),
        ("y = F.linear(x, self.out.weight, bias=b)", "out.bias", None),
        ("y = F.linear(x, self.out.weight)", "up.bias", None),
        ("y = F.linear(x, weight)", "out.bias", None),
        ("y = F.linear(x, self.out.weight)", "bias", None),
        ("y = F.linear(F.linear(x, self.up.weight), self.out.weight)", "out.bias", None),
    ],
)
def test_a_bias_is_added_where_that_of_the_same_module_is_meant(line: str, bias: str, wanted: str | None) -> None:
    assert with_bias(line, "linear", bias) == wanted


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("y = x @ self.out.weight + self.out.bias", "y = x @ self.out.weight.T + self.out.bias"),
        ("y = F.linear(x, self.out.weight.T)", "y = F.linear(x, self.out.weight)"),
        ("y = F.linear(x, self.out.weight.t(), b)", "y = F.linear(x, self.out.weight, b)"),
        ("y = x @ self.out.weight[:8]", None),
        ("y = x @ self.out.weight.transpose(0, 1)", None),
        ("y = x @ self.out.weight @ self.out.weight", None),
        ("y = x @ self.timeout.weight", None),
        ("y = x @ weight", None),
        ("y = (x @ self.out.weight", None),
    ],
)
def test_a_weight_is_transposed_or_not_any_more(line: str, wanted: str | None) -> None:
    assert transposed(line, "out.weight") == wanted
