"""A call of a module: its tensors and caches, the settings of `generate`, and calls that belong to another's step."""

from __future__ import annotations

from collections import deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import glassengine as glass
from glassengine.capture.calls import tensors_in
from glassengine.capture.record import record
from glassengine.compare import compare
from glassengine.recording.reader import Recording
from glassengine.testing.models import llama
from tests import children


class Served(nn.Module):
    """Gives hidden states; logits of some rows are computed by who calls it, as serving engines do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.layer(self.embed(input_ids)).tanh()
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits


def serve(model: Served, steps: int = 3) -> list[Tensor]:
    found = []
    ids = torch.tensor([1, 2, 3])
    positions = torch.arange(3)
    with torch.inference_mode():
        for _ in range(steps):
            hidden = model(ids, positions)
            found.append(model.compute_logits(hidden[[-1]]))
            ids, positions = found[-1].argmax(-1), positions[-1:] + 1
    return found


def test_f43_logits_after_the_forward_belong_to_its_step(tmp_path: Path) -> None:
    model = Served()
    with record(model, tmp_path / "r"):
        found = serve(model)
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0, 1, 2] and opened.complete
    for step, logits in enumerate(found):
        assert opened.sites(step)[-3:] == [".", "lm_head:in[0]", "lm_head"]
        assert torch.equal(opened.tensor("lm_head", step), logits)
    # One sequence, its tokens in one row.
    assert opened.metadata["token_ids"] == [[1, 2, 3, *(int(logits.argmax()) for logits in found[:-1])]]


def test_an_encoder_still_belongs_to_the_step_that_follows(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder, self.spare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.decoder(x)

    model, x = Two(), torch.randn(3, 4)
    with record(model, tmp_path / "r"):
        model(model.encoder(x))
        # Another sample: the encoder came ahead once, and gets nothing that came out of a forward.
        model(model.encoder(x + 1))
        # Of what came out, but not its rows.
        model.spare(torch.ones(3, 4))
        model(x)
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0, 1, 2]
    assert [site for site in opened.sites(1) if ":" not in site] == ["encoder", "decoder", "."]
    assert [site for site in opened.sites(2) if ":" not in site] == ["spare", "decoder", "."]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_failures_after_the_forward(is_interrupted: bool, tmp_path: Path) -> None:
    model = Served()
    kind = KeyboardInterrupt if is_interrupted else ValueError

    def fail(*_: object) -> None:
        raise kind("planted")

    with record(model, tmp_path / "r"):
        serve(model, 1)
        handle = model.lm_head.register_forward_hook(fail)
        with pytest.raises(kind):
            serve(model, 1)
        handle.remove()
        serve(model, 1)
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0, 1, 2] and "lm_head" in opened.sites(2) and "." in opened.sites(1)


class Net(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def run(path: Path, reentrant: bool | None, *, gradients: bool = True) -> Path:
    net = Net(reentrant)
    with record(net, path, gradients=gradients):
        for step in range(2):
            net.zero_grad()
            net(torch.linspace(-1, 1, 8).reshape(2, 4).mul(step + 1).requires_grad_()).square().sum().backward()
    return path


@pytest.mark.parametrize("reentrant", [True, False])
def test_f23_recomputed_calls_are_recorded_once_and_told(
    reentrant: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, again = run(tmp_path / "plain", None), run(tmp_path / "again", reentrant)
    assert "18 calls of 9 modules ran again in a backward (activation checkpointing)" in caplog.text
    opened = Recording.open(again)
    assert opened.metadata["recomputed"] == {
        path: 2 for i in range(3) for path in (f"layers.{i}", f"layers.{i}.0", f"layers.{i}.1")
    }
    assert "recomputed" not in Recording.open(plain).metadata
    # Nothing is missing, nothing appears twice, all has the values it has without: gradients inside included.
    assert set(opened.sites()) == set(Recording.open(plain).sites()) and not opened.left_out
    result = compare(plain, again)
    assert (result.ok, result.coverage) == (True, 1.0) and result.verdict in ("identical", "rounding")


def test_f23_values_alone(tmp_path: Path) -> None:
    opened = Recording.open(run(tmp_path / "r", True, gradients=False))
    assert opened.steps == [0, 1] and opened.metadata["recomputed"]["layers.0"] == 2
    assert not [site for site in opened.sites() if "grad" in site]


@pytest.mark.parametrize("part", [False, True])
def test_f13_forwards_without_values_are_no_steps(part: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(2, 4)
    with record(model, tmp_path / "r"):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            (model[0] if part else model)(mode.from_tensor(x))
        y = model(x)
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0] and torch.equal(opened.tensor(".", 0), y)
    assert opened.metadata.get("num_late") is None and opened.sites(0)[0] == ".:in[0]"


def test_a_model_that_has_no_values_itself_is_recorded_by_its_shapes(tmp_path: Path) -> None:
    model = nn.Linear(4, 4, device="meta")
    with record(model, tmp_path / "r"):
        model(torch.ones(2, 4, device="meta"))
    assert {item.site for item in Recording.open(tmp_path / "r").left_out} == {".:in[0]", "."}


PIPELINE = """
import sys, torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
import glassengine as glass

path, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(4)})
    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x

whole = Net()
x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
net = Net()
for name in ("01", "23")[1 - rank]:
    del net.layers[name]
stage = PipelineStage(net, rank, 2, torch.device("cpu"))
with torch.no_grad(), glass.record(net, path + "/ranks"):
    schedule = ScheduleGPipe(stage, n_microbatches=2)
    for _ in range(2):
        schedule.step(x) if rank == 0 else schedule.step()
if rank == 0:
    with torch.no_grad(), glass.record(whole, path + "/one"):
        for _ in range(2):
            for row in x.chunk(2):
                whole(row)
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_f13_stages_of_torchs_own_pipeline(tmp_path: Path) -> None:
    script = tmp_path / "stages.py"
    script.write_text(PIPELINE)
    children.run_ranks([str(script), str(tmp_path), str(tmp_path / "store"), str(rank)] for rank in range(2))
    assert Recording.open(tmp_path / "ranks" / "rank0").steps == [0, 1, 2, 3]
    result = compare(tmp_path / "one", tmp_path / "ranks")
    assert (result.ok, result.coverage) == (True, 1.0), result.first_divergence


IDS = torch.tensor([[5, 6, 7]])

Pair = namedtuple("Pair", "left right")


@dataclass
class Batch:
    x: torch.Tensor
    more: Any


class State:
    def __init__(self) -> None:
        self.hidden = torch.ones(2)


class KVCache:
    """Of a model that is not of transformers."""

    def __init__(self) -> None:
        self.k, self.v = torch.zeros(2), torch.ones(2)


def test_objects_of_own_classes_inside_of_any_container() -> None:
    x = torch.ones(1)
    tree = {"a": Pair(x, State()), "b": Batch(x, {"c": State()}), "d": deque([KVCache()])}
    assert [port for port, _ in tensors_in(":in", tree)] == [
        ":in.a.left",
        ":in.a.right.hidden",
        ":in.b.x",
        ":in.b.more.c.hidden",
        ":in.d[0].k",
        ":in.d[0].v",
    ]


class Wrapper(nn.Module):
    """Calls two language models as somebody's own code does.

    Attributes:
        other: Another one, whose layers have the numbers of those of the first.
    """

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.other, self.run = llama(), llama(), run

    def forward(self, *args: Any) -> torch.Tensor:
        return self.run(self, *args)


