"""The ONNX back-end: names, caches in place, refusals, and that running needs nothing but onnxruntime."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir
import pytest
import torch
from torch import nn

from glassengine.backends.onnx import export as onnx_export
from glassengine.backends.onnxruntime import OnnxRuntimeBackend
from glassengine.errors import BackendError, GlassError
from glassengine.executable.run.executable import load_executable
from glassengine.program.export.export import export_causal_lm, export_module
from glassengine.program.representation.outputs import add_outputs
from glassengine.program.representation.program import Program
from glassengine.testing import conformance, models
from tests import children

MakeSubject = Callable[..., conformance.Subject]
MakeProgram = Callable[..., Program]
BACKEND = OnnxRuntimeBackend()


@pytest.fixture(scope="module")
def built(program_of: MakeProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Llama without debug outputs, built."""
    directory = tmp_path_factory.mktemp("llama")
    BACKEND.build(program_of("llama"), directory)
    return directory


def step_inputs(program: Program, batch: int = 1, length: int = 8) -> dict[str, torch.Tensor]:
    assert program.layout is not None
    return {
        "input_ids": torch.arange(3, 3 + batch * 4).reshape(batch, 4),
        "attention_mask": torch.ones((batch, length), dtype=torch.int64),
        "position_ids": torch.arange(4).expand(batch, 4),
        "cache_position": torch.arange(4),
        **program.layout.allocate(batch, length, torch.float32),
    }


def build_module(module: nn.Module, directory: Path, *steps: dict[str, torch.Tensor]):
    program = export_module(module.eval(), list(steps))
    BACKEND.build(program, directory)
    return BACKEND.load(directory, None)


# -- names -------------------------------------------------------------------------------------------------------------


def test_graph_has_the_programs_names_and_no_fixed_size(built: Path, program_of: MakeProgram) -> None:
    program = program_of("llama")
    graph = onnx.load(built / "model.onnx", load_external_data=False).graph
    assert [value.name for value in graph.input] == [port.name for port in program.inputs]
    assert {value.name for value in graph.output} == set(program.output_nodes)
    for value, port in zip(graph.input, program.inputs, strict=True):
        for size, expected in zip(value.type.tensor_type.shape.dim, port.shape, strict=True):
            assert bool(size.dim_param) == isinstance(expected, str), (port, value)


def test_one_graph_and_one_data_file(built: Path) -> None:
    assert {path.name for path in built.iterdir()} == {"model.onnx", "model.onnx.data", "io.json"}


