"""Which ops of two programs are counterparts, where one of them lacks some or rounds in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check
from glassengine.judge.pairing.by_value import Counterparts
from glassengine.judge.pairing.candidate_tensors import CandidateTensor, CandidateTensors, ProbeStep
from glassengine.judge.site_pairs import sibling_of
from glassengine.program.export.export import export_module
from glassengine.results import Comparison

Step = Callable[[Tensor], Tensor]


class Scores(nn.Module):
    """Scores of an attention, what is done to them, a mask, and a softmax."""

    def __init__(self, done: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.out = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(9, 5)
        self.done = done

    def forward(self, x: Tensor) -> Tensor:
        scores = 3 * (self.query(x) @ self.key(x).transpose(1, 2))
        mask = torch.full((9, 9), float("-inf")).triu(1)
        return self.out(torch.softmax(self.done(scores) + mask, -1))


class Norm(nn.Module):
    """A norm, with something done to the mean."""

    def __init__(self, done: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(12, 5)
        self.done = done

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * torch.rsqrt(self.done(x.pow(2).mean(-1, keepdim=True)) + 1e-6))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("inputs") / "inputs.pt"
    torch.save({"x": torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1))}, path)
    return str(path)


def as_it_is(x: Tensor) -> Tensor:
    return x


def capped(x: Tensor) -> Tensor:
    return torch.tanh(x / 4) * 4


def judged(baseline: nn.Module, candidate: nn.Module, inputs: str) -> Comparison:
    torch.set_num_threads(1)
    return check(baseline.eval(), candidate=candidate.eval(), inputs=inputs)


def hints(result: Comparison) -> list[str]:
    assert result.first_divergence is not None
    return [hint.text for hint in result.first_divergence.hints]


def test_ops_that_the_candidate_lacks_are_named(inputs: str) -> None:
    """What is made of the scores follows from the masked ones too: these are no counterpart of the capped ones."""
    result = judged(Scores(capped), Scores(as_it_is), inputs)
    assert result.first_divergence is not None and result.first_divergence.site == "./tanh.0"
    assert result.first_divergence.candidate_site == "./mul.0"
    assert hints(result)[0] == "tanh is missing"
    assert {pair.verdict for pair in result.pairs if pair.site == "./softmax.0" and not pair.inherited} <= {"rounding"}


def test_ops_that_only_the_candidate_has_are_named(inputs: str) -> None:
    result = judged(Scores(as_it_is), Scores(capped), inputs)
    assert not result.ok
    assert any("the candidate div, tanh, mul" in hint for hint in hints(result)), hints(result)


def test_other_ops_in_a_region_are_named(inputs: str) -> None:
    result = judged(Scores(capped), Scores(lambda x: 4 * torch.sin(x / 4)), inputs)
    assert not result.ok and any("tanh" in hint and "sin" in hint for hint in hints(result)), hints(result)


def test_one_op_for_another_has_one_hint(inputs: str) -> None:
    result = judged(Scores(torch.tanh), Scores(torch.sin), inputs)
    assert [hint for hint in hints(result) if "tanh" in hint] == ["tanh in the baseline, sin in the candidate"]


def test_an_input_rounded_is_not_the_result(inputs: str) -> None:
    """Beside the float16 mean the epsilon that is added to it vanishes, and still it is not the sum."""
    result = judged(Norm(as_it_is), Norm(lambda mean: mean.half().float()), inputs)
    assert not result.ok and result.first_divergence is not None
    assert result.first_divergence.site == "./add.0" and result.first_divergence.candidate_site == "./add.0"
    assert hints(result)[0] == "mean.0 is rounded to float16 before add"


def test_written_with_other_ops_is_no_mistake(inputs: str) -> None:
    result = judged(Scores(capped), Scores(lambda x: (x * 0.25).tanh() + (x * 0.25).tanh() * 3), inputs)
    assert result.ok and not result.origins


class Sum(nn.Module):
    """Three terms that are added in one order or another, twice, and a norm between."""

    def __init__(self, *, in_order: bool, epsilon: float = 1e-5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.side, self.dropout = nn.Linear(12, 12), nn.Linear(12, 12), nn.Dropout(0.1)
        self.in_order, self.epsilon = in_order, epsilon

    def block(self, x: Tensor, normal: Tensor) -> Tensor:
        side = self.side(normal).sigmoid()
        if self.in_order:
            return self.dropout(self.up(normal)) + side + x
        return x + self.up(normal.transpose(1, 2).transpose(1, 2)) + side

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x, x)
        return self.block(x, nn.functional.layer_norm(x, (12,), eps=self.epsilon))


def test_a_sum_in_another_order_takes_no_blame_for_what_is_wrong_elsewhere(inputs: str) -> None:
    assert judged(Sum(in_order=True), Sum(in_order=False), inputs).ok
    result = judged(Sum(in_order=True), Sum(in_order=False, epsilon=0.1), inputs)
    assert [origin.site for origin in result.origins if origin.level == "candidate"] == ["./layer_norm.0"]


class Positions(nn.Module):
    """Norms, written out or as one op, and positions that each of two layers makes for itself."""

    def __init__(self, *, is_one_op: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12)])
        self.is_one_op = is_one_op

    def norm(self, x: Tensor) -> Tensor:
        if self.is_one_op:
            return nn.functional.rms_norm(x, (12,), eps=1e-6)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            positions = torch.arange(9).expand(2, 9)[..., None].float()
            x = x + layer(self.norm(x)) * torch.cos(positions)
        return x


def test_a_small_number_added_to_what_is_made_twice_tells_nothing(inputs: str) -> None:
    """An epsilon added to the positions makes the positions of the other layer: these are no mean of squares."""
    result = judged(Positions(is_one_op=False), Positions(is_one_op=True), inputs)
    assert result.ok and not result.origins, result.first_divergence


class Padded(nn.Module):
    """Two layers of attention: as one op with a mask of padding, or explicit without."""

    def __init__(self, *, is_masked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(12, 36), nn.Linear(12, 36)])
        self.is_masked = is_masked

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = layer(x)[:, None].chunk(3, -1)
            if self.is_masked:
                mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask[:, None, None] > 0)
            else:
                mixed = (q @ k.mT / 12**0.5).softmax(-1) @ v
            x = nn.functional.layer_norm(x + mixed[:, 0], (12,))
        return x


def test_a_mask_of_padding_that_is_missing_is_missed_in_the_first_layer(tmp_path: Path) -> None:
    """Without padding all is right; what is wrong beside it is so from the first attention on."""
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, -3:] = 0
    torch.save({"x": torch.randn(2, 9, 12), "attention_mask": mask}, tmp_path / "inputs.pt")
    result = judged(Padded(is_masked=True), Padded(is_masked=False), str(tmp_path / "inputs.pt"))
    assert result.first_divergence is not None
    assert result.first_divergence.site == "./scaled_dot_product_attention.0"


class Parallel(nn.Module):
    """Two branches, parallel or one after the other, with a norm as one op or by hand, step by step."""

    def __init__(self, *, is_parallel: bool, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.side, self.up = nn.Linear(12, 12), nn.Linear(12, 12)
        self.before, self.beside = nn.LayerNorm(12), nn.LayerNorm(12, eps=0.1)
        self.is_parallel, self.by_hand = is_parallel, by_hand

    def normal(self, norm: nn.LayerNorm, x: Tensor) -> Tensor:
        if not self.by_hand:
            return norm(x)
        away = x - x.mean(-1, keepdim=True)
        unit = away * (away.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        for factor in (2, 1 / 2):
            unit = unit * factor
        return unit * norm.weight + norm.bias

    def product(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return x @ layer.weight.T + layer.bias if self.by_hand else layer(x)

    def forward(self, x: Tensor) -> Tensor:
        side = self.product(self.side, self.normal(self.before, x)).tanh()
        return x + side + self.product(self.up, self.normal(self.beside, x if self.is_parallel else x + side)).relu()


def test_a_norm_by_hand_of_something_else_is_named(inputs: str) -> None:
    assert judged(Parallel(is_parallel=True, by_hand=False), Parallel(is_parallel=True, by_hand=True), inputs).ok
    result = judged(Parallel(is_parallel=True, by_hand=False), Parallel(is_parallel=False, by_hand=True), inputs)
    assert result.first_divergence is not None and result.first_divergence.site == "beside/layer_norm.0"


class Largest(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.topk(2)
        return values * 2, places + 1


def test_indices_go_with_the_values_that_they_are_the_places_of() -> None:
    program = export_module(Largest(), {"x": torch.randn(3, 5)})
    nodes = {node.name: node for node in program.graph.nodes}
    values, places = (name for name in nodes if name.startswith("getitem"))
    assert sibling_of(nodes[places], {values: values}, nodes) == places
    assert sibling_of(nodes[places], {}, nodes) is None, "nothing is known of the op"
    assert sibling_of(nodes["mul"], {values: values}, nodes) is None, "an op of one result"


class Mixed(nn.Module):
    """A block over a square image."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.LayerNorm(4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return self.out(y).permute(0, 3, 1, 2) + x


