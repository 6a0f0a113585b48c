"""A compiler that computes another relu: Inductor with the mistake that its own tests plant."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def net():
    torch._inductor.config.cpp.inject_relu_bug_TESTING_ONLY = "accuracy"
    return Net().eval()


def inputs():
    return {"x": torch.randn(4, 16, generator=torch.Generator().manual_seed(1))}
