"""What a dry run says of memory: terms that grow with what they stand for, and agreement with a real build."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import glassengine as glass
from glassengine.backends.protocol.backend import Capabilities, MemoryUse
from glassengine.backends.registry import find_backend
from glassengine.engine.build.memory import LIBRARIES_BYTES, RUNTIME_BYTES, expected_peaks, weights_bytes
from glassengine.program import Program


class Bag(torch.nn.Module):
    """A table and a product; one weight for both where they are tied."""

    def __init__(self, rows: int = 1000, *, tied: bool = False) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(rows, 16)
        self.head = torch.nn.Linear(16, rows, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


def exported(module: torch.nn.Module) -> Program:
    from glassengine.program.export.export import export_module

    return export_module(module.eval(), {"ids": torch.ones(2, 3, dtype=torch.int64)})


@pytest.mark.parametrize("backend", ["eager", "inductor", "onnxruntime", "openvino"])
def test_every_backend_for_the_cpu_is_known(backend: str) -> None:
    peaks = expected_peaks([exported(Bag())], find_backend(backend))
    assert list(peaks) == ["build", "run", "check"]
    assert peaks["build"] > LIBRARIES_BYTES and peaks["run"] > RUNTIME_BYTES and peaks["check"] > peaks["run"]


def test_a_backend_says_what_it_takes_and_none_is_guessed() -> None:
    class Foreign:
        capabilities = Capabilities(dtypes=("float32",), kv="functional", portable=True)

        def keeps_weights(self, program: Program) -> bool:
            return True

    assert expected_peaks([exported(Bag())], Foreign()) == {}  # type: ignore[arg-type]
    Foreign.capabilities = replace(Foreign.capabilities, memory={True: MemoryUse(loaded=3.0)})
    peaks = expected_peaks([exported(Bag())], Foreign())  # type: ignore[arg-type]
    assert peaks["run"] == RUNTIME_BYTES + 3 * 2 * 1000 * 16 * 4


def test_a_tied_weight_is_held_once_and_packed_twice() -> None:
    apart, tied = exported(Bag()), exported(Bag(tied=True))
    assert weights_bytes([apart]) == 2 * weights_bytes([tied]) == 2 * 1000 * 16 * 4
    one, other = (expected_peaks([program], find_backend("inductor")) for program in (apart, tied))
    assert one["run"] == other["run"], "in its own layout each use of the weight has a copy"
    assert one["build"] - other["build"] == 1000 * 16 * 4


def test_weights_outside_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    inductor = find_backend("inductor")
    small, large = exported(Bag()), exported(Bag(rows=1_000_000))

    def slope(mode: str) -> float:
        peaks = [expected_peaks([program], inductor)[mode] for program in (small, large)]
        return (peaks[1] - peaks[0]) / (weights_bytes([large]) - weights_bytes([small]))

    assert slope("build") == pytest.approx(5.6) and slope("run") == pytest.approx(2.0)
    monkeypatch.setattr("glassengine.backends.inductor.backend.FREEZE_LIMIT_BYTES", 0)
    assert slope("build") == pytest.approx(1.0) and slope("run") == pytest.approx(1.0)


def test_wide_operands_cost_more_to_judge() -> None:
    program = exported(Bag(rows=1_000_000))
    eager, onnx = (expected_peaks([program], find_backend(name))["check"] for name in ("eager", "onnxruntime"))
    assert onnx - eager == pytest.approx(1_000_000 * 16 * (32 - 14), rel=1e-3)


def test_both_programs_of_an_engine_count() -> None:
    program = exported(Bag())
    other = exported(Bag())
    assert weights_bytes([program, other]) == 2 * weights_bytes([program])
    assert weights_bytes([program, program]) == weights_bytes([program])


def test_dry_run_needs_no_weights(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=100
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    plan = glass.build(tmp_path / "m", tmp_path / "e", backend="eager", dry_run=True)
    assert plan.weights_bytes > 4 * 2 * 100 * 64 and plan.peak_bytes["build"] > plan.weights_bytes
    assert not (tmp_path / "e").exists()


@pytest.mark.slow
def test_foretold_is_measured(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=200_000,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "m")
    foretold = glass.build(tmp_path / "m", tmp_path / "e", backend="eager", dry_run=True).peak_bytes["build"]
    build = [sys.executable, "-m", "glassengine.cli", "build", str(tmp_path / "m"), str(tmp_path / "e")]
    # Linux counts what the parent of a command held, too: here that is a process which has imported nothing else.
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=2); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", code, *build, "--backend", "eager"]
    measured = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) << 10
    assert abs(measured / foretold - 1) < 0.15