@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_tensor_of_a_square_image_is_not_taken_for_a_turned_one(seed: int, tmp_path: Path) -> None:
    baseline, port = Mixed(seed).eval(), Mixed(seed).eval()
    x = torch.randn(2, 4, 6, 6)
    # What is nearly symmetric is nearer when it is turned.
    torch.save({"x": x + x.mT + torch.randn(2, 4, 6, 6)}, tmp_path / "inputs.pt")
    kernel = port.conv.weight
    kernel.data = kernel.data.mT.contiguous()
    first = check(baseline, candidate=port, inputs=str(tmp_path / "inputs.pt")).first_divergence
    assert first is not None and first.site == "conv/conv2d.0"
    assert [hint.text for hint in first.hints] == ["conv.weight: transposed (axes 2 and 3)"]


class Relative(nn.Module):
    """Directions between points, weighted by a gate that knows both."""

    def __init__(self, sign: int = 1) -> None:
        super().__init__()
        self.sign = sign

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        here, there = x[:, :, None], x[:, None]
        way = here - there if self.sign > 0 else there - here
        return (way / way.norm(dim=-1, keepdim=True).clamp(min=1e-6) * gate.exp()[..., None]).sum(2)


def test_a_difference_that_is_turned_is_not_the_right_one_along_other_axes() -> None:
    """From one point to another: transposed, it is the same as the other way round."""
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(2, 5, size, generator=generator) for name, size in (("x", 3), ("gate", 5))}
    first = check(Relative(), candidate=Relative(-1), inputs=inputs).first_divergence
    assert first is not None and first.site == "./sub.0" and "are exchanged" in first.hints[0].text, first


