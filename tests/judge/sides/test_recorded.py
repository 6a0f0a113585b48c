"""A record as candidate: op by op, by segments, under other names, and on the tokens that it was made with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine import commands
from glassengine.cli.main import main
from glassengine.errors import IncomparableError, UsageError
from glassengine.progress import Event
from glassengine.recording.reader import Recording
from glassengine.recording.write.writer import RecordingWriter
from glassengine.results import Comparison
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
    levels = {level.name: level for level in result.levels}
    assert levels["record"].guarantee == "judged op by op"
    # The tokens are the recording's: two steps of the batch that it was made with.
    assert {(pair.case, pair.step) for pair in result.pairs} == {("recorded", 0), ("recorded", 1)}
    if kind == "right":
        assert result.ok, result.not_ok_because
        return
    found = result.first_divergence
    assert found is not None and (found.level, found.step) == ("record", 0)
    assert found.site == "model.layers.1.mlp.down_proj/linear.0"
    assert [d.site for d in result.origins] == [found.site], "later steps and ops inherit it"


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_a_recording_of_modules_is_judged_by_segments(tmp_path: Path, baseline: nn.Module, kind: str) -> None:
    model = models.llama() if kind == "right" else wrong_llama()
    ids = torch.tensor([[0, 0, 0, *PROMPTS[0]], PROMPTS[1]])
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    commands.record_target(model, tmp_path / "recording", inputs=inputs, max_new_tokens=3)
    result = glass.check(baseline, candidate=tmp_path / "recording", min_coverage=0.5)
    levels = {level.name: level for level in result.levels}
    assert levels["record"].guarantee == "judged by segments"
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
    assert [d.site for d in result.origins if d.level == "record"] == ["./sigmoid.0"]
    assert result.first_divergence is not None and result.first_divergence.candidate_site == "s"


def test_node_names_pair_by_themselves(tmp_path: Path, dump: tuple[str, str, dict[str, torch.Tensor]]) -> None:
    inputs, _, tensors = dump
    torch.save({"tanh": tensors["t"], "sigmoid": tensors["s"], "mul": tensors["y"] + 1}, tmp_path / "dump.pt")
    result = glass.check(models.drawn(Net), candidate=tmp_path / "dump.pt", inputs=inputs)
    assert [d.site for d in result.origins if d.level == "record"] == ["./mul.0"]


def test_records_that_do_not_fit_are_refused(
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


class Two(nn.Module):
    """Returns two results of two shapes; `output` is a module of it, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm_f, self.output, self.b = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.output(self.norm_f(x))
        return torch.tanh(h), torch.sigmoid(self.b(h))


class Named(Two):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        hidden, pooled = super().forward(x)
        return {"last_hidden_state": hidden, "pooler_output": pooled}


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


def checked(net: nn.Module, tmp_path: Path, min_coverage: float = 0.0, **tensors: torch.Tensor) -> Comparison:
    np.savez(tmp_path / "dump.npz", x=X.numpy(), **{name: t.numpy() for name, t in tensors.items()})
    return glass.check(net.eval(), candidate=tmp_path / "dump.npz", min_coverage=min_coverage)


@pytest.mark.parametrize(
    ("net", "names", "method"),
    [
        (Two, ("output[0]", "output[1]"), "name"),
        (Two, ("output0", "output1"), "name"),
        (Two, ("out.0", "result_1"), "name"),
        (Two, ("hidden", "scores"), "shape"),
        (Named, ("last_hidden_state", "pooler_output"), "name"),
        (Named, ("a", "b_of_it"), "shape"),
    ],
)
def test_f47_results_of_a_dump_are_compared(
    tmp_path: Path, net: type[Two], names: tuple[str, str], method: str
) -> None:
    made = net().eval()(X)
    first, second = (one.detach() for one in (made.values() if isinstance(made, dict) else made))
    result = checked(net(), tmp_path, **{names[0]: first, names[1]: second})
    own = [one for one in result.results if one.level == "record"]
    assert result.ok and [(one.candidate_name, one.method) for one in own] == [(name, method) for name in names]
    for wrong in ((first * 1.01, second), (first, second.flip(0))):
        result = checked(net(), tmp_path, **dict(zip(names, wrong, strict=True)))
        assert result.standing == "results differ", result.not_ok_because


def test_f47_without_a_result_nothing_is_ok(tmp_path: Path) -> None:
    net = Two().eval()
    with torch.no_grad():
        inside = {"norm_f": net.norm_f(X), "b": net.b(net.output(net.norm_f(X)))}
    result = checked(net, tmp_path, **inside)
    assert not result.ok and result.too_little and not result.results
    assert "no result of the candidate was compared" in str(result.not_ok_because)
    # One of the two results is there.
    with torch.no_grad():
        result = checked(net, tmp_path, **inside, output1=net(X)[1])
    assert not result.ok and "0" in str(result.not_ok_because)


