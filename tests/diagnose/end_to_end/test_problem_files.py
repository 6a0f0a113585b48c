"""Problem files as KernelBench has them: Model, ModelNew, get_inputs, get_init_inputs."""

from __future__ import annotations

from pathlib import Path

import glassengine as glass

PROBLEM = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x, y):
        return torch.softmax(self.linear(x) + y, dim=-1)


def get_inputs():
    return [torch.randn(16, 64), torch.randn(16, 33)]


def get_init_inputs():
    return [64, 33]
"""
SOLUTION = """
import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x, y):
        e = torch.exp(self.linear(x) + y)
        return e / e[..., :END].sum(-1, keepdim=True)
"""


def test_a_solution_is_judged_beside_its_problem(tmp_path: Path) -> None:
    (tmp_path / "problem.py").write_text(PROBLEM, encoding="utf-8")
    for name, end in (("right", "33"), ("wrong", "32")):
        (tmp_path / f"{name}.py").write_text(SOLUTION.replace("END", end), encoding="utf-8")
        found = glass.check(f"{tmp_path}/problem.py:Model", candidate=f"{tmp_path}/{name}.py:ModelNew")
        assert found.ok == (name == "right")
        assert found.first_divergence is None or "softmax" in found.first_divergence.site


PLAIN = """
import torch


class Plain(torch.nn.Module):
    def forward(self, x):
        return x.tanh()


def given():
    return {"x": torch.ones(2)}
"""


def test_a_class_without_arguments_gets_none_of_an_earlier_problem(tmp_path: Path) -> None:
    for name, text in (("problem", PROBLEM), ("plain", PLAIN)):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    glass.check(f"{tmp_path}/problem.py:Model", candidate=f"{tmp_path}/problem.py:Model")
    plain = f"{tmp_path}/plain.py:Plain"
    assert glass.check(plain, candidate=plain, inputs=f"{tmp_path}/plain.py:given").ok