class Filter(nn.Module):
    """What is larger than a share of the middle is kept, in each of several layers."""

    def __init__(self, middles: list[Step], above: Callable[[Tensor, Tensor], Tensor] = torch.gt) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in middles)
        self.share = nn.Parameter(torch.tensor([0.02]))
        self.middles, self.above = middles, above

    def forward(self, x: Tensor) -> Tensor:
        for layer, middle in zip(self.layers, self.middles, strict=True):
            energy = layer(x).pow(2).sum(-1)
            mask = self.above(energy / middle(energy), self.share).float() - self.share
            x = x + torch.tanh(layer(x)) * torch.sigmoid(mask).unsqueeze(-1)
        return x


def median(x: Tensor) -> Tensor:
    return x.median(1, keepdim=True)[0]


def far_mean(x: Tensor) -> Tensor:
    return 60 * x.mean(1, keepdim=True)


def test_a_mask_of_one_number_is_not_taken_for_that_of_another_layer(inputs: str) -> None:
    result = judged(Filter([median] * 3), Filter([median, far_mean, median]), inputs)
    assert result.first_divergence is not None
    assert "60 * x.mean" in (result.first_divergence.candidate_source or "")


def test_a_comparison_that_is_turned_makes_no_zeros_of_what_is_still_computed(inputs: str) -> None:
    result = judged(Filter([median]), Filter([median], torch.lt), inputs)
    assert hints(result)[0].startswith("lt instead of gt")


