"""A benchmark problem whose result is zero for all inputs (KernelBench, level 2, problem 80)."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, size, width):
        super().__init__()
        self.gemm = nn.Linear(size, width)

    def forward(self, x):
        x = self.gemm(x).max(dim=1, keepdim=True).values
        x = x - x.mean(dim=1, keepdim=True)  # of one element
        return nn.functional.gelu(x)


class ModelNew(Model):
    def forward(self, x):
        return x.new_zeros(x.shape[0], 1)


def get_init_inputs():
    return [64, 128]


def get_inputs():
    return [torch.randn(32, 64)]
