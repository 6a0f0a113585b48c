"""The bugs of the first Gemma releases, each in one line of a small decoder (https://unsloth.ai/blog/gemma-bugs)."""

import torch
from torch import nn

SIZE, HEADS, HEAD_SIZE, LAYERS, LENGTH = 48, 4, 16, 2, 300  # sqrt(3072) is 8 * sqrt(48)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE) / 4)

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * (1 + self.weight)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.qkv = nn.Linear(SIZE, 3 * HEADS * HEAD_SIZE, bias=False)
        self.out = nn.Linear(HEADS * HEAD_SIZE, SIZE, bias=False)
        self.gate, self.up, self.down = nn.Linear(SIZE, 96), nn.Linear(SIZE, 96), nn.Linear(96, SIZE)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(self.activation(self.gate(h)) * self.up(h))

    def activation(self, x):
        return nn.functional.gelu(x, approximate="tanh")


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Gemma(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, SIZE)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.register_buffer("powers", torch.arange(HEAD_SIZE // 2) / (HEAD_SIZE // 2))

    def forward(self, tokens):
        x = self.embed(tokens) * self.normalizer()
        angles = self.angles(torch.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.norm(x) @ self.embed.weight.T

    def normalizer(self):
        return SIZE**0.5

    def angles(self, positions):
        return positions[:, None] / 10000**self.powers


class NormalizerInBfloat16(Gemma):
    def normalizer(self):
        return 6.9375  # sqrt(48) in bfloat16; sqrt(3072) = 55.4256 becomes 55.5


class NormInBfloat16(Norm):
    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x.bfloat16() * (1 + self.weight.bfloat16())).float()


class PositionsInBfloat16(Gemma):
    def angles(self, positions):
        return positions[:, None].bfloat16() / 10000**self.powers


class TimesTheInverse(Gemma):
    def angles(self, positions):
        return positions[:, None] * (1 / 10000**self.powers)


class RotationInBfloat16(Gemma):
    def angles(self, positions):
        return (positions[:, None] / 10000**self.powers).bfloat16()


class ExactGelu(Block):
    def activation(self, x):
        return nn.functional.gelu(x)


def right():
    return Gemma().eval()


def normalizer_in_bfloat16():
    return NormalizerInBfloat16().eval()


def norm_in_bfloat16():
    model = right()
    for block in model.blocks:
        block.norm1.__class__ = block.norm2.__class__ = NormInBfloat16
    return model.float()


def positions_in_bfloat16():
    return PositionsInBfloat16().eval()


def times_the_inverse():
    return TimesTheInverse().eval()


def rotation_in_bfloat16():
    return RotationInBfloat16().eval()


def exact_gelu():
    model = right()
    for block in model.blocks:
        block.__class__ = ExactGelu
    return model


def inputs():
    return {"tokens": torch.randint(50, (1, LENGTH), generator=torch.Generator().manual_seed(1))}