class Hidden(nn.Module):
    """Scores of 2 x 5 places; those of padding, or of the keys alone, are hidden."""

    def __init__(self, *, of_keys: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.of_keys = nn.Linear(6, 6), nn.Linear(6, 6), of_keys

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        rows = mask[:, None, :, None]
        shown = mask[:, None, None, :] if self.of_keys else rows * mask[:, None, None, :]
        return scores[:, None].masked_fill(~shown, -1e4).tanh()


def test_the_one_mask_that_the_candidate_has_is_not_taken_for_the_other_one() -> None:
    given = {"x": torch.randn(2, 5, 6), "mask": torch.arange(5)[None] < torch.tensor([[5], [3]])}
    first = check(Hidden().eval(), candidate=Hidden(of_keys=True).eval(), inputs=given).first_divergence
    assert first is not None and first.hints[0].proven, first
    assert first.hints[0].text == "a condition of the mask is missing: unsqueeze.1"


class Distances(nn.Module):
    """Scores and a bias of how far places lie apart, and on which side."""

    def __init__(self, *, turned: bool = False, back: Step = as_it_is) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.bias = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.table, self.turned, self.back = nn.Embedding(9, 6), turned, back

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        apart = places[None, :] - places[:, None] if self.turned else places[:, None] - places[None, :]
        far = self.table(apart.abs().clamp(0, 8)) * apart.sign().unsqueeze(-1)
        return (self.query(x) @ x.transpose(1, 2) + self.back(self.bias(far).mean(-1))).softmax(-1)


def test_a_difference_of_places_that_is_turned_is_named_where_it_is_made() -> None:
    given = {"x": torch.randn(2, 5, 6)}
    first = check(Distances().eval(), candidate=Distances(turned=True).eval(), inputs=given).first_divergence
    assert first is not None and first.site == "./sub.0", first
    assert first.hints[0].text == "the operands unsqueeze.0 and unsqueeze.1 of sub are exchanged"


@pytest.mark.parametrize("back", [torch.neg, torch.t])
def test_a_difference_of_places_that_is_turned_back_is_no_mistake(back: Step) -> None:
    candidate = Distances(turned=True, back=back).eval()
    assert check(Distances().eval(), candidate=candidate, inputs={"x": torch.randn(2, 5, 6)}).ok


class Directed(nn.Module):
    """A layer in which a column sees the columns up to itself, by a mask that is calculated."""

    def __init__(self, seen: Any, size: float) -> None:
        super().__init__()
        self.query, self.value, self.seen, self.size = nn.Linear(8, 8), nn.Linear(8, 8), seen, size
        self.register_buffer("places", torch.arange(6))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.size * (self.query(x) @ x.transpose(1, 2))
        seen = self.seen(self.places[None, None, :].repeat(x.shape[0], 6, 1), self.places[None, :, None])
        scores = scores + (1.0 - seen.float()) * -1e5
        return torch.tanh((scores / 2).softmax(-1) @ self.value(x)) + x


@pytest.mark.parametrize(("seen", "size"), [(torch.ge, 1.0), (torch.ge, 1e-3), (torch.lt, 1.0)])
def test_a_mask_that_is_turned_is_named_where_it_is_compared(seen: Any, size: float) -> None:
    """Scores that are small beside the numbers of the mask tell as much as large ones."""
    models = []
    for compare in (torch.le, seen):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(Directed(compare, size) for _ in range(3))).eval())
    first = check(models[0], candidate=models[1], inputs={"input": torch.randn(4, 6, 8)}).first_divergence
    assert first is not None and first.site == "0/le.0", first
    assert first.hints[0].text == f"{seen.__name__} instead of le"


class Twice(nn.Module):
    """A layer that makes a product, which the candidate makes twice, once for nothing."""

    def __init__(self, *, is_ported: bool) -> None:
        super().__init__()
        self.first, self.second, self.is_ported = nn.Linear(8, 8), nn.Linear(16, 8), is_ported

    def forward(self, x: Tensor) -> Tensor:
        if self.is_ported:
            self.second(torch.cat([self.first(x), x], -1))
        y = self.second(torch.cat([self.first(x), x], -1))
        return x + (y * 1.5 if self.is_ported else y).tanh()


def test_an_op_that_is_done_once_more_for_nothing_is_no_counterpart() -> None:
    models = []
    for is_ported in (False, True):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(Twice(is_ported=is_ported) for _ in range(3))).eval())
    first = check(models[0], candidate=models[1], inputs={"input": torch.randn(2, 7, 8)}).first_divergence
    assert first is not None and first.hints[0].proven, first
    assert first.hints[0].text == "second/linear.0 in the baseline, second/linear.0 * 1.5 in the candidate"


class Masked(nn.Module):
    """Scores to which a mask of large numbers is added, or from which it is subtracted."""

    def __init__(self, done: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.done = nn.Linear(8, 8), done

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(6, 6).triu(1) * -1e5
        return self.done(self.query(x) @ x.transpose(1, 2), mask).softmax(-1) @ x


def test_what_only_one_side_hides_is_read() -> None:
    models = Masked(torch.add).eval(), Masked(torch.sub).eval()
    first = check(models[0], candidate=models[1], inputs={"x": torch.randn(4, 6, 8)}).first_divergence
    assert first is not None and first.site == "./add.0" and first.hints[0].proven, first


class Gated(nn.Module):
    """A gate of a linear layer, and another one after it; the first may be left out."""

    def __init__(self, *, is_gated: bool) -> None:
        super().__init__()
        self.body, self.gate, self.out, self.is_gated = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), is_gated

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.is_gated:
            y = self.gate(y).sigmoid() * y
        y = nn.functional.selu(y)
        return x + y * self.out(y).sigmoid()


