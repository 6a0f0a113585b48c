"""Dumps of other tools: files that the tools themselves wrote, or that follow what their sources write.

`made_by/` was written by Polygraphy 0.53.6 and msprobe 26.2.0 (level L0); transformers writes its files here.
"""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.model_debugging_utils import model_addition_debugger_context

import glassengine as glass
from glassengine.errors import CorruptError, UsageError
from glassengine.recording.formats.debug_tree import parse_tensor
from glassengine.recording.source import TensorSource, open_source
from glassengine.testing.models import llama

MADE_BY = Path(__file__).parent / "made_by"
IDS = torch.tensor([[5, 6, 7]])


def tensors(source: TensorSource, step: int = 0) -> dict[str, torch.Tensor]:
    return {entry.site: source.tensor(entry) for entry in source.entries if entry.step == step}


def reasons(source: TensorSource) -> dict[str, str]:
    return {item.site: item.reason for item in source.skipped}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with what transformers' debugger and our recorder write of one forward."""
    folder, model = tmp_path_factory.mktemp("traces"), llama()
    for use_repr in (True, False):
        path = str(folder / ("text" if use_repr else "files"))
        with model_addition_debugger_context(model, path, do_prune_layers=False, use_repr=use_repr):
            model.forward(input_ids=IDS)
    torch.set_printoptions(profile="default")
    with glass.record(model, folder / "recording"), torch.no_grad():
        model(input_ids=IDS)
    return folder


def test_a_debug_tree_with_files_names_what_a_recording_names(traces: Path) -> None:
    found, recorded = open_source(traces / "files"), glass.Recording.open(traces / "recording")
    assert not found.skipped and len(found.entries) == 70
    ours = {entry.site: recorded.tensor(entry) for entry in recorded.entries}
    for site, tensor in tensors(found).items():
        assert torch.equal(tensor, ours[site]), site
    order = [entry.site for entry in recorded.entries if entry.site in tensors(found)]
    assert [entry.site for entry in found.entries] == order
    # The original keeps results of leaves only.
    assert {site for site in ours if ":" not in site} - tensors(found).keys() == {
        "model.layers.0", "model.layers.1", "model.layers.0.mlp", "model.layers.1.mlp",
    }  # fmt: skip


def test_a_debug_tree_of_text_has_the_precision_of_its_print(traces: Path) -> None:
    text, files = open_source(traces / "text"), open_source(traces / "files")
    assert not text.skipped
    for entry in text.entries:
        tensor = text.tensor(entry)
        torch.testing.assert_close(tensor, tensors(files)[entry.site], rtol=1e-4, atol=0)
        assert entry.dtype == ("float16" if tensor.is_floating_point() else "int64")
    # Rounding to five digits is no finding, a planted error of a percent is one.
    assert glass.compare(traces / "files", traces / "text").ok
    assert glass.compare(traces / "text", traces / "recording", min_coverage=0.5).ok


def test_complex_numbers_have_the_precision_of_their_print(tmp_path: Path) -> None:
    torch.manual_seed(0)
    exact = torch.randn(6, dtype=torch.complex128)
    for name, tensor in (("single", exact.to(torch.complex64)), ("double", exact)):
        document = {"module_path": "M", "outputs": described(tensor, str(tensor).splitlines())}
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
        torch.save({".": tensor}, tmp_path / f"{name}.pt")
        result = glass.compare(tmp_path / f"{name}.pt", tmp_path / f"{name}.json")
        assert result.ok and result.counts["rounding"] == 1
    # What has all its digits, as our own trees have where there is no file for it, is given to the last one.
    with torch._tensor_str.printoptions(precision=17, sci_mode=True):
        document = {"module_path": "M", "outputs": described(exact, str(exact).splitlines())}
    (tmp_path / "full.json").write_text(json.dumps(document))
    found = open_source(tmp_path / "full.json")
    assert found.entries[0].dtype == "complex128" and torch.equal(found.tensor(found.entries[0]), exact)


def test_a_planted_error_in_printed_values_is_found(traces: Path, tmp_path: Path) -> None:
    shutil.copytree(traces / "text", tmp_path / "d")
    file = tmp_path / "d" / "LlamaForCausalLM_debug_tree_FULL_TENSORS.json"
    document = json.loads(file.read_text())
    norm = document["children"][0]["children"][-1]
    assert norm["module_path"] == "LlamaForCausalLM.model.norm"
    first = norm["outputs"]["value"][0]
    value = first[len("tensor([[[") : first.index(",")]
    norm["outputs"]["value"][0] = first.replace(value, f"{float(value) * 1.01:.4e}", 1)
    file.write_text(json.dumps(document))
    result = glass.compare(traces / "files", tmp_path / "d")
    assert not result.ok and result.first_divergence is not None
    assert result.first_divergence.site == "model.norm"


