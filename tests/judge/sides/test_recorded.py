"""A record as candidate: op by op, by segments, under other names, and on the tokens that it was made with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine import commands
from glassengine.cli.main import main
from glassengine.errors import IncomparableError, UsageError
from glassengine.progress import Event
from glassengine.recording.read.reader import Recording
from glassengine.recording.write.writer import RecordingWriter
from glassengine.testing import models

PROMPTS = [[17, 200, 9, 33, 41], [5, 91, 14, 3, 77, 120, 250, 8]]


def wrong_llama() -> nn.Module:
    model = models.llama()
    model.model.layers[1].mlp.down_proj.weight.data[7] *= 2
    return model


@pytest.fixture(scope="module")
def baseline() -> nn.Module:
    return models.llama()


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_a_recording_of_an_engine_is_judged_op_by_op(tmp_path: Path, baseline: nn.Module, kind: str) -> None:
    model = models.llama() if kind == "right" else wrong_llama()
    engine = glass.build(
        model, tmp_path / "engine", backend="eager", add_output=["*"], max_batch_size=2, max_seq_len=16
    )
    engine.generate(input_ids=PROMPTS, max_new_tokens=2, record=tmp_path / "recording")
    result = glass.check(baseline, candidate=tmp_path / "recording", min_coverage=0.8)
    rungs = {rung.name: rung for rung in result.rungs}
    assert rungs["record"].guarantee == "judged op by op"
    # The tokens are the recording's: two steps of the batch that it was made with.
    assert {(pair.case, pair.step) for pair in result.pairs} == {("recorded", 0), ("recorded", 1)}
    if kind == "right":
        assert result.ok, result.not_ok_because
        return
    found = result.first_divergence
    assert found is not None and (found.rung, found.step) == ("record", 0)
    assert found.site == "model.layers.1.mlp.down_proj/linear.0"
    assert [d.site for d in result.origins] == [found.site], "later steps and ops inherit it"


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_a_recording_of_modules_is_judged_by_segments(tmp_path: Path, baseline: nn.Module, kind: str) -> None:
    model = models.llama() if kind == "right" else wrong_llama()
    ids = torch.tensor([[0, 0, 0, *PROMPTS[0]], PROMPTS[1]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    commands.record_target(model, tmp_path / "recording", inputs=inputs, max_new_tokens=3)
    result = glass.check(baseline, candidate=tmp_path / "recording", min_coverage=0.5)
    rungs = {rung.name: rung for rung in result.rungs}
    assert rungs["record"].guarantee == "judged by segments"
    assert result.ok == (kind == "right"), result.not_ok_because
    assert ("lm_head", "the record has it for some positions only") in [(s.site, s.reason) for s in result.skipped]
    if kind == "wrong":
        assert [(d.step, d.site) for d in result.origins] == [(0, "model.layers.1.mlp.down_proj")]


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_a_dump_of_another_dtype_is_judged_by_it(tmp_path: Path, baseline: nn.Module, kind: str) -> None:
    """A foreign file says of its tensors alone in which dtype the other program computed."""
    model = models.llama() if kind == "right" else wrong_llama()
    ids = torch.tensor([PROMPTS[1]])
    with glass.record(model.bfloat16(), tmp_path / "recording"):
        model(ids, use_cache=False)
    glass.export(tmp_path / "recording", tmp_path / "dump.pt")
    torch.save({"input_ids": ids}, tmp_path / "ids.pt")
    found = glass.check(baseline, candidate=tmp_path / "dump.pt", inputs=str(tmp_path / "ids.pt"), min_coverage=0.5)
    assert found.ok == (kind == "right"), found.not_ok_because
    if kind == "wrong":
        assert found.first_divergence is not None
        assert found.first_divergence.site.startswith("model.layers.1.mlp.down_proj")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.query(x)) * torch.sigmoid(self.key(x))


@pytest.fixture
def dump(tmp_path: Path) -> tuple[str, str, dict[str, torch.Tensor]]:
    net = models.drawn(Net)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    torch.save({"x": x}, tmp_path / "x.pt")
    with torch.no_grad():
        fused = torch.cat([net.query(x), net.key(x)], -1)
        tensors = {"qk": fused, "t": torch.tanh(net.query(x)), "s": torch.sigmoid(net.key(x)), "y": net(x)}
    (tmp_path / "map.json").write_text(
        json.dumps(
            {
                "rules": [
                    {"baseline": f"{name}/linear.0", "candidate": "qk", "candidate_ops": [split]}
                    for name, split in (
                        ("query", {"op": "split", "dim": -1, "parts": 2, "index": 0}),
                        ("key", {"op": "split", "dim": -1, "parts": 2, "index": 1}),
                    )
                ]
                + [
                    {"baseline": f"./{op}.0", "candidate": key}
                    for op, key in (("tanh", "t"), ("sigmoid", "s"), ("mul", "y"))
                ]
            }
        )
    )
    return str(tmp_path / "x.pt"), str(tmp_path / "map.json"), tensors


def test_a_dump_with_a_map_is_judged_op_by_op(tmp_path: Path, dump: tuple[str, str, dict[str, torch.Tensor]]) -> None:
    inputs, rules, tensors = dump
    torch.save(tensors, tmp_path / "dump.pt")
    options = {"candidate": tmp_path / "dump.pt", "inputs": inputs, "map": rules}
    result = glass.check(models.drawn(Net), **options)  # type: ignore[arg-type]
    assert result.ok, result.not_ok_because
    assert {pair.site for pair in result.pairs if pair.method == "map"} == {
        "query/linear.0", "key/linear.0", "./tanh.0", "./sigmoid.0", "./mul.0",
    }  # fmt: skip
    # Planted: a sigmoid that is wrong, and a product that was made of it.
    s = tensors["s"] * 1.01
    torch.save({**tensors, "s": s, "y": tensors["t"] * s}, tmp_path / "dump.pt")
    result = glass.check(models.drawn(Net), **options)  # type: ignore[arg-type]
    assert [d.site for d in result.origins if d.rung == "record"] == ["./sigmoid.0"]
    assert result.first_divergence is not None and result.first_divergence.candidate_site == "s"


def test_node_names_pair_by_themselves(tmp_path: Path, dump: tuple[str, str, dict[str, torch.Tensor]]) -> None:
    inputs, _, tensors = dump
    torch.save({"tanh": tensors["t"], "sigmoid": tensors["s"], "mul": tensors["y"] + 1}, tmp_path / "dump.pt")
    result = glass.check(models.drawn(Net), candidate=tmp_path / "dump.pt", inputs=inputs)
    assert [d.site for d in result.origins if d.rung == "record"] == ["./mul.0"]


def test_what_does_not_fit_is_refused(
    tmp_path: Path, dump: tuple[str, str, dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    inputs, rules, tensors = dump
    torch.save({"other": tensors["t"][:, 1:]}, tmp_path / "dump.pt")
    with pytest.raises(IncomparableError, match="nothing in the record has a name"):
        glass.check(models.drawn(Net), candidate=tmp_path / "dump.pt", inputs=inputs)
    with pytest.raises(UsageError, match="--map is for a record"):
        glass.check(models.drawn(Net), inputs=inputs, map=rules)
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())\n"
    )
    torch.save({"input": torch.zeros(4, 8)}, tmp_path / "i.pt")
    arguments = ["check", f"{tmp_path}/net.py:net", "--candidate", f"{tmp_path}/dump.pt", "--inputs"]
    assert main([*arguments, f"{tmp_path}/i.pt"]) == 4
    assert "--map FILE" in capsys.readouterr().err


def test_a_record_of_several_ranks_is_refused_with_what_to_do(
    tmp_path: Path, dump: tuple[str, str, dict[str, torch.Tensor]]
) -> None:
    inputs, _, tensors = dump
    for rank, directory in enumerate((tmp_path / "d", tmp_path / "d" / "rank1")):
        directory.mkdir()
        torch.save({"tanh": tensors["t"].chunk(2, -1)[rank]}, directory / "step0.pt")
    with pytest.raises(UsageError, match="a record of several ranks") as refused:
        glass.check(models.drawn(Net), candidate=tmp_path / "d", inputs=inputs)
    assert "ranks 0, 1" in str(refused.value.got) and "glass compare" in str(refused.value.hint)


def test_f27_several_ranks_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    for rank in range(2):
        with RecordingWriter(tmp_path / "r" / f"rank{rank}", metadata={}) as w:
            w.write("y", 0, torch.ones(2), rank=rank)
            w.commit(0)
    heard: list[Event] = []
    with pytest.raises(UsageError, match="a record of several ranks"):
        glass.check(str(tmp_path / "no_model_here"), candidate=str(tmp_path / "r"), progress=heard.append)
    assert heard == []


class Flat(nn.Module):
    """A serving engine's model: tokens of one row, positions, and logits that are computed after the forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model, self.lm_head = inner.model, inner.lm_head
        self.tokens: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.tokens.append(input_ids)
        hidden: torch.Tensor = self.model(torch.cat(self.tokens)[None], use_cache=False).last_hidden_state[0]
        return hidden[-len(input_ids) :]


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_f43_a_record_of_a_serving_engine(tmp_path: Path, baseline: nn.Module, kind: str) -> None:
    """Flat tensors, [tokens, ...]: hooks of a model that takes rows see rows, so that they are flattened afterwards."""
    served = Flat(models.llama() if kind == "right" else wrong_llama()).eval()
    ids = torch.tensor(PROMPTS[1])
    with torch.no_grad(), glass.record(served, tmp_path / "rows"):
        served.lm_head(served(ids, torch.arange(len(ids)))[[-1]])
    rows = Recording.open(tmp_path / "rows")
    with RecordingWriter(tmp_path / "flat", metadata=rows.metadata) as w:
        for entry in rows.entries:
            tensor = rows.tensor(entry)
            w.write(entry.site, 0, tensor[0] if tensor.dim() == 3 and len(tensor) == 1 else tensor)
        w.commit(0, token_ids=rows.metadata["token_ids"])
    result = glass.check(baseline, candidate=tmp_path / "flat", min_coverage=0.5)
    assert result.ok == (kind == "right"), result.not_ok_because
    assert result.counts["compared"] > 20
    if kind == "wrong":
        assert result.first_divergence is not None
        assert result.first_divergence.site == "model.layers.1.mlp.down_proj"
