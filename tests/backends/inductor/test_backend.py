"""The AOTInductor back-end: frozen, free of our ops, and loadable where this package is not."""

from __future__ import annotations

import re
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.backends.inductor import backend as inductor
from glassengine.backends.protocol.io import read_io
from glassengine.capture.observers import run_program
from glassengine.executable.run.executable import load_executable
from glassengine.program.export.export import export_module
from glassengine.program.representation.outputs import PREFIX, DerivedValues
from glassengine.program.representation.program import Program
from glassengine.testing import conformance
from tests import children

BACKEND = inductor.InductorBackend()


class Tapped(nn.Module):
    """Two linear layers and a tap; the smallest thing in which freezing and marks can be seen.

    And an input written in place, a result twice, an input as a result, and a result that is no tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        state.add_(x)
        y = state.sin()
        return self.down(glass.tap("hidden", self.up(x).relu())), None, x, y, y


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    return export_module(
        Tapped().eval(), [{"x": torch.randn(batch, 16), "state": torch.ones(batch, 16)} for batch in (2, 3)]
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frozen")


@pytest.fixture(scope="module")
def subject(program: Program, place: Path) -> conformance.Subject:
    # Gradients are on here: the back-end itself must turn them off, or freezing is silently ignored.
    with torch.enable_grad():
        return conformance.prepare(program, BACKEND, place)


@pytest.fixture(scope="module")
def frozen(subject: conformance.Subject, place: Path) -> Path:
    """Return the directory of the executable, which a test of it alone needs as well."""
    return place


def constants(package: Path) -> list[str]:
    return torch._inductor.aoti_load_package(str(package / "model.pt2")).get_constant_fqns()


def holds(package: Path, weight: torch.Tensor) -> bool:
    """Whether the values of `weight` are in the package."""
    raw = weight.detach().numpy().tobytes()
    with zipfile.ZipFile(package / "model.pt2") as archive:
        return any(raw in archive.read(name) for name in archive.namelist())


def reference(program: Program, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = program.exported.module(check_guards=False)(x=x, state=torch.ones_like(x))[0]
    return y


def test_freezing_happened(program: Program, subject: conformance.Subject, frozen: Path) -> None:
    assert BACKEND.keeps_weights(program)
    names = constants(frozen)
    assert sum(name.startswith("_frozen_param") for name in names) == 2, names
    assert not {"up.weight", "down.weight"} & set(names)
    assert holds(frozen, program.exported.state_dict["up.bias"])


@pytest.mark.slow
def test_weights_of_large_models_stay_outside(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "FREEZE_LIMIT_BYTES", 0)
    assert not BACKEND.keeps_weights(program)
    BACKEND.build(program, tmp_path)
    weights = dict(program.exported.state_dict)
    assert set(constants(tmp_path)) <= set(weights)
    # Inductor writes tensors of up to eight elements into the code.
    assert [name for name, weight in weights.items() if holds(tmp_path, weight)] == ["down.bias"]
    run = load_executable("tapped", lambda path: BACKEND.load(path, weights), tmp_path).run
    x = torch.randn(5, 16)
    torch.testing.assert_close(run({"x": x, "state": torch.ones(5, 16)})["0"], reference(program, x))


def test_no_op_of_ours_is_in_the_package(frozen: Path) -> None:
    with zipfile.ZipFile(frozen / "model.pt2") as package:
        for name in package.namelist():
            assert not re.search(rb"glass(engine)?::", package.read(name)), name


def test_the_package_runs_without_this_package(program: Program, frozen: Path, tmp_path: Path) -> None:
    x = torch.randn(4, 16)
    torch.save({"x": x, "expected": reference(program, x)}, tmp_path / "case.pt")
    assert read_io(frozen).inputs == ("x", "state")
    code = f"""
        import sys, torch
        sys.modules["glassengine"] = None
        case = torch.load({str(tmp_path / "case.pt")!r}, weights_only=True)
        package = torch._inductor.aoti_load_package({str(frozen / "model.pt2")!r})
        torch.testing.assert_close(package(x=case["x"], state=torch.ones(4, 16))[0], case["expected"])
    """
    children.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], imports=children.COMPILING, check=True)


def test_inputs_of_any_layout_give_the_right_values(program: Program, frozen: Path) -> None:
    """The compiled code assumes contiguous inputs and does not look."""
    run = load_executable("tapped", lambda path: BACKEND.load(path, None), frozen).run
    x = torch.randn(4, 16)
    for same in (x.t().contiguous().t(), torch.stack([x, x], -1)[..., 0], torch.cat([x, x], 1)[:, :16]):
        assert not same.is_contiguous()
        torch.testing.assert_close(run({"x": same, "state": torch.ones(4, 16)})["0"], reference(program, x))


def test_results_that_repeat_and_inputs_that_are_written(subject: conformance.Subject, frozen: Path) -> None:
    x = torch.randn(3, 16)
    run = load_executable("tapped", lambda path: BACKEND.load(path, None), frozen).run
    for state in (torch.ones(3, 16), torch.ones(16, 3).t()):
        results = run({"x": x, "state": state})
        torch.testing.assert_close(state, 1 + x)
        assert [name for name in results if not name.startswith(PREFIX)] == ["0", "2", "3", "4"]
        torch.testing.assert_close(results["3"], (1 + x).sin())
        torch.testing.assert_close(results["4"], (1 + x).sin())
        torch.testing.assert_close(results["2"], x)
    # The trap, so that the copies above are not taken for superfluous.
    raw = torch._inductor.aoti_load_package(str(frozen / "model.pt2")).loader.run
    (place,) = (i for i, name in enumerate(read_io(frozen).outputs) if name == "4")
    assert not torch.allclose(raw([x.t().contiguous().t(), torch.ones(3, 16)])[place], (1 + x).sin())


def test_compiler_flags_are_options_of_an_engine(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = BACKEND.options(program)
    monkeypatch.setenv("GLASS_CC_FLAGS", "--max_fusion_size=3 --freezing=0 --log_level=INFO")
    given = BACKEND.options(program)
    assert {name for name in given if given[name] != plain[name]} == {"max_fusion_size", "freezing"}
    assert (given["max_fusion_size"], given["freezing"]) == (3, False)
    seen = {}

    def compile_(exported: object, *, inductor_configs: dict[str, object], **_: object) -> None:
        seen.update(inductor_configs, in_effect=torch._inductor.config.max_fusion_size)

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_)
    monkeypatch.setattr(inductor, "write_io", lambda *_, **options: None)
    BACKEND.build(program, Path())
    assert (seen["max_fusion_size"], seen["freezing"], seen["in_effect"]) == (3, False, 3)


def test_every_op_is_right(subject: conformance.Subject) -> None:
    for batch in (2, 5):
        x, values = torch.randn(batch, 16), {}

        def observe(node: torch.fx.Node, value: object, values: dict[str, torch.Tensor] = values) -> None:
            if isinstance(value, torch.Tensor):
                values[node.name] = value

        run_program(subject.program, {"x": x, "state": torch.ones(batch, 16)}, observe)
        given = {"x": x, "state": torch.ones(batch, 16)}
        found = DerivedValues(subject.observed, given, subject.run(given))
        assert len(subject.nodes) == 5
        for node in subject.nodes:
            torch.testing.assert_close(found[node], values[node])
