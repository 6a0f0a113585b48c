"""Mistakes of ports in the words that a user reads, each in the smallest model that has it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glassengine.diagnose import check
from glassengine.results import Divergence, Findings


class Filtered(nn.Module):
    """Multiplies complex numbers; a port may conjugate the coefficients."""

    def __init__(self, *, conjugates: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.coefficients, self.conjugates = nn.Linear(6, 6), conjugates

    def forward(self, x: Tensor) -> Tensor:
        coefficients = torch.view_as_complex(self.coefficients(x).unflatten(-1, (3, 2)))
        spectrum = torch.view_as_complex(x.unflatten(-1, (3, 2)).contiguous())
        if self.conjugates:
            coefficients = coefficients.conj()
        return torch.view_as_real(torch.einsum("bn,bn->b", spectrum, coefficients))


class Skipped(nn.Module):
    """Adds a skip behind a convolution and its norm; a port may add it before them."""

    def __init__(self, *, is_before: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.path = nn.Sequential(nn.Conv1d(4, 4, 1, bias=False), nn.BatchNorm1d(4), nn.ReLU())
        self.out, self.is_before = nn.Conv1d(4, 2, 1), is_before

    def forward(self, x: Tensor) -> Tensor:
        x, skip = x.tanh(), x.sin()
        if self.is_before:
            return self.out(self.path(x + skip))
        return self.out(self.path(x) + skip)


class Cutoff(nn.Module):
    """Divides a length by six and is smooth there; a port may give it what is divided already."""

    def __init__(self, *, is_divided: bool = False) -> None:
        super().__init__()
        self.is_divided = is_divided

    def forward(self, x: Tensor) -> Tensor:
        length = x.square().sum(-1)
        ratio = length / 6
        return ratio.sin() * smooth(ratio if self.is_divided else length)


def smooth(length: Tensor) -> Tensor:
    ratio = length / 6
    return 1 - 3 * ratio**2 + 2 * ratio**3


class Scaled(nn.Module):
    """Normalizes by statistics in float64; a port may have them in bfloat16."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.dtype)
        mean = y.mean(-1, keepdim=True)
        return x - mean.float() / (y - mean).square().mean(-1, keepdim=True).sqrt().float()


class Cleared(Scaled):
    """Adds nothing of statistics that may have fewer bits."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * x.to(self.dtype).square().mean(-1, keepdim=True).float()


class Written(Filtered):
    """Conjugates by the sign of the imaginary part."""

    def forward(self, x: Tensor) -> Tensor:
        real, imaginary = self.coefficients(x).unflatten(-1, (3, 2)).unbind(-1)
        spectrum = torch.view_as_complex(x.unflatten(-1, (3, 2)).contiguous())
        return torch.view_as_real((spectrum * torch.complex(real, -imaginary)).sum(-1))


class Sorted(nn.Module):
    """Sorts rows and what marks them; a port may leave the marks as they are."""

    def __init__(self, *, are_marks_sorted: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.are_marks_sorted = nn.Linear(6, 4), are_marks_sorted

    def forward(self, x: Tensor, key: Tensor, marks: Tensor) -> Tensor:
        order = key.argsort(-1)
        y = self.inner(x.gather(1, order.unsqueeze(-1).expand(-1, -1, 6)))
        if self.are_marks_sorted:
            marks = marks.gather(1, order)
        return y * (marks & (key.gather(1, order) > 2)).unsqueeze(-1)


class Encoder(nn.Module):
    """A convolution and its activation, in a module of its own."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(2, 2, 3, stride, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x).tanh()


