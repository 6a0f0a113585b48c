"""What a user calls MODEL and --inputs: every form is loaded, every mistake is told."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from glassengine.errors import CorruptError, UnknownNameError, UsageError
from glassengine.program import export_program
from glassengine.program.inputs.user_inputs import load_inputs
from glassengine.program.loading import load
from glassengine.program.loading.load import bounded_by_checkpoint, fingerprint, load_model, require_countable
from glassengine.testing import models
from glassengine.testing.checkpoints import VOCAB_SIZE, save_checkpoint


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("proportion") / "model"
    save_checkpoint(
        models.llama(vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=1), folder
    )
    return folder


def with_config(small_checkpoint: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(small_checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 10**8}, {"intermediate_size": 10**8}, {"hidden_size": 10**6, "head_dim": 4},
        {"num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 10**7},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
@pytest.mark.parametrize("quantized", [False, True])
def test_s4_weights_that_are_not_there_take_no_memory(
    changes: dict[str, Any], quantized: bool, small_checkpoint: Path, tmp_path: Path
) -> None:
    if quantized:
        changes |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
    folder = with_config(small_checkpoint, tmp_path / "m", **changes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptError, match="out of proportion"):
        load_model(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize("weights", [True, False])
def test_s4_modules_that_have_no_weights_are_not_made(
    weights: bool, small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_MODULES", 1000)
    folder = with_config(small_checkpoint, tmp_path / "m", num_hidden_layers=100_000)
    with pytest.raises(CorruptError, match=r"more than 1,\d\d\d modules"):
        load_model(folder, weights=weights)


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_labels", "n_layer"])
@pytest.mark.parametrize("nested", [False, True])
def test_s4_a_configuration_that_counts_in_millions_is_refused(
    name: str, nested: bool, small_checkpoint: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {name: 10**9}
    folder = with_config(small_checkpoint, tmp_path / "m", **({"text_config": changes} if nested else changes))
    with pytest.raises(CorruptError, match=rf"{name} of 1,000,000,000"):
        load_model(folder, weights=False)


def test_what_is_in_proportion_is_loaded(small_checkpoint: Path, tmp_path: Path) -> None:
    assert load_model(small_checkpoint).generation.generates
    # Only names and shapes: any size of one tensor, as before.
    big = with_config(small_checkpoint, tmp_path / "big", vocab_size=10**8)
    assert load_model(big, weights=False).metadata["vocab_size"] == 10**8
    # Holes are said as holes, as before.
    holes = with_config(small_checkpoint, tmp_path / "holes", num_hidden_layers=2)
    with pytest.raises(UsageError, match="lacks weights"):
        load_model(holes)
    require_countable({"num_hidden_layers": 126, "vocab_size": 10**7, "layer_norm_eps": 1e-6, "labels": {"a": 3}}, "c")


def test_the_hooks_are_gone_afterwards(tmp_path: Path) -> None:
    with pytest.raises(CorruptError), bounded_by_checkpoint(tmp_path, weights=True), torch.device("meta"):
        nn.Linear(1 << 16, 1 << 16)
    nn.Linear(1 << 16, 1 << 16, device="meta")


Checkpoint = Callable[[str], Path]


def same_state(a: nn.Module, b: nn.Module) -> None:
    """Parameters and all buffers, also those that are not saved, are equal in dtype and value."""
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(a, kind)()), dict(getattr(b, kind)())
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name].dtype is theirs[name].dtype, name
            assert torch.equal(ours[name], theirs[name]), name


# -- directories -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float64"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_directory_is_loaded_as_transformers_does(checkpoint: Checkpoint, family: str, dtype: str) -> None:
    directory = checkpoint(family)
    loaded = load_model(directory, dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype, "auto"))
    # Rotary frequencies are buffers that are not saved: a cast would round them, transformers does not.
    same_state(loaded.module, theirs)
    assert any("inv_freq" in name for name, _ in loaded.module.named_buffers())
    assert not loaded.module.training
    assert (loaded.kind, loaded.directory) == ("causal_lm", str(directory))
    assert loaded.dtype == ("float32" if dtype == "auto" else dtype)
    assert loaded.metadata["max_position_embeddings"] == 128
    assert loaded.metadata["fingerprint"] == fingerprint(theirs)


def test_attention_implementation(checkpoint: Checkpoint) -> None:
    assert load_model(checkpoint("llama"), attn_implementation="eager").metadata["attn_implementation"] == "eager"
    with pytest.raises(UsageError, match=r"Hugging Face directories and ids only\n.*eager for VisionModel"):
        load_model(models.vision(), attn_implementation="eager")


@pytest.mark.parametrize("shown", [False, True])
def test_the_progress_bars_of_transformers_are_unseen_and_then_as_before(
    checkpoint: Checkpoint, shown: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    port = tmp_path / "port.py"
    port.write_text(
        "from transformers import AutoModelForCausalLM\n"
        f"def make():\n    return AutoModelForCausalLM.from_pretrained({str(checkpoint('llama'))!r})\n"
    )
    before = logging.is_progress_bar_enabled()
    set_bars = {True: logging.enable_progress_bar, False: logging.disable_progress_bar}
    set_bars[shown]()
    capfd.readouterr()
    try:
        for spec in (checkpoint("llama"), f"{port}:make"):
            load_model(spec)
            assert logging.is_progress_bar_enabled() is shown
            assert capfd.readouterr() == ("", "")
    finally:
        set_bars[before]()


def test_a_directory_that_does_not_exist_gets_the_nearest(checkpoint: Checkpoint) -> None:
    directory = checkpoint("llama")
    with pytest.raises(UnknownNameError, match=r"unknown model directory[\s\S]*nearest: .*/llama"):
        load_model(directory.with_name("lama"))


def test_a_directory_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a model directory\n.*no config.json"):
        load_model(tmp_path)


def test_a_hub_id_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(models.gpt2(), tmp_path / "models" / "tiny-gpt2", tokenizer=False)
    with pytest.raises(UsageError, match=r"unknown model 'models/tiny-gpt3'|unknown model directory") as error:
        load_model("models/tiny-gpt3")
    assert "models/tiny-gpt2" in str(error.value)
    with pytest.raises(UsageError, match=r"unknown model 'no-such/model-at-all'"):
        load_model("no-such/model-at-all")


def test_a_file_of_another_kind_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"a \.bin file cannot be a MODEL[\s\S]*file.py:factory[\s\S]*an ONNX file"):
        load_model(tmp_path / "weights.bin")


def test_a_limit_below_one_is_none() -> None:
    # XLNet has no positions of its own, and says -1.
    assert "max_position_embeddings" not in load_model(models.llama(max_position_embeddings=-1)).metadata
    assert load_model(models.llama(max_position_embeddings=99)).metadata["max_position_embeddings"] == 99


def test_unknown_dtype(checkpoint: Checkpoint) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown dtype 'bfloat'[\s\S]*bfloat16"):
        load_model(checkpoint("llama"), dtype="bfloat")


def test_a_checkpoint_with_holes_is_refused(tmp_path: Path) -> None:
    directory = save_checkpoint(models.llama(), tmp_path / "holes", tokenizer=False)
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lacks weights[\s\S]*1 missing: model.layers.1.mlp.up_proj.weight"):
        load_model(directory)


@pytest.mark.parametrize("damage", ["model.safetensors", "config.json"])
def test_a_damaged_checkpoint(tmp_path: Path, damage: str) -> None:
    directory = save_checkpoint(models.llama(), tmp_path / "damaged", tokenizer=False)
    whole = (directory / damage).read_bytes()
    (directory / damage).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"cannot be loaded\n.*got: "):
        load_model(directory)


CONFIGURATION = """
from pathlib import Path
from typing import Any
Path({marker!r}).write_text("ran")
from transformers import PretrainedConfig
class Config(PretrainedConfig):
    model_type = "foreign"