def test_building_and_loading_print_nothing(
    program_of: MakeProgram, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    BACKEND.build(program_of("gpt2"), tmp_path)
    BACKEND.load(tmp_path, None)
    assert capfd.readouterr() == ("", "")


class _Clash(nn.Module):
    """A result is called like the node of another value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, relu: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layer(relu)
        return {"linear": hidden.relu(), "relu_1": hidden, "again": hidden, "mask": hidden > 0}


def test_results_called_like_inner_values(tmp_path: Path) -> None:
    module = _Clash()
    data = torch.randn(3, 4)
    outputs = build_module(module, tmp_path, {"relu": data})({"relu": data})
    for name, expected in module(data).items():
        assert outputs[name].dtype == expected.dtype
        torch.testing.assert_close(outputs[name], expected, check_stride=False)


class _Passthrough(nn.Module):
    def forward(self, x: torch.Tensor, scale: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x * scale


def test_plain_values_and_results_that_are_inputs(tmp_path: Path) -> None:
    data = torch.randn(3, 4)
    outputs = build_module(_Passthrough(), tmp_path, {"x": data, "scale": 3})({"x": data})
    first, second = outputs.values()
    assert torch.equal(first, data)
    assert torch.equal(second, data * 3)


# -- attention ---------------------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.settings = settings

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **self.settings)


@pytest.mark.parametrize(
    ("heads", "groups", "mask", "settings"),
    [
        (4, 4, None, {}),
        (4, 4, None, {"is_causal": True}),
        (4, 4, None, {"scale": 0.3}),
        (4, 2, None, {"enable_gqa": True}),
        (4, 1, None, {"enable_gqa": True, "is_causal": True}),
        (4, 2, "bool", {"enable_gqa": True}),
        (4, 4, "float", {}),
        (4, 4, "row of nothing", {}),
    ],
)
def test_attention(tmp_path: Path, heads: int, groups: int, mask: str | None, settings: dict[str, object]) -> None:
    def inputs(batch: int, new: int, keys: int) -> dict[str, torch.Tensor]:
        shapes = {"query": (batch, heads, new, 8), "key": (batch, groups, keys, 8), "value": (batch, groups, keys, 6)}
        made = {name: torch.randn(shape) for name, shape in shapes.items()}
        if mask is not None:
            allowed = torch.rand((batch, 1, new, keys)) > 0.3
            allowed[..., 0] = True
            if mask == "row of nothing":
                allowed[0, 0, -1] = False
            made["mask"] = torch.randn(allowed.shape) if mask == "float" else allowed
        return made

    run = build_module(_Attention(**settings), tmp_path, inputs(2, 3, 5), inputs(3, 4, 7))
    for sizes in ((1, 3, 3), (2, 1, 9), (3, 5, 5)):
        data = inputs(*sizes)
        (actual,) = run(data).values()
        torch.testing.assert_close(actual, _Attention(**settings)(**data), rtol=1e-5, atol=1e-5)


def test_complex_values_are_complex(tmp_path: Path) -> None:
    class Spectrum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(x, dim=-1).real

    x = torch.randn(2, 8)
    program = export_module(Spectrum(), {"x": x})
    node = next(
        node.name for node in program.graph.nodes if node.op == "call_function" and node.meta["val"].is_complex()
    )
    program = add_outputs(program, [node])
    BACKEND.build(program, tmp_path)
    results = BACKEND.load(tmp_path, None)({"x": x})
    torch.testing.assert_close(results[f"dbg.{node}"], torch.fft.fft(x, dim=-1))
    torch.testing.assert_close(results["output"], torch.fft.fft(x, dim=-1).real)


def test_parts_of_an_op_that_the_converter_takes_apart(tmp_path: Path) -> None:
    class Grid(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, columns = torch.meshgrid(x, x + 1, indexing="ij")
            return rows * columns

    x = torch.randn(3)
    program = export_module(Grid(), {"x": x})
    parts = [node.name for node in program.graph.nodes if "getitem" in node.name]
    program = add_outputs(program, parts)
    BACKEND.build(program, tmp_path)
    results = BACKEND.load(tmp_path, None)({"x": x})
    expected = torch.meshgrid(x, x + 1, indexing="ij")
    assert [torch.equal(results[f"dbg.{part}"], value) for part, value in zip(parts, expected, strict=True)] == [
        True
    ] * 2
    # The program is as it was.
    assert set(program.output_nodes.values()) >= set(parts)
    assert {spec.arg.name for spec in program.exported.graph_signature.output_specs} >= set(parts)


def test_programs_that_onnx_cannot_express_have_one_reason(tmp_path: Path) -> None:
    class Turns(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(torch.view_as_complex(x).unsqueeze(1))

    program = export_module(Turns(), {"x": torch.randn(2, 3, 2)})
    with pytest.raises(
        BackendError, match=r"cannot be converted to ONNX\n.*unsqueeze.*complex.*\n.*--backend"
    ) as raised:
        BACKEND.build(program, tmp_path)
    assert "\x1b" not in str(raised.value)


def test_attention_with_dropout_is_refused(tmp_path: Path) -> None:
    data = {name: torch.randn(2, 4, 3, 8) for name in ("query", "key", "value")}
    with pytest.raises(BackendError, match=r"attention with dropout is random"):
        build_module(_Attention(dropout_p=0.5), tmp_path, data)


# -- caches ------------------------------------------------------------------------------------------------------------


def test_every_cache_is_updated_in_place(built: Path) -> None:
    metadata = {p.key: p.value for p in onnx.load(built / "model.onnx", load_external_data=False).metadata_props}
    caches = [f"past_{kind}_{layer}" for layer in (0, 1) for kind in ("key", "value")]
    assert metadata[onnx_export.IN_PLACE_KEY].split() == caches


CACHES = {"past": "present"}
WRITE = "present = ScatterElements <axis = 0> (past, slots, new)"
SIGNATURE = "(float[T] past, int64[S] slots, float[S] new) => (float[T] present, float[N] other)"


@pytest.mark.parametrize(
    ("body", "is_safe"),
    [
        (f"{WRITE} other = Neg(present)", True),
        (f"size = Shape(past) {WRITE} other = Expand(new, size)", True),
        (f"{WRITE} other = Neg(past)", False),
        ("copy = Identity(past) present = ScatterElements <axis = 0> (copy, slots, new) other = Neg(present)", False),
        (f"{WRITE} other = ScatterElements <axis = 0> (past, slots, new)", False),
        ("written = ScatterElements <axis = 0> (past, slots, new) present = Neg(written) other = Neg(new)", False),
        ("present = ScatterElements <axis = 0> (new, slots, past) other = Neg(new)", False),
    ],
)
def test_values_that_may_share_a_buffer(body: str, is_safe: bool) -> None:
    text = f'<ir_version: 9, opset_import: ["" : 20]> graph {SIGNATURE} {{ {body} }}'
    graph = onnx_ir.from_proto(onnx.parser.parse_model(text)).graph
    assert onnx_export.in_place_caches(graph, CACHES) == (["past"] if is_safe else [])


def test_caches_that_cannot_share_a_buffer_are_right_too(
    program_of: MakeProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_export, "in_place_caches", lambda graph, caches: [])
    subject = conformance.prepare(program_of("llama"), BACKEND, tmp_path)
    for strided in (False, True):
        report = conformance.check_generation(subject, batch=2, left_padding=3, num_decode_steps=1, strided=strided)
        assert report.ok, report.findings[:5]


class _Counter(nn.Module):
    """State that comes in as an argument and is written in place: one name for the input and the result."""

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return state * 2


def test_state_of_a_plain_module_is_written(tmp_path: Path) -> None:
    run = build_module(_Counter(), tmp_path, *({"x": torch.ones(n), "state": torch.zeros(n)} for n in (2, 3)))
    state = torch.zeros(5)
    for count in (1, 2):
        outputs = run({"x": torch.ones(5), "state": state})
        assert torch.equal(state, torch.full((5,), float(count)))
        assert torch.equal(outputs["output"], 2 * state)
        assert set(outputs) == {"output"}


def test_results_outlive_the_session(built: Path, program_of: MakeProgram) -> None:
    run = BACKEND.load(built, None)
    inputs = step_inputs(program_of("llama"))
    logits = run(inputs)["logits"]
    copy = logits.clone()
    for _ in range(3):
        run(inputs)
    del run
    assert torch.equal(logits, copy)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_bfloat16_is_refused_before_converting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **kwargs: pytest.fail("converted"))
    program = export_causal_lm(models.gpt2().bfloat16())
    with pytest.raises(BackendError, match=r"no bfloat16 kernels") as error:
        BACKEND.build(program, tmp_path)
    assert "--dtype float32" in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    state = BACKEND.available()
    assert not state.available
    assert state.reason.startswith(package)
    assert state.install == "pip install 'glassengine[onnx]'"


def test_loading_without_onnxruntime_says_what_to_install(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(BackendError, match=r"glassengine\[onnx\]"):
        BACKEND.load(built, None)


def test_running_needs_neither_onnx_nor_onnxscript(built: Path) -> None:
    code = f"""
        import sys
        for name in ("onnx", "onnxscript", "onnx_ir", "transformers.models"):
            sys.modules[name] = None
        from pathlib import Path
        import torch
        from glassengine.backends.onnxruntime import OnnxRuntimeBackend
        run = OnnxRuntimeBackend().load(Path({str(built)!r}), None)
        caches = {{f"past_{{kind}}_{{i}}": torch.zeros(1, 2, 8, 16) for i in (0, 1) for kind in ("key", "value")}}
        ids = torch.tensor([[3, 4, 5]])
        logits = run(dict(input_ids=ids, attention_mask=torch.ones(1, 8, dtype=torch.int64),
                          position_ids=torch.arange(3)[None], cache_position=torch.arange(3), **caches))["logits"]
        assert logits.shape == (1, 3, 272) and caches["past_key_1"][:, :, :3].all()
    """
    children.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=600)


@pytest.mark.parametrize("location", ["../secret.data", "/etc/hostname"])
def test_weights_outside_of_the_directory_are_not_read(built: Path, tmp_path: Path, location: str) -> None:
    inside = tmp_path / "engine"
    inside.mkdir()
    (tmp_path / "secret.data").write_bytes((built / "model.onnx.data").read_bytes())
    (inside / "io.json").write_bytes((built / "io.json").read_bytes())
    model = onnx.load(built / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    (inside / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(GlassError, match="outside of the model directory"):
        load_executable("llama", lambda path: BACKEND.load(path, None), inside)


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data", "io.json"])
def test_damaged_files_are_errors(built: Path, tmp_path: Path, file: str) -> None:
    for path in built.iterdir():
        data = path.read_bytes()
        (tmp_path / path.name).write_bytes(data[: len(data) // 2] if path.name == file else data)
    with pytest.raises(GlassError, match=r"loading 'llama' failed|(model.onnx|io.json) is damaged|bytes"):
        load_executable("llama", lambda path: BACKEND.load(path, None), tmp_path)


class NearlyNeutral(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        norm = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8)
        return {"norm": norm, "product": x * 1.000004, "quotient": x / 0.999996, "sum": x - 1e-9, "same": (x + 0) * 1}


def test_constants_that_are_nearly_0_or_1_are_kept(tmp_path: Path) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) * 1e-4
    x[0] = 0
    BACKEND.build(export_module(NearlyNeutral(), [{"x": x}, {"x": x[:2]}]), tmp_path)
    found, expected = BACKEND.load(tmp_path, None)({"x": x}), NearlyNeutral()(x)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=3e-7, atol=0, msg=name)