def test_an_op_whose_weight_nobody_reads_is_missing() -> None:
    models = []
    for is_gated in (True, False):
        torch.manual_seed(0)
        layers = [Gated(is_gated=is_gated or number != 1) for number in range(3)]
        models.append(nn.Sequential(*layers).eval())
    first = check(models[0], candidate=models[1], inputs={"input": torch.randn(2, 7, 8)}).first_divergence
    assert first is not None and first.hints[0].proven, first
    assert (first.site, first.hints[0].text) == ("1/mul.0", "sigmoid.0 is not multiplied")


class Sliced(nn.Module):
    """Scores of which a slice of a mask, true of what is seen, hides some."""

    def __init__(self, start: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.start = nn.Linear(8, 8), start

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        hidden = seen[:, :, self.start : self.start + 8].eq(0)
        return (self.query(x) @ x.transpose(1, 2)).masked_fill(hidden, -1e4).softmax(-1) @ x


def test_positions_that_a_mask_of_padding_hides_are_listed() -> None:
    seen = torch.ones(2, 1, 10, dtype=torch.bool)
    seen[1, :, 7:] = False
    inputs = {"x": torch.randn(2, 8, 8), "seen": seen}
    first = check(Sliced(0).eval(), candidate=Sliced(2).eval(), inputs=inputs).first_divergence
    assert first is not None and first.hints[0].text.startswith("a position does not see position 5, 6; start of"), (
        first
    )


class Doubled(nn.Module):
    """One op."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


HIDING = torch.tensor([[0.0, -1e9], [1.0, -1e9]])


@pytest.mark.parametrize(
    ("made", "predicted", "distance"),
    [
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), 0.5 / 29.25**0.5),
        (torch.ones(4), torch.ones(2, 2), torch.inf),
        (torch.tensor([1.0, torch.nan]), torch.tensor([2.0, torch.nan]), 0.5),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, 1.0]), torch.inf),
        (HIDING + torch.tensor([[0.0, 1e3], [0.5, 0.0]]), HIDING, 0.5),
        (torch.zeros(3), torch.zeros(3), 0.0),
    ],
    ids=["near", "another shape", "no number", "infinite", "hidden", "zeros"],
)
def test_the_distance_of_a_tensor_and_a_prediction(made: Tensor, predicted: Tensor, distance: float) -> None:
    program = export_module(Doubled(), {"x": torch.ones(4)})
    name = next(node.name for node in program.graph.nodes if node.op == "call_function")
    found = CandidateTensors(program, [ProbeStep({}, {name: made})])
    assert found.distance(CandidateTensor(name), [predicted.double()]) == pytest.approx(distance)
    assert (CandidateTensor(name) in found.near([predicted.double()], 0.9, ())) == (distance < 0.9)


class Stack(nn.Module):
    """Layers with an activation, written with other ops on one side."""

    def __init__(self, done: Step, *, is_written_out: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(30))
        self.done, self.is_written_out = done, is_written_out

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            norm = x - x.mean(-1, keepdim=True)
            made = norm @ layer.weight.T + layer.bias if self.is_written_out else layer(norm)
            x = x + self.done(made)
        return x


def test_a_mistake_in_every_layer_takes_few_looks_ahead(inputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    own = Counterparts._first_wrong
    monkeypatch.setattr(
        Counterparts, "_first_wrong", lambda self, *args, **kw: looks.append(1) or own(self, *args, **kw)
    )
    tanh = partial(nn.functional.gelu, approximate="tanh")
    result = judged(Stack(tanh), Stack(nn.functional.gelu, is_written_out=True), inputs)
    assert result.first_divergence is not None and result.first_divergence.num_alike == 30
    assert result.first_divergence.site == "./gelu.0" and 0 < len(looks) < 6


class OneDoubled(Stack):
    """The layers, written out, with the bias of one layer doubled."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            made = (x - x.mean(-1, keepdim=True)) @ layer.weight.T + layer.bias * (1 + (number == 3))
            x = x + self.done(made)
        return x


def test_a_mistake_before_that_of_all_layers_is_found_as_well(inputs: str) -> None:
    def activation(approximate: str) -> Step:
        return lambda x: nn.functional.gelu(torch.tanh(x) + x, approximate=approximate)

    result = judged(Stack(activation("tanh")), OneDoubled(activation("none")), inputs)
    found = [one.site for one in result.origins if one.level == "candidate"]
    assert found[:5] == ["./gelu.0", "./gelu.1", "./gelu.2", "layers.3/linear.0", "./gelu.3"]