"""


def foreign_checkpoint(directory: Path, marker: Path) -> Path:
    directory.mkdir()
    names = {"AutoConfig": "configuration_foreign.Config", "AutoModelForCausalLM": "modeling_foreign.Model"}
    (directory / "config.json").write_text(json.dumps({"model_type": "foreign", "auto_map": names}))
    (directory / "configuration_foreign.py").write_text(CONFIGURATION.format(marker=str(marker)))
    (directory / "modeling_foreign.py").write_text("raise RuntimeError")
    return directory


@pytest.mark.parametrize("weights", [True, False])
def test_code_of_a_checkpoint_does_not_run(tmp_path: Path, weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)  # nobody is asked
    marker = tmp_path / "marker"
    directory = foreign_checkpoint(tmp_path / "foreign", marker)
    with pytest.raises(UsageError, match=r"comes with its own code[\s\S]*--trust-remote-code") as error:
        load_model(directory, weights=weights)
    assert not marker.exists()
    assert len(str(error.value).splitlines()) == 3


def test_code_of_a_checkpoint_runs_where_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same directory, so that the test above cannot pass for another reason."""
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    marker = tmp_path / "marker"
    directory = foreign_checkpoint(tmp_path / "foreign", marker)
    with pytest.raises(UsageError, match=r"cannot be loaded"):
        load_model(directory, trust_remote_code=True)
    assert marker.exists()


