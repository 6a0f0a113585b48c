"""Both sides as the user gave them: copies of the inputs, mode, results that are no tensors, tokens of each side."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from glassengine.diagnose import check
from glassengine.errors import IncomparableError
from glassengine.program.user_code.forward import describe_training, influential_modes, training_modules
from glassengine.results import Comparison
from tests.diagnose.end_to_end.outside import Net, Words, changed, ids, x
from tests.quantized import save_quantized

BUNDLED = Path(__file__).resolve().parents[3] / "examples" / "tiny-llama"


def checked(baseline: nn.Module, candidate: nn.Module, given: Any = None) -> Comparison:
    return check(baseline, candidate=candidate, inputs=x() if given is None else given)


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x.index_fill_(0, torch.tensor([1]), 0.0)])
def test_f46_a_candidate_that_writes_to_its_inputs_differs(change: Callable[[Tensor], Any]) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        change(x)
        return Net.forward(self, x)

    given = x()
    before = given["x"].clone()
    result = checked(Net().eval(), changed(Net, forward), given)
    assert not result.ok
    assert result.standing == "results differ"
    left = next(one for one in result.results if one.name == "x after the forward")
    assert left.reason == "the candidate writes to it"
    assert torch.equal(given["x"], before)


def test_f46_both_sides_may_write_the_same() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        x.clamp_(-1, 1)
        return Net.forward(self, x)

    result = checked(changed(Net, forward), changed(Net, forward))
    assert result.ok
    assert "x after the forward" in {one.name for one in result.results}


def test_f48_modes_that_differ_are_named() -> None:
    candidate = Net().eval()
    candidate.drop.train()
    result = checked(Net().eval(), candidate)
    assert (result.ok, result.not_ok_because) == (False, "1 module of the candidate is in training mode: drop")
    result = checked(Net(), Net().eval())
    assert (result.ok, result.not_ok_because) == (False, "2 modules of the baseline are in training mode: bn, drop")


def test_f48_two_whole_models_in_training_mode_are_switched_and_it_is_said() -> None:
    result = checked(Net(), Net())
    assert result.ok
    assert "baseline and candidate: given in training mode, compared in evaluation mode" in result.notes[0]


def test_f48_a_mode_that_changes_nothing_is_no_difference() -> None:
    candidate = Net().eval()
    candidate.last.train()
    result = checked(Net().eval(), candidate)
    assert (result.ok, result.notes) == (True, ())


@pytest.mark.parametrize("is_wrong", [False, True])
def test_f48_a_file_has_no_mode_and_a_baseline_that_is_exported_for_it_is_none_of_its_mistakes(
    is_wrong: bool, tmp_path: Path
) -> None:
    exported = Net().eval()
    if is_wrong:
        exported.last.bias.data[1] += 0.5
    torch.export.save(torch.export.export(exported, (), x()), tmp_path / "net.pt2")
    result = check(Net(), candidate=str(tmp_path / "net.pt2"), inputs=x())
    assert result.ok is not is_wrong, result.not_ok_because
    assert result.notes[0] == "2 modules of the baseline are in training mode: bn, drop; compared in evaluation mode"


def test_a_draw_counts_even_where_it_changes_nothing() -> None:
    net = Net().eval()
    net.drop.p = 1e-9
    assert training_modules(net) == ()
    assert influential_modes(net, ["drop"], x()) == ["drop"]
    net.drop.p = 0.0
    assert influential_modes(net, ["drop"], x()) == []
    assert not net.drop.training
    assert describe_training("candidate", list("abcdef")).endswith("in training mode: a, b, c, d and 2 more")


def test_f55_constants_and_results_without_inputs_are_noted() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"flag": torch.ones(3, 2) * 0.5, "y": (x > 1e9).float()}

    result = checked(Constant().eval(), Constant().eval())
    assert [note.split(":")[0] for note in result.notes] == [
        "the baseline's flag depends on no input",
        "all elements of the baseline's y are the same number on these inputs",
    ]


class Plain(nn.Module):
    """A result and something beside it."""

    def __init__(self, beside: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.beside = nn.Linear(8, 4), beside

    def forward(self, x: Tensor) -> Any:
        return {"y": self.linear(x), "beside": self.beside}


@pytest.mark.parametrize(
    ("ours", "theirs"), [(2.5, 2.6), ("mean", "sum"), (True, False), (3, None), (1e300, 2e300), (2**70, 2**71)]
)
def test_f55_results_that_are_no_tensors_are_compared(ours: Any, theirs: Any) -> None:
    assert checked(Plain(ours).eval(), Plain(ours).eval()).ok
    result = checked(Plain(ours).eval(), Plain(theirs).eval())
    assert not result.ok
    assert result.not_ok_because is not None
    assert "beside" in result.not_ok_because


def test_f55_none_alone_is_no_result() -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    with pytest.raises(IncomparableError, match="nothing was compared"):
        checked(Nothing().eval(), Nothing().eval())


def test_one_object_is_not_compared_with_itself() -> None:
    net = Net().eval()
    with pytest.raises(IncomparableError, match="baseline and candidate are one object"):
        checked(net, net)


def test_a_second_call_leaves_right_candidates_alone() -> None:
    def forward(self: Any, ids: Tensor, mask: Tensor) -> Any:
        return {"logits": self.hidden(ids, mask) @ self.head.weight.t() + self.head.bias}

    assert checked(Words().eval(), changed(Words, forward), ids()).notes == ()


class Leaky(nn.Module):
    """A recurrence over [B, L, 4] that begins anew in each call, or, wrongly, with a share of where it ended."""

    def __init__(self, share: float, *, looks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.share, self.looks = nn.Linear(4, 4), share, looks
        self.left = torch.zeros(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        state, found = self.share * self.left, []
        if self.looks and bool((x > 100).any()):
            x = x / 100
        for now in self.inner(x).unbind(1):
            state = 0.5 * state + now
            found.append(state)
        self.left = state.detach() if self.share else self.left
        return torch.stack(found, 1)


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_little_that_is_left_of_the_call_before_is_found(looks: bool, num_steps: int) -> None:
    generator = torch.Generator().manual_seed(4)
    given = [{"x": torch.randn(2, 6, 4, generator=generator)} for _ in range(num_steps)]
    assert checked(Leaky(0.0, looks=looks), Leaky(0.0, looks=looks), given).ok
    result = checked(Leaky(0.0, looks=looks), Leaky(0.1, looks=looks), given)
    expected = "a second call of the candidate gives a wrong output: something is left of the call before"
    assert (result.ok, result.not_ok_because) == (False, expected)


class Halves(nn.Module):
    def __init__(self, gate: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate = nn.Linear(8, 8), gate

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a, b = self.first(x).chunk(2, -1)
        return {"gated": self.gate(a, b), "signs": torch.relu(a - 3.0).sum(-1)}


def test_a_wrong_result_of_the_first_call_is_the_reason_and_no_second_call() -> None:
    result = checked(Halves(lambda a, b: a * b.sigmoid()), Halves(lambda a, b: a.sigmoid() * b))
    assert str(result.not_ok_because).startswith("gated differs by")


class Chunks(nn.Module):
    """A convolution over a stream, of what another one computed: what was read before is kept."""

    def __init__(self, convolve: Callable[[Tensor, nn.Conv1d], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 3)
        self.convolve = convolve
        self.left = torch.zeros(1, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.cat([self.left, self.convolve(x, self.first)], -1)
        self.left = whole[..., -2:]
        return self.convolve(whole, self.second)


def _unfolded(x: Tensor, conv: nn.Conv1d) -> Tensor:
    windows = x.unfold(-1, conv.kernel_size[0], 1).permute(0, 2, 1, 3).flatten(2)
    made = windows.double() @ conv.weight.flatten(1).double().t() + conv.bias.double()  # type: ignore[union-attr]
    return made.float().transpose(1, 2)


def test_state_left_by_steps_may_differ_by_rounding() -> None:
    generator = torch.Generator().manual_seed(4)
    given = [{"x": torch.randn(1, 4, 64, generator=generator)} for _ in range(4)]
    right = checked(Chunks(lambda x, conv: conv(x)), Chunks(_unfolded), given)
    assert right.ok, right.not_ok_because
    wrong = Chunks(_unfolded)
    wrong.register_forward_hook(lambda module, *_: setattr(module, "left", module.left.half().float()))
    assert not checked(Chunks(lambda x, conv: conv(x)), wrong, given).ok


def test_a_record_of_steps_is_no_evidence_where_the_baseline_remembers(tmp_path: Path) -> None:
    net, given = Chunks(lambda x, conv: conv(x)), [{"x": torch.randn(1, 4, 5)} for _ in range(2)]
    (tmp_path / "dump").mkdir()
    for step, one in enumerate(given):
        with torch.no_grad():
            np.save(tmp_path / "dump" / f"output-step{step}.npy", net(**one).numpy())
        np.save(tmp_path / "dump" / f"x-step{step}.npy", one["x"].numpy())
    with pytest.raises(IncomparableError, match="remembers something from one step to the next"):
        check(Chunks(lambda x, conv: conv(x)), candidate=tmp_path / "dump")


def _with_other_tokens(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text(encoding="utf-8"))
    change(described)
    path.write_text(json.dumps(described), encoding="utf-8")


def _exchanged(described: dict[str, Any]) -> None:
    vocabulary = described["model"]["vocab"]
    one, other = "e", "t"
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


def _lower(described: dict[str, Any]) -> None:
    described["normalizer"] = {"type": "Lowercase"}


def test_f51_a_quantized_checkpoint_with_another_tokenizer_differs(tmp_path: Path) -> None:
    save_quantized(AutoModelForCausalLM.from_pretrained(BUNDLED), tmp_path, "torchao", bits=8, group_size=8)
    AutoTokenizer.from_pretrained(BUNDLED).save_pretrained(tmp_path)
    assert check(str(BUNDLED), candidate=str(tmp_path), steps=1).ok
    _with_other_tokens(tmp_path, _exchanged)
    result = check(str(BUNDLED), candidate=str(tmp_path), steps=1)
    assert (result.ok, result.standing, result.verdict) == (False, "prompt differs", "wrong")
    assert str(result.not_ok_because).startswith("the prompts differ: vocabulary: 2 of 1024 ids stand for other text")


@pytest.mark.parametrize("change", [_exchanged, _lower])
def test_f51_a_candidate_with_another_tokenizer_differs(change: Callable[[Any], None], tmp_path: Path) -> None:
    shutil.copytree(BUNDLED, tmp_path / "other")
    result = check(str(BUNDLED), candidate=str(tmp_path / "other"), steps=1)
    assert result.ok, result.not_ok_because
    assert any(used.recipe == "tokenized by the baseline" for case in result.inputs for used in case.inputs)
    _with_other_tokens(tmp_path / "other", change)
    result = check(str(BUNDLED), candidate=str(tmp_path / "other"), steps=1)
    assert not result.ok
    assert str(result.not_ok_because).startswith("the prompts differ: ")
