"""A record is judged on what it was made on and on nothing else; where nobody says it, it is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.errors import IncomparableError
from glassengine.testing import models


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(31, 8), nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(torch.tanh(self.table(ids)))
        return found


def dumped(net: nn.Module, *given: torch.Tensor) -> dict[str, np.ndarray]:
    """Module outputs by path, as a program in another framework may write them."""
    seen: dict[str, np.ndarray] = {}
    hooks = [
        module.register_forward_hook(lambda _, __, made, name=name: seen.update({name: made.numpy()}))
        for name, module in net.named_modules()
        if name
    ]
    with torch.no_grad():
        seen["output"] = net(*given).numpy()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    net = Net().eval()
    program = torch.export.export(net, (torch.tensor([[1, 2, 3]]),), dynamic_shapes={"ids": {1: torch.export.Dim.AUTO}})
    torch.export.save(program, tmp_path / "net.pt2")
    return tmp_path / "net.pt2"


@pytest.mark.parametrize("has_inputs", [False, True])
def test_f56_a_dump_beside_a_program_that_keeps_its_inputs(tmp_path: Path, exported: Path, has_inputs: bool) -> None:
    """Tokens are made up for no record: of the file's own inputs without, of the record's with such."""
    ids = torch.tensor([[4, 5, 6, 7]]) if has_inputs else torch.tensor([[1, 2, 3]])
    for scale in (1.0, 1.01):
        seen = dumped(Net().eval(), ids)
        seen |= {name: seen[name] * np.float32(scale) for name in ("output", "out")}
        np.savez(tmp_path / "dump.npz", **seen, **({"ids": ids.numpy()} if has_inputs else {}))
        result = glass.check(exported, candidate=tmp_path / "dump.npz", min_coverage=0)
        assert result.ok == (scale == 1.0), result.not_ok_because
        (case,) = result.inputs
        assert (case.num_steps, case.inputs[0].origin) == (1, "given" if has_inputs else "in the file")


def test_f56_a_dump_of_a_module_without_inputs_is_refused(tmp_path: Path) -> None:
    seen = dumped(Net().eval(), torch.tensor([[1]]))
    torch.save({name: torch.from_numpy(array) for name, array in seen.items()}, tmp_path / "d.pt")
    with pytest.raises(IncomparableError, match="does not say on which inputs") as refused:
        glass.check(Net().eval(), candidate=tmp_path / "d.pt")
    assert "--inputs" in str(refused.value.hint) and "ids" in str(refused.value.got)
    assert glass.check(Net().eval(), candidate=tmp_path / "d.pt", inputs={"ids": torch.tensor([[1]])}).ok


def test_f56_other_inputs_than_the_dump_has_are_refused(tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2]])
    np.savez(tmp_path / "d.npz", **dumped(Net().eval(), ids), ids=ids.numpy())
    assert glass.check(Net().eval(), candidate=tmp_path / "d.npz", inputs={"ids": ids}).ok
    with pytest.raises(IncomparableError, match="made on other inputs"):
        glass.check(Net().eval(), candidate=tmp_path / "d.npz", inputs={"ids": ids + 1})
    with pytest.raises(IncomparableError, match="more inputs are given"):
        glass.check(Net().eval(), candidate=tmp_path / "d.npz", inputs=[{"ids": ids}, {"ids": ids}])


def test_f56_tokens_of_a_language_model_lie_in_its_dump(tmp_path: Path) -> None:
    """Names of modules as keys, and the tokens beside them: two rows, one of them padded."""
    model = models.llama()
    ids = torch.tensor([[0, 0, 17, 200, 9], [5, 91, 14, 3, 77]])
    mask = (ids > 0).long()
    with glass.record(model, tmp_path / "run"), torch.no_grad():
        logits = model(ids, attention_mask=mask, use_cache=False).logits
    glass.export(tmp_path / "run", tmp_path / "all.pt")
    tensors = {n: t for n, t in torch.load(tmp_path / "all.pt").items() if ":" not in n and n != "."}
    dump = {**tensors, "input_ids": ids, "attention_mask": mask, "logits": logits}
    torch.save(dump, tmp_path / "right.pt")
    result = glass.check(model, candidate=tmp_path / "right.pt")
    assert result.ok, result.not_ok_because
    (case,) = result.inputs
    assert case.num_steps == 1 and case.inputs[0].shape == (2, 5)
    torch.save({**dump, "logits": logits.roll(1, -1)}, tmp_path / "wrong.pt")
    result = glass.check(model, candidate=tmp_path / "wrong.pt")
    assert not result.ok and result.standing == "results differ"
    with pytest.raises(IncomparableError, match="made on other inputs"):
        glass.check(model, candidate=tmp_path / "right.pt", inputs={"input_ids": ids + 1, "attention_mask": mask})