class Resized(nn.Module):
    """Enlarges a tensor beside a result; a port may enlarge the one of another size."""

    def __init__(self, *, takes_small: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.small_encoder_of_the_image, self.large_encoder_of_the_image = Encoder(2), Encoder(1)
        self.takes_small = takes_small

    def forward(self, x: Tensor) -> Tensor:
        large = self.large_encoder_of_the_image(x)
        small = self.small_encoder_of_the_image(large)
        taken = small if self.takes_small else large
        size = (13, 11)
        return nn.functional.interpolate(taken, size=size, mode="bilinear", align_corners=False).exp() + small.sum()


class Rotary(nn.Module):
    """Rotates pairs of neighbors; a port may rotate halves."""

    def __init__(self, *, has_halves: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.has_halves = nn.Linear(6, 8), has_halves

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        angle = torch.arange(5.0).unsqueeze(-1) * torch.tensor([1.0, 0.3, 0.1, 0.03]).repeat_interleave(2)
        sizes, axes = ((2, 4), (2, 0, 1, 3)) if self.has_halves else ((4, 2), (3, 0, 1, 2))
        one, other = q.view(*q.shape[:-1], *sizes).permute(axes)
        back = (1, 2, 0, 3) if self.has_halves else (1, 2, 3, 0)
        turned = torch.stack([-other, one]).permute(back).reshape(q.shape)
        return q * angle.cos() + turned * angle.sin()


def first(baseline: nn.Module, candidate: nn.Module, **inputs: Tensor) -> tuple[Findings, Divergence]:
    found = check(baseline.eval(), candidate=candidate.eval(), inputs=inputs)
    assert not found.ok and found.first_divergence is not None
    return found, found.first_divergence


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_a_conjugate_is_an_op_of_the_candidate() -> None:
    _, found = first(Filtered(), Filtered(conjugates=True), x=rows(3, 6))
    assert found.hints[0].proven and found.hints[0].text.startswith("conj of ")
    assert found.candidate_source is not None and found.candidate_source.endswith("coefficients = coefficients.conj()")


def test_several_ops_that_are_done_after_an_addition_are_told_by_the_first() -> None:
    _, found = first(Skipped(), Skipped(is_before=True), x=rows(2, 4, 5))
    assert found.hints[0].text == "conv1d with path.0.weight is done after add, not before it"
    assert found.candidate_source is not None and found.candidate_source.endswith("self.path(x + skip))")


def test_a_number_that_both_sides_have_is_not_the_mistake() -> None:
    _, found = first(Cutoff(), Cutoff(is_divided=True), x=rows(4, 6))
    assert found.hints[0].kind == "scale" and "is scaled by 0.166667: it is " in found.hints[0].text


def test_an_op_that_is_right_in_a_dtype_of_fewer_bits_is_where_they_are_lost() -> None:
    _, found = first(Scaled(), Scaled(torch.bfloat16), x=rows(4, 64))
    assert found.hints[0].text == "dtype of to_copy: float64 in the baseline, bfloat16 in the candidate"
    assert found.candidate_source is not None and found.candidate_source.endswith("y = x.to(self.dtype)")


def test_fewer_bits_of_which_no_result_is_made_are_no_alarm() -> None:
    found = check(Cleared().eval(), candidate=Cleared(torch.bfloat16).eval(), inputs={"x": rows(4, 64)})
    assert found.ok and found.first_divergence is None and not found.origins


def test_a_conjugate_may_be_written_by_its_parts() -> None:
    baseline = Filtered(conjugates=True).eval()
    assert check(baseline, candidate=Written().eval(), inputs={"x": rows(3, 6)}).ok
    assert check(Written().eval(), candidate=baseline, inputs={"x": rows(3, 6)}).ok


def test_an_input_that_fits_comes_before_an_expression_of_it() -> None:
    inputs = {"x": rows(2, 5, 6), "key": torch.tensor([[3, 1, 4, 9, 5]]).expand(2, 5), "marks": rows(2, 5) > 0}
    _, found = first(Sorted(), Sorted(are_marks_sorted=False), **inputs)
    assert found.hints[0].text.startswith("gather is missing: input marks is passed on as it is")


def test_one_op_that_reads_a_tensor_of_another_size_is_told_by_both_tensors() -> None:
    _, found = first(Resized(), Resized(takes_small=True), x=rows(1, 2, 8, 6))
    names = [f"{size}_encoder_of_the_image/tanh.0" for size in ("large", "small")]
    assert found.hints[0].text == f"{names[0]} in the baseline, {names[1]} in the candidate"


def test_axes_of_several_ops_are_told_as_one_order() -> None:
    _, found = first(Rotary(), Rotary(has_halves=True), x=rows(2, 5, 6))
    assert (
        found.hints[0].text == "halves are rotated in the candidate, pairs of neighbors in the baseline (interleaved)"
    )


class Skips(nn.Module):
    """Three layers with a shortcut each; a port may leave the shortcuts out."""

    def __init__(self, *, has_shortcuts: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.has_shortcuts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), has_shortcuts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.tanh()
        for layer in self.layers:
            made = layer(x).tanh()
            x = x + made if self.has_shortcuts else made
        return x


def test_each_shortcut_that_is_left_out_has_its_own_words() -> None:
    """The sum that a later one would read is wrong itself, and no proof of the later one is its own."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    found = check(Skips(), candidate=Skips(has_shortcuts=False), inputs={"x": x}).origins
    told = [one.hints[0].text for one in found if one.level == "candidate"]
    assert [text.partition(" is not added to ")[0] for text in told] == ["tanh.0", "add.0", "add.1"], told
