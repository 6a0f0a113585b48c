"""A small network, and ports and trainings of it that are wrong; a language model whose decode steps are wrong."""

import torch
from torch import nn

import glassengine as glass
from glassengine.testing import models


class Norm(nn.Module):
    """Root mean square normalization."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Block(nn.Module):
    """Normalization and two products, beside what goes past them."""

    def __init__(self, eps=1e-6):
        super().__init__()
        self.norm, self.up, self.down = Norm(32, eps), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class BlockOfLogarithms(Block):
    """Takes the logarithm of what is negative."""

    def forward(self, x):
        y = self.down(nn.functional.silu(self.up(self.norm(x))))
        return x + torch.where(y > 0.4, torch.log(-y.abs()), y)


class Net(nn.Module):
    """Four blocks and a head."""

    def __init__(self, wrong_block=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(1e-3 if number == wrong_block else 1e-6) for number in range(4))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def right():
    return Net().eval()


def wrong_eps():
    return Net(wrong_block=2).eval()


def makes_nan():
    net = Net().eval()
    net.layers[1].__class__ = BlockOfLogarithms
    return net


def inputs():
    return {"x": torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(1))}


def batches():
    return [{"x": torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(seed))} for seed in range(3)]


def mean(y):
    return y.square().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sgd_with_momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def llama():
    return models.llama()


def wrong_when_decoding():
    """Return the language model, with half a rotation where it reads one token."""
    model = models.llama()
    attention = model.model.layers[1].self_attn
    own = attention.forward

    def forward(hidden_states, position_embeddings=None, **rest):
        cos, sin = position_embeddings
        if hidden_states.shape[1] == 1:
            sin = sin * 0.5
        return own(hidden_states, position_embeddings=(cos, sin), **rest)

    attention.forward = forward
    return model


def watched(directory, rate=0.01):
    """Watch a training whose learning rate is another from step 40."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.randn(64, 8)
    with glass.record(net, directory, watch=True):
        for step in range(80):
            optimizer.param_groups[0]["lr"] = rate if step >= 40 else 0.01
            optimizer.zero_grad()
            (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
