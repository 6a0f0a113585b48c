"""A tensor-parallel model in two processes: recorded by each, put together, judged against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glassengine.capture.intake import parts_of, waited
from glassengine.capture.model_debugger import model_addition_debugger_context
from glassengine.capture.record import own_directory, record
from glassengine.capture.run_script import record_script
from glassengine.capture.target import record_target
from glassengine.compare import compare
from glassengine.recording.reader import Recording
from tests import children

pytest.importorskip("torch.distributed.tensor.parallel")

# What both sides run. The baseline takes the first function alone.
MODEL = """
import sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
import glassengine as glass

def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    made = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=40, attention_bias=True, **sizes)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.normal_(std=0.3)
    return made

def run(made, path):
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad(), glass.record(made, path):
        made.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, pad_token_id=0)
"""

RANKS = """
from torch import distributed, nn
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[3]), world_size=2)
mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))

def spread(**changes):
    plan = {}
    for layer in range(2):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.{layer}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{layer}.{name}"] = RowwiseParallel()
    return parallelize_module(model(), mesh, {**plan, **changes})

class RowsWithBias(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.weight, self.bias = nn.Parameter(whole.weight.chunk(2, 1)[distributed.get_rank()].clone()), whole.bias

    def forward(self, x):
        y = nn.functional.linear(x, self.weight, self.bias)
        distributed.all_reduce(y)
        return y

path = Path(sys.argv[1])
run(spread(), path / "right")
run(spread(**{"model.layers.1.mlp.down_proj": RowwiseParallel(output_layouts=Partial())}), path / "unreduced")

exchanged = spread()
weight = exchanged.model.layers[1].self_attn.k_proj.weight.to_local()
pieces = [torch.empty_like(weight) for _ in range(2)]
distributed.all_gather(pieces, weight.detach().contiguous())
with torch.no_grad():
    weight.copy_(pieces[1 - distributed.get_rank()])
run(exchanged, path / "exchanged")

doubled = spread()
doubled.model.layers[0].self_attn.o_proj = RowsWithBias(model().model.layers[0].self_attn.o_proj)
run(doubled, path / "doubled")
distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    script, baseline = path / "ranks.py", path / "baseline.py"
    script.write_text(MODEL + RANKS)
    baseline.write_text(MODEL + "run(model(), Path(sys.argv[1]) / 'baseline')\n")
    ranks = ([str(script), str(path), str(path / "store"), str(rank)] for rank in range(2))
    children.run_ranks([[str(baseline), str(path)], *ranks])
    return path


@pytest.mark.slow
def test_a_parallel_model_agrees_with_one_process(recordings: Path) -> None:
    result = compare(recordings / "baseline", recordings / "right")
    assert (result.ok, result.coverage, result.counts["unmatched_candidate"]) == (True, 1.0, 0)
    # Both kinds of layers, in the prefill and in the decode step.
    for name in ("self_attn.q_proj", "self_attn.o_proj", "self_attn:kv.key", "mlp.gate_proj", "mlp.down_proj"):
        pairs = [pair for pair in result.pairs if pair.site == f"model.layers.1.{name}"]
        assert [pair.step for pair in pairs] == [0, 1]
    arrangements = result.environment["candidate"]["arrangements"]
    assert {"concatenated along dimension 2", "concatenated along dimension 1", "in every rank"} <= set(arrangements)
    assert "in every rank, which are not the same" not in arrangements


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "site", "kind"),
    [
        ("unreduced", "model.layers.1.mlp.down_proj", "reduction"),
        ("exchanged", "model.layers.1.self_attn.k_proj", "order"),
        ("doubled", "model.layers.0.self_attn.o_proj", "bias"),
    ],
)
def test_the_first_wrong_layer_of_a_parallel_model_is_named(recordings: Path, name: str, site: str, kind: str) -> None:
    found = compare(recordings / "baseline", recordings / name).first_divergence
    assert found is not None and (found.step, found.site, found.hints[0].evidence) == (0, site, kind)
    if name == "exchanged":
        assert "shards of the weight are exchanged, those of the bias are not" in found.hints[0].text


@pytest.mark.slow
def test_results_of_collectives_are_waited_for(recordings: Path) -> None:
    opened = Recording.open(recordings / "right" / "rank1")
    assert "model.layers.0.self_attn.o_proj" in opened.sites() and opened.metadata["rank"] == 1
    assert not [site for site in opened.sites() if site.endswith(".elem")]


class AsyncCollectiveTensor(torch.Tensor):
    """Called like torch's own, which needs a process group; its values are there once somebody waited."""

    waits = 0

    def trigger_wait(self) -> torch.Tensor:
        self.waits += 1
        return torch.ones(3)


def test_waiting_is_what_the_tensor_itself_does() -> None:
    running = torch.zeros(3).as_subclass(AsyncCollectiveTensor)
    assert torch.equal(waited(running), torch.ones(3)) and running.waits == 1
    ((key, part),) = parts_of(running) or ()
    assert key == "" and torch.equal(part, torch.ones(3))
    plain = torch.zeros(3)
    assert waited(plain) is plain


def test_each_rank_of_a_launcher_writes_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    script = tmp_path / "script.py"
    script.write_text("import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        with record(model, tmp_path / "r"):
            model(torch.ones(1, 2))
        done = record_script(script, path=tmp_path / "s")
        assert done.ok and done.recordings == (str(tmp_path / "s" / "Linear" / f"rank{rank}"),)
        assert Recording.open(tmp_path / "r" / f"rank{rank}").entries[0].rank == rank
        recorded = record_target(model, tmp_path / "t", inputs={"input": torch.ones(1, 2)})
        assert recorded.path == str(tmp_path / "t" / f"rank{rank}") and recorded.num_tensors == 2
        with model_addition_debugger_context(model, str(tmp_path / f"d{rank}")):
            model(torch.ones(1, 2))
        assert list((tmp_path / f"d{rank}").glob("*_SUMMARY.json"))
        # Who names the directory of a rank already gets what was asked for.
        assert own_directory(tmp_path / f"rank{rank}") == tmp_path / f"rank{rank}"
    assert compare(tmp_path / "r", tmp_path / "r").ok
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert own_directory(tmp_path / "r") == tmp_path / "r"