# -- factories and module objects --------------------------------------------------------------------------------------


FACTORY = """
import torch
from layers import make_layer

def model():
    return torch.nn.Sequential(make_layer())

def late():
    import more_layers
    return more_layers.make()

def number():
    return 3

def broken():
    raise ValueError("no weights today")

def inputs():
    return {"input": torch.ones(2, 4)}

constant = 3
"""


def write_factory(folder: Path, features: int) -> Path:
    folder.mkdir()
    (folder / "model.py").write_text(FACTORY)
    (folder / "layers.py").write_text(f"import torch\ndef make_layer():\n    return torch.nn.Linear(4, {features})\n")
    (folder / "more_layers.py").write_text("import torch\ndef make():\n    return torch.nn.ReLU()\n")
    return folder / "model.py"


def test_a_factory_file_with_files_beside_it(tmp_path: Path) -> None:
    file, before = write_factory(tmp_path / "ours", 5), list(sys.path)
    loaded = load_model(f"{file}:model")
    assert (loaded.kind, loaded.directory, loaded.dtype) == ("module", None, "float32")
    assert not loaded.module.training
    assert isinstance(load_model(f"{file}:late").module, nn.ReLU)
    assert sys.path == before
    for name in ("broken", "number", "missing"):
        with pytest.raises(UsageError):
            load_model(f"{file}:{name}")
        assert sys.path == before


def test_two_factories_with_files_of_the_same_names(tmp_path: Path) -> None:
    """A model and its port: each gets its own `layers.py`."""
    ours, theirs = write_factory(tmp_path / "ours", 5), write_factory(tmp_path / "theirs", 7)
    features = [load_model(f"{file}:model").module[0].out_features for file in (ours, theirs, ours)]  # type: ignore[index]
    assert features == [5, 7, 5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("modle", r"unknown function in .*model.py 'modle'[\s\S]*nearest: model"),
        ("constant", r"unknown function in .*'constant'"),
        ("broken", r":broken raised\n.*ValueError: no weights today"),
        ("number", r":number did not return a module\n.*int\n.*torch.nn.Module"),
    ],
)
def test_factories_that_fail(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_model(f"{write_factory(tmp_path / 'ours', 5)}:{name}")


def test_an_object_that_is_no_model() -> None:
    with pytest.raises(UsageError, match=r"a model of no known type\n.*dict"):
        load_model({"weight": torch.zeros(2)})  # type: ignore[arg-type]


def test_files_and_modules_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(UsageError, match=r"bad.py cannot be imported\n.*ZeroDivisionError"):
        load_model(f"{tmp_path / 'bad.py'}:model")
    with pytest.raises(UsageError, match=r"no such file: .*none.py"):
        load_model(f"{tmp_path / 'none.py'}:model")
    with pytest.raises(UsageError, match=r"module no_such_package.here cannot be imported"):
        load_model("no_such_package.here:model")


def test_a_factory_in_a_package() -> None:
    loaded = load_model("glassengine.testing.models:vision")
    assert isinstance(loaded.module, models.VisionModel)
    assert load_model("glassengine.testing.models:llama").kind == "causal_lm"


def test_a_module_of_the_caller_is_not_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.config = {"width": 2}
            self.register_buffer("saved", torch.ones(1))
            self.register_buffer("frequencies", torch.ones(1) / 3, persistent=False)
            self.register_buffer("count", torch.ones(1, dtype=torch.int64))

    module = Own()
    loaded = load_model(module, dtype="bfloat16")
    assert loaded.dtype == "bfloat16"
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    cast: Any = loaded.module
    assert (cast.saved.dtype, cast.frequencies.dtype, cast.count.dtype) == (torch.bfloat16, torch.float32, torch.int64)
    assert load_model(module).module is module
    assert load_model(module, dtype="float32").module is module


def test_a_plain_module_may_be_given_inputs() -> None:
    assert export_program(load_model(models.vision()))  # they are made up
    program = export_program(load_model(models.vision()), inputs=models.vision_inputs())
    assert program.metadata["class"].endswith("VisionModel")


def test_the_fingerprint_is_that_of_values_names_and_dtypes() -> None:
    first = models.gpt2()
    assert fingerprint(first) == fingerprint(models.gpt2())
    prints = {fingerprint(first), fingerprint(models.gpt2().double())}
    with torch.no_grad():
        next(first.parameters()).view(-1)[3] += 1e-6
    assert len(prints | {fingerprint(first)}) == 3


# -- inputs ------------------------------------------------------------------------------------------------------------

VALUES = {"x": torch.linspace(0, 1, 6).reshape(2, 3), "ids": torch.tensor([[1, 2]])}


def save_pt(path: Path) -> None:
    torch.save([{**VALUES, "flag": True}], path)


def save_npz(path: Path) -> None:
    np.savez(path, **{name: tensor.numpy() for name, tensor in VALUES.items()})


def save_json(path: Path) -> None:
    path.write_text(json.dumps([{"x": VALUES["x"].tolist(), "ids": [[1, 2]], "flag": True}]))


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("a.pt", save_pt),
        ("a.pth", save_pt),
        ("a.safetensors", lambda path: save_file(VALUES, path)),
        ("a.npz", save_npz),
        ("a.json", save_json),
    ],
)
def test_inputs_from_a_file(tmp_path: Path, name: str, save: Callable[[Path], None]) -> None:
    save(tmp_path / name)
    (step,) = load_inputs(str(tmp_path / name))
    assert step.pop("flag", True) is True
    assert step.keys() == VALUES.keys()
    for key, value in VALUES.items():
        assert step[key].dtype is value.dtype
        torch.testing.assert_close(step[key], value)


