"""Both sides as the user gave them: copies of the inputs, mode, results that are no tensors, tokens of each side."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from glassengine.diagnose import check
from glassengine.errors import IncomparableError
from glassengine.program.user_code.forward import describe_training, influential_modes, training_modules
from glassengine.results import Comparison
from glassengine.testing.quantized import save_quantized
from tests.diagnose.end_to_end.outside import Net, Words, changed, ids, x

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
    assert (result.ok, result.standing, result.verdict) == (False, "results differ", "wrong")
    assert "the candidate's tokenizer gives other tokens for" in str(result.not_ok_because)


@pytest.mark.parametrize("change", [_exchanged, _lower])
def test_f51_a_candidate_with_another_tokenizer_differs(change: Callable[[Any], None], tmp_path: Path) -> None:
    shutil.copytree(BUNDLED, tmp_path / "other")
    result = check(str(BUNDLED), candidate=str(tmp_path / "other"), steps=1)
    assert result.ok, result.not_ok_because
    assert any(used.recipe == "tokenized by the baseline" for case in result.inputs for used in case.inputs)
    _with_other_tokens(tmp_path / "other", change)
    result = check(str(BUNDLED), candidate=str(tmp_path / "other"), steps=1)
    assert not result.ok
    assert result.not_ok_because is not None
    assert "the candidate's tokenizer gives other tokens for" in result.not_ok_because