def test_summary_alone_and_elided_text_are_skipped_with_a_reason(traces: Path, tmp_path: Path) -> None:
    name = "LlamaForCausalLM_debug_tree"
    shutil.copy(traces / "text" / f"{name}_SUMMARY.json", tmp_path)
    found = open_source(tmp_path)
    assert not found.entries and len(found.skipped) == 70
    assert all("_FULL_TENSORS.json" in item.reason for item in found.skipped)
    shutil.copy(traces / "text" / f"{name}_FULL_TENSORS.json", tmp_path)
    assert len(open_source(tmp_path / f"{name}_SUMMARY.json").entries) == 70
    document = {"module_path": "M", "outputs": described(torch.zeros(2000), str(torch.zeros(2000)).splitlines())}
    (tmp_path / "other.json").write_text(json.dumps(document))
    assert reasons(open_source(tmp_path / "other.json")) == {
        ".": "only the edges of it are printed: record it with use_repr=False"
    }


def described(tensor: torch.Tensor, value: Any) -> dict[str, Any]:
    return {"shape": repr(tensor.shape), "dtype": repr(tensor.dtype), "value": value}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5), torch.tensor(7), torch.zeros(0), torch.zeros(0, 4), torch.zeros(2, 0),
        torch.tensor([True, False]), torch.tensor([1.0, float("nan"), float("inf"), -float("inf")]),
        torch.tensor([1e-30, 2.5e30]), torch.arange(24).reshape(2, 3, 4), torch.tensor([2**62, -(2**62)]),
        torch.tensor([1 + 2j, -3.5 - 0.25j]), torch.tensor([[0.5, 1.0]], dtype=torch.bfloat16),
        torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([255], dtype=torch.uint8),
        torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 2,
    ],
)  # fmt: skip
@pytest.mark.parametrize("sci_mode", [True, None])
def test_printed_tensors_are_read_back(tensor: torch.Tensor, sci_mode: bool | None) -> None:
    torch.set_printoptions(sci_mode=sci_mode)
    try:
        lines = str(tensor).splitlines()
    finally:
        torch.set_printoptions(profile="default")
    found = parse_tensor(lines, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    assert isinstance(found, torch.Tensor) and found.dtype == tensor.dtype
    torch.testing.assert_close(found, tensor.detach(), equal_nan=True, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "text",
    ["", "tensor(", "tensor([1, 2)", "tensor([1, 2]", "tensor([1, 2, 3])", "tensor([1, __import__('os')])",
     "tensor([1, 2]) and more", "tensor([[1, 2]", "tensor([1, 99999999999999999999999])"],
)  # fmt: skip
def test_text_that_is_no_print_is_refused(text: str) -> None:
    assert isinstance(parse_tensor([text], (2,), "int64"), str)


def test_calls_outputs_of_containers_and_caches_of_a_tree(tmp_path: Path) -> None:
    x = described(torch.ones(2), ["tensor([1., 1.])"])
    leaf = {"module_path": "M.a", "inputs": {"args": [x]}, "outputs": [x, {"k": x, "none": "None"}]}
    tree = {"module_path": "M", "inputs": {"args": [], "kwargs": {"x": x}}, "outputs": {"y": x}, "children": [leaf]}
    tree["children"] += [leaf, {"module_path": "M.b", "kv": {"key": x}}]
    (tmp_path / "x.json").write_text(json.dumps(tree))
    assert [entry.site for entry in open_source(tmp_path / "x.json").entries] == [
        ".:in.x", "a:in[0]", "a:out[0]", "a:out[1].k", "a@1:in[0]", "a@1:out[0]", "a@1:out[1].k", "b:kv.key", ".:out.y",
    ]  # fmt: skip


def test_values_that_the_original_overwrote_are_not_taken_for_those_of_an_earlier_call(tmp_path: Path) -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.a(self.a(x))

    torch.manual_seed(0)
    model, x = Twice(), torch.ones(1, 3)
    with model_addition_debugger_context(model, str(tmp_path), use_repr=False):
        model.forward(x)
    torch.set_printoptions(profile="default")
    source = open_source(tmp_path)
    assert torch.equal(tensors(source)["a@1"], model(x))
    assert reasons(source) == {
        "a:in[0]": "its file was overwritten by a@1:in[0]",
        "a": "its file was overwritten by a@1",
    }


def test_polygraphy_results() -> None:
    source = open_source(MADE_BY / "polygraphy_results.json")
    runner = "onnxrt-runner-N0-x"
    assert not source.skipped and {entry.step for entry in source.entries} == {0, 1}
    assert {name: value.tolist() for name, value in tensors(source).items()} == {
        f"{runner}.logits": [[0, 1, 2], [3, 4, 5]],
        f"{runner}.h/0": [1, 2],
        "pt.logits": [[1, 1, 1], [1, 1, 1]],
    }
    assert tensors(source)["pt.logits"].dtype is torch.bfloat16
    assert tensors(source, 1)[f"{runner}.h/0"].tolist() == [3, 4]
    inputs = open_source(MADE_BY / "polygraphy_inputs.json")
    assert [(entry.site, entry.step) for entry in inputs.entries] == [("x", 0), ("x", 1)]


@pytest.mark.parametrize("name", ["polygraphy_results.json", "polygraphy_inputs.json"])
def test_the_older_marks_of_polygraphy(name: str, tmp_path: Path) -> None:
    # As its decoder still reads them.
    old = re.sub(
        r'"polygraphy_class": "(\w+)"',
        r'"__polygraphy_encoded_\1": "polygraphy_serialized_json_type"',
        (MADE_BY / name).read_text(),
    )
    (tmp_path / name).write_text(old)
    assert open_source(tmp_path / name).entries == open_source(MADE_BY / name).entries


def results(**outputs: Any) -> dict[str, Any]:
    iteration = {"outputs": outputs, "runtime": 0.1, "runner_name": "r", "polygraphy_class": "IterationResult"}
    return {"lst": [["r", [iteration]]], "polygraphy_class": "RunResults"}


def encoded(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    np.save(file, array)
    return {"array": base64.b64encode(file.getvalue()).decode(), "polygraphy_class": "ndarray"}


def test_a_large_array_of_polygraphy_stays_in_the_file(tmp_path: Path) -> None:
    array = np.random.default_rng(0).normal(size=(300, 70)).astype(np.float32)
    lazy = {"values": encoded(array), "polygraphy_class": "LazyArray"}
    (tmp_path / "r.json").write_text(json.dumps(results(y=lazy, f=encoded(np.asfortranarray(array[:, ::2])))))
    source = open_source(tmp_path / "r.json")
    found = tensors(source)
    assert np.array_equal(found["y"].numpy(), array) and np.array_equal(found["f"].numpy(), array[:, ::2])
    assert source.entries[0].nbytes == array.nbytes


def test_missing_parts_of_polygraphy_results_are_skipped(tmp_path: Path) -> None:
    whole = encoded(np.zeros(9, np.float32))
    cut = {**whole, "array": whole["array"][:-8]}
    evil = io.BytesIO()
    np.save(evil, np.array([print], dtype=object), allow_pickle=True)
    objects = {"array": base64.b64encode(evil.getvalue()).decode()}
    document = results(cut=cut, evil=objects, text="abc", noise={"array": "!!!!"}, none=None, npz={"array": "UEsDBA=="})
    (tmp_path / "r.json").write_text(json.dumps(document))
    found = reasons(open_source(tmp_path / "r.json"))
    assert list(found) == ["cut", "evil", "text", "noise", "none", "npz"]
    assert "claims 36 bytes" in found["cut"] and "pickle" in found["evil"] and "not base64" in found["noise"]


def test_a_dump_of_msprobe() -> None:
    source = open_source(MADE_BY / "msprobe_tensor")
    found = tensors(source)
    assert list(found)[:4] == ["fc1:in[0]", "fc1", "fc1.weight:param", "fc1.bias:param"]
    computed = torch.nn.functional.linear(found["fc1:in[0]"], found["fc1.weight:param"], found["fc1.bias:param"])
    torch.testing.assert_close(found["fc1"], computed)
    hidden = found["layers.0:in[0]"]
    torch.testing.assert_close(found["layers.0.weight:grad"], found["layers.0:grad_out"].t() @ hidden)
    torch.testing.assert_close(
        found["layers.0:grad_in[0]"], found["layers.0:grad_out"] @ found["layers.0.weight:param"]
    )
    assert not source.skipped


def test_statistics_of_msprobe_are_listed() -> None:
    source = open_source(MADE_BY / "msprobe_statistics")
    assert not source.entries
    assert reasons(source)["fc1"] == "statistics only" and len(reasons(source)) == 15


def test_steps_ranks_and_hostile_names_of_msprobe(tmp_path: Path) -> None:
    for step in (0, 2):
        for rank in (0, 1):
            folder = tmp_path / f"step{step}" / f"rank{rank}"
            (folder / "dump_tensor_data").mkdir(parents=True)
            torch.save(torch.full((2,), 10.0 * step + rank), folder / "dump_tensor_data" / "a.pt")
            one = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "data_name": "a.pt"}
            out = [[{**one, "data_name": name}] for name in ("../../x.pt", "/etc/passwd", "a.exe", "b.pt", "x\0.pt")]
            data = {"Module.m.M.forward.1": {"output": [one, {**one, "shape": [3]}, {"type": "int", "value": 3}, *out]}}
            (folder / "dump.json").write_text(json.dumps({"task": "tensor", "data": data}))
    source = open_source(tmp_path)
    assert [(e.site, e.step, e.rank) for e in source.entries] == [
        ("m@1:out[0]", step, rank) for step in (0, 2) for rank in (0, 1)
    ]
    assert [float(source.tensor(entry)[0]) for entry in source.entries] == [0, 1, 20, 21]
    outside = "its file is outside of the directory"
    assert reasons(source) == {
        "m@1:out[1]": "its file holds float32[2], the dump says [3]",
        "m@1:out[3][0]": outside, "m@1:out[4][0]": outside, "m@1:out[7][0]": outside,
        "m@1:out[5][0]": "its file is not there", "m@1:out[6][0]": "its file is not there",
    }  # fmt: skip


def dumped(folder: Path, value: Any, **tags: Any) -> None:
    # As `_dump_single` of sglang/srt/debug_utils/dumper.py names and fills its files.
    name = "___".join(f"{key}={item}" for key, item in tags.items())
    torch.save({"value": value, "meta": {**tags, "world_size": 1}}, folder / f"{name}.pt")


def test_a_dump_of_sglang(tmp_path: Path) -> None:
    x = torch.arange(3.0)
    status = {"recompute_status": "disabled"}
    common: list[dict[str, Any]] = [
        {"name": "attn_out", **status, "layer_id": 3},
        {"name": "attn_out", **status, "layer_id": 3},
        {"name": "non_intrusive__model.layers.0.mlp.output", **status, "layer_id": 0},
        {"name": "non_intrusive__model.norm.inputs.0", **status},
        {"name": "non_intrusive__model.norm.inputs.hidden_states", **status},
        {"name": "non_intrusive__model.norm.output.1", **status},
        {"name": "non_intrusive__output", **status},
    ]
    for step in range(2):
        for index, tags in enumerate(common):
            dumped(tmp_path, x + index, step=step, rank=0, dump_index=10 * step + index + 1, **tags)
    dumped(tmp_path, 5, step=0, rank=1, dump_index=100, name="seqlen", **status)
    (tmp_path / "notes.txt").write_text("mine")
    # Older ones save the tensor alone.
    torch.save(x, tmp_path / "forward_pass_id=1___rank=1___name=old___dump_index=7.pt")
    source = open_source(tmp_path)
    sites = ["attn_out.layer_id=3", "attn_out.layer_id=3@1", "model.layers.0.mlp", "model.norm:in[0]",
             "model.norm:in.hidden_states", "model.norm:out[1]", "."]  # fmt: skip
    assert [(e.site, e.step, e.rank) for e in source.entries] == [
        *((site, 0, 0) for site in sites), ("seqlen", 0, 1), *((site, 1, 0) for site in sites), ("old", 1, 1),
    ]  # fmt: skip
    assert torch.equal(source.tensor(source.entries[9]), x + 1)
    assert reasons(source) == {
        "notes.txt": "not a file of the dumper: step=...___rank=...___name=...pt",
    }
    one = next(tmp_path.glob("*dump_index=3___*"))
    assert [entry.site for entry in open_source(one).entries] == ["model.layers.0.mlp"]


def test_json_of_another_kind(tmp_path: Path) -> None:
    for text in ("{}", "[]", "3", '{"module_path": 3}', '{"task": 1, "data": []}', '[{"a": 1}]'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(UsageError, match="holds no tensors"):
            open_source(tmp_path / "x.json")
    for text in ("", "{", '{"a', "\x00", '["' + "a" * 5000, "[" * 100_000):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(CorruptError, match="JSON"):
            open_source(tmp_path / "x.json")


def test_trees_of_several_models_keep_their_class_names(tmp_path: Path) -> None:
    x = described(torch.ones(2), ["tensor([1., 1.])"])
    for name in ("Encoder", "Decoder"):
        leaf = {"module_path": f"{name}.a", "inputs": {"args": [x]}, "outputs": x}
        tree = {"module_path": name, "inputs": {"args": [], "kwargs": {"x": x}}, "children": [leaf]}
        (tmp_path / f"{name}_debug_tree_FULL_TENSORS.json").write_text(json.dumps(tree))
    assert [entry.site for entry in open_source(tmp_path).entries] == [
        "Decoder:in.x", "Decoder.a:in[0]", "Decoder.a", "Encoder:in.x", "Encoder.a:in[0]", "Encoder.a",
    ]  # fmt: skip
    one = open_source(tmp_path / "Encoder_debug_tree_FULL_TENSORS.json")
    assert [entry.site for entry in one.entries] == [".:in.x", "a:in[0]", "a"]