def test_f47_a_name_of_a_module_and_of_a_result_is_taken_for_neither(tmp_path: Path) -> None:
    class One(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    net = One().eval()
    with torch.no_grad():
        norm, made = net.norm_f(X), net(X)
    assert checked(net, tmp_path, output=made).ok, "beside inputs alone it is the result"
    result = checked(net, tmp_path, output=made, norm_f=norm)
    assert result.too_little and any("names a module and a result" in item.reason for item in result.skipped)
    assert checked(net, tmp_path, **{"out.output": made, "norm_f": norm}).ok


def test_f63_what_is_missing_and_what_means_nothing_is_named(tmp_path: Path) -> None:
    net = Two().eval()
    with torch.no_grad():
        made = net(X)
        tensors = {"final_norm": net.norm_f(X), "proj.b": made[1] + 1, "output0": made[0], "output1": made[1]}
        tensors["proj.b"] = net.b(net.output(net.norm_f(X)))[:, :2]
    result = checked(net, tmp_path, 0.9, **tensors)
    assert result.too_little and result.results
    because = str(result.not_ok_because)
    assert "not in the record: norm_f, output, b" in because and "--map" in because
    reasons = [item.reason for item in result.skipped]
    assert any("final_norm names nothing in the baseline (nearest: norm_f)" in reason for reason in reasons)
    assert any(reason.startswith("proj.b names nothing") for reason in reasons)
    with torch.no_grad():
        all_of_it = {"norm_f": net.norm_f(X), "output": net.output(net.norm_f(X))}
        all_of_it |= {"b": net.b(all_of_it["output"]), "out.0": made[0], "out.1": made[1]}
    assert checked(net, tmp_path, 0.9, **all_of_it).ok


def test_f63_a_refusal_names_a_way_on(tmp_path: Path) -> None:
    with pytest.raises(IncomparableError, match="nothing in the record has a name") as refused:
        checked(Two(), tmp_path, final_norm=torch.zeros(5, 4))
    assert "norm_f" in str(refused.value.expected) and "--map" in str(refused.value.hint)


class TwoLayers(nn.Module):
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
    net = TwoLayers().eval()
    program = torch.export.export(net, (torch.tensor([[1, 2, 3]]),), dynamic_shapes={"ids": {1: torch.export.Dim.AUTO}})
    torch.export.save(program, tmp_path / "net.pt2")
    return tmp_path / "net.pt2"


@pytest.mark.parametrize("has_inputs", [False, True])
def test_f56_a_dump_beside_a_program_that_keeps_its_inputs(tmp_path: Path, exported: Path, has_inputs: bool) -> None:
    """Tokens are made up for no record: of the file's own inputs without, of the record's with such."""
    ids = torch.tensor([[4, 5, 6, 7]]) if has_inputs else torch.tensor([[1, 2, 3]])
    for scale in (1.0, 1.01):
        seen = dumped(TwoLayers().eval(), ids)
        seen |= {name: seen[name] * np.float32(scale) for name in ("output", "out")}
        np.savez(tmp_path / "dump.npz", **seen, **({"ids": ids.numpy()} if has_inputs else {}))
        result = glass.check(exported, candidate=tmp_path / "dump.npz", min_coverage=0)
        assert result.ok == (scale == 1.0), result.not_ok_because
        (case,) = result.inputs
        assert (case.num_steps, case.inputs[0].origin) == (1, "given" if has_inputs else "in the file")


def test_f56_a_dump_of_a_module_without_inputs_is_refused(tmp_path: Path) -> None:
    seen = dumped(TwoLayers().eval(), torch.tensor([[1]]))
    torch.save({name: torch.from_numpy(array) for name, array in seen.items()}, tmp_path / "d.pt")
    with pytest.raises(IncomparableError, match="does not say on which inputs") as refused:
        glass.check(TwoLayers().eval(), candidate=tmp_path / "d.pt")
    assert "--inputs" in str(refused.value.hint) and "ids" in str(refused.value.got)
    assert glass.check(TwoLayers().eval(), candidate=tmp_path / "d.pt", inputs={"ids": torch.tensor([[1]])}).ok


def test_f56_other_inputs_than_the_dump_has_are_refused(tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2]])
    np.savez(tmp_path / "d.npz", **dumped(TwoLayers().eval(), ids), ids=ids.numpy())
    assert glass.check(TwoLayers().eval(), candidate=tmp_path / "d.npz", inputs={"ids": ids}).ok
    with pytest.raises(IncomparableError, match="made on other inputs"):
        glass.check(TwoLayers().eval(), candidate=tmp_path / "d.npz", inputs={"ids": ids + 1})
    with pytest.raises(IncomparableError, match="more inputs are given"):
        glass.check(TwoLayers().eval(), candidate=tmp_path / "d.npz", inputs=[{"ids": ids}, {"ids": ids}])


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


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.last = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.router(x.flatten(0, 1))).reshape(x.shape)


@pytest.mark.parametrize("scale", [1.0, 1.01])
def test_a_router_that_merges_rows_is_compared_with_one_that_does_not(tmp_path: Path, scale: float) -> None:
    model, x = Routed().eval(), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        routed = model.router(x) * scale
        torch.save({"x": x, "router": routed, "last": (last := model.last(routed)), "output": last}, tmp_path / "d.pt")
    result = glass.check(model, candidate=tmp_path / "d.pt", inputs={"x": x})
    assert result.ok == (scale == 1.0), result.not_ok_because
    if scale != 1.0:
        assert result.first_divergence is not None and result.first_divergence.site.startswith("router/linear")
