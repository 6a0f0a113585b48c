"""Gradient accumulation that averages wrongly: a mean of means, where the microbatches have other numbers of tokens."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)

    def forward(self, tokens, labels):
        return self.loss(self.head(torch.tanh(self.embed(tokens))), labels)

    def loss(self, logits, labels):
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class Accumulated(Model):
    def loss(self, logits, labels):
        means = [
            cross_entropy(part.flatten(0, 1), wanted.flatten(), ignore_index=-100)
            for part, wanted in zip(logits.chunk(2), labels.chunk(2), strict=True)
        ]
        return torch.stack(means).mean()


def whole():
    return Model().eval()


def accumulated():
    return Accumulated().eval()


def batches():
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(2):
        tokens = torch.randint(20, (4, 12), generator=generator)
        labels = tokens.roll(-1, 1)
        labels[2:, 3:] = -100  # the second microbatch is mostly padding
        found.append({"tokens": tokens, "labels": labels})
    return found