def _given(self: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    logits: torch.Tensor = self.model(ids, past_key_values=cache).logits
    return logits


def _made_inside(self: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    logits: torch.Tensor = self.model(ids, use_cache=True).logits
    return logits


@pytest.mark.parametrize("run", [_given, _made_inside])
def test_a_cache_is_found_wherever_it_comes_in(run: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    from transformers import DynamicCache

    model, cache = Wrapper(run).eval(), DynamicCache()
    with record(model, tmp_path / "r"), torch.no_grad():
        model(IDS, cache)
        expected = model.model(IDS, use_cache=True).past_key_values
    opened = Recording.open(tmp_path / "r")
    for layer in (0, 1):
        keys = opened.tensor(f"model.model.layers.{layer}.self_attn:kv.key", 0)
        assert torch.equal(keys, expected.layers[layer].keys)


def test_each_cache_belongs_to_the_layers_that_were_given_it(tmp_path: Path) -> None:
    from transformers import DynamicCache

    def run(self: Any, first: Any, second: Any) -> Any:
        return self.other(IDS + 1, past_key_values=second).logits + self.model(IDS, past_key_values=first).logits

    model = Wrapper(run).eval()
    caches = [DynamicCache(), DynamicCache()]
    with record(model, tmp_path / "r", sites=["*:kv.*"]), torch.no_grad():
        model(*caches)
    opened = Recording.open(tmp_path / "r")
    assert not opened.left_out
    for name, cache in zip(("model", "other"), caches, strict=True):
        for layer in (0, 1):
            kept = opened.tensor(f"{name}.model.layers.{layer}.self_attn:kv.value", 0)
            assert torch.equal(kept, cache.layers[layer].values)


def test_a_quantized_cache_has_its_scales(tmp_path: Path) -> None:
    from transformers import QuantizedCache

    cache: Any = QuantizedCache("fp8", llama().config)
    model = Wrapper(_given).eval()
    with record(model, tmp_path / "r", sites=["*:kv.*"]), torch.no_grad():
        model(IDS, cache)
    opened = Recording.open(tmp_path / "r")
    site = "model.model.layers.1.self_attn:kv._quantized_keys"
    for index, expected in enumerate(cache.layers[1]._quantized_keys):
        kept = opened.tensor(f"{site}[{index}]", 0)
        assert kept.dtype == expected.dtype and torch.equal(kept.float(), expected.float())


def test_caches_of_parts_that_are_called_alone(tmp_path: Path) -> None:
    from transformers import DynamicCache

    model, cache = Wrapper(_given).eval(), DynamicCache()
    inner: Any = model.model
    by_hand = inner.model
    with record(model, tmp_path / "r", sites=["*:kv.key"]), torch.no_grad():
        for _ in range(2):
            inner(IDS, past_key_values=cache)
        model(IDS, cache)  # of the same step as the second call of a part of it
        hidden = by_hand.embed_tokens(IDS)
        positions = by_hand.rotary_emb(hidden, torch.arange(3)[None])
        for layer in by_hand.layers:
            hidden = layer(hidden, position_embeddings=positions, past_key_values=cache)
    opened = Recording.open(tmp_path / "r")
    first, second = (f"model.model.layers.{layer}.self_attn" for layer in (0, 1))
    sites = [(entry.step, entry.site, entry.shape[2]) for entry in opened.entries]
    assert sites == [
        (0, f"{first}:kv.key", 3),
        (0, f"{second}:kv.key", 3),
        (1, f"{first}:kv.key", 6),
        (1, f"{second}:kv.key", 6),
        (1, f"{first}@1:kv.key", 9),
        (1, f"{second}@1:kv.key", 9),
        (2, f"{first}:kv.key", 12),
        (2, f"{second}:kv.key", 12),
    ]
    assert not opened.left_out


@pytest.fixture(scope="module")
def parts(root: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = root / "examples" / "tiny-llama"
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_the_settings_in_force_are_kept(parts: tuple[Any, Any], tmp_path: Path) -> None:
    model, _ = parts
    ids = torch.tensor([[1, 495, 395]])
    with glass.record(model, tmp_path / "run"):
        model.generate(
            ids, max_new_tokens=2, do_sample=True, temperature=0.7, repetition_penalty=1.1, eos_token_id=[2, 3]
        )
    found = Recording.open(tmp_path / "run").metadata
    wanted = {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.1, "max_new_tokens": 2, "bos_token_id": 1}
    assert wanted.items() <= found["sampling"].items() and found["sampling"]["eos_token_id"] == [2, 3]
    assert found["prompt_lengths"] == [3] and len(found["token_ids"][0]) == 4 and "prompt" not in found


def test_the_text_of_a_pipeline_is_kept(parts: tuple[Any, Any], tmp_path: Path) -> None:
    from transformers import pipeline

    model, tokenizer = parts
    asked = pipeline("text-generation", model=model, tokenizer=tokenizer)
    with glass.record(asked, tmp_path / "run"):
        asked("The value of", max_new_tokens=2, do_sample=False)
    found = Recording.open(tmp_path / "run").metadata
    assert found["prompt"] == "The value of" and found["sampling"]["do_sample"] is False


def test_a_forward_by_itself_has_no_settings(parts: tuple[Any, Any], tmp_path: Path) -> None:
    model, _ = parts
    with glass.record(model, tmp_path / "run", metadata={"prompt": "given"}), torch.no_grad():
        model(torch.tensor([[1, 495, 395]]))
    found = Recording.open(tmp_path / "run").metadata
    assert "sampling" not in found and "prompt_lengths" not in found and found["prompt"] == "given"