@pytest.mark.parametrize("saved", [torch.ones(2, 4), (torch.ones(2, 4),), [(torch.ones(2, 4), torch.zeros(3))]])
def test_tensors_in_order_are_named_by_the_forward(tmp_path: Path, saved: object) -> None:
    torch.save(saved, tmp_path / "a.pt")
    (step,) = load_inputs(str(tmp_path / "a.pt"), ["input", "mask"])
    assert torch.equal(step["input"], torch.ones(2, 4))
    assert ("mask" in step) == isinstance(saved, list)


def test_inputs_from_a_factory(tmp_path: Path) -> None:
    file = write_factory(tmp_path / "ours", 5)
    (step,) = load_inputs(f"{file}:inputs")
    assert torch.equal(step["input"], torch.ones(2, 4))
    with pytest.raises(UsageError, match=r":number does not hold inputs\n.*int"):
        load_inputs(f"{file}:number")


class Runs:
    """Pickles to a call; a reader that unpickles writes the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        import os

        return os.system, (f"touch {self.marker}",)


def test_reading_inputs_never_runs_code(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({"x": Runs(marker)}, tmp_path / "a.pt")
    np.savez(tmp_path / "a.npz", x=np.array([Runs(marker)], dtype=object))
    for name in ("a.pt", "a.npz"):
        with pytest.raises(UsageError, match=rf"{name} cannot be read"):
            load_inputs(str(tmp_path / name))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"x", r"prompts are for a language model"),
        ("a.pt", b"PK nonsense", r"cannot be read"),
        ("a.safetensors", b"\xff" * 20, r"cannot be read"),
        ("a.npz", b"", r"cannot be read"),
        ("a.json", b"{", r"cannot be read\n.*damaged"),
        ("a.json", b'{"x": ["a"]}', r"cannot be read"),
        ("a.json", b"[]", r"does not hold inputs\n.*nothing"),
        ("a.json", b"[1, 2]", r"does not hold inputs\n.*int"),
    ],
)
def test_files_that_hold_no_inputs(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_inputs(str(tmp_path / name))


def test_inputs_that_are_not_there_get_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "inputs.json").write_text("{}")
    with pytest.raises(UnknownNameError, match=r"unknown inputs file[\s\S]*nearest: .*inputs.json"):
        load_inputs(str(tmp_path / "input.json"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architecture": "LlamaForCausalLM", "dtype": "float16", "mapping": {"tp_size": 1}}, "a checkpoint of"),
        ({"pretrained_config": {"architecture": "LlamaForCausalLM"}, "build_config": {}}, "an engine of"),
    ],
)
def test_f40_directories_of_tensorrt_llm(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=f"is {said} TensorRT-LLM") as raised:
        load_model(tmp_path)
    assert "Hugging Face" in str(raised.value.hint)


@pytest.mark.parametrize("config", ['{"model_type": "no-such", "architecture": "x"}', "[]", "{", '"x"'])
def test_other_configurations_are_left_to_transformers(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_model(tmp_path)


def test_f41_a_misspelled_name_asks_no_hub_for_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "tiny-llama").mkdir()
    (tmp_path / "tiny-llama" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    asked = []

    def fail(url: str, timeout: float) -> None:
        asked.append(timeout)
        raise ConnectionError("planted")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)
    with pytest.raises(UsageError, match=r"cannot be reached: planted[\s\S]*nearest: tiny-llama"):
        load_model("tiny-lama")
    assert asked == [5.0]
