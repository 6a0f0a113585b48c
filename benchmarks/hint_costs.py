"""Seconds of processor that naming the kind of a mistake costs at hidden 512: one line for each mistake of a port.

python -m benchmarks hint_costs             every mistake, about four minutes of one core
python -m benchmarks hint_costs gelu noise  those named

A Llama of two layers (hidden 512, four heads of 128, 2 x 64 tokens) is written again by hand, with mistakes that the
catalog has, and with some that it does not have: nothing explains these, so that all of it is tried. Time is that of
the thread, which is the only one.
"""

from __future__ import annotations

import copy
import importlib
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from benchmarks.report import keep, surroundings
from glassengine.diagnose import check
from glassengine.judge.hypotheses.hints import Hints
from glassengine.results import Comparison

MOST_SECONDS = 2.0
"""Of processor, for one named divergence."""
_HIDDEN, _HEADS, _SHARED = 512, 4, 2
_WRITTEN = Path(__file__).parent.parent / "tests" / "diagnose" / "end_to_end"
EXPLAINED = (
    "eps", "gain plus one", "theta", "neighbors", "keys in turn", "no mask", "no scale", "gate and up", "gelu",
    "residual of the norm", "rows of q",
)  # fmt: skip
UNEXPLAINED = ("noise on the scores", "noise on the gate", "cubic norm", "wave in the activation", "noisy logits")


def _written() -> tuple[Any, Any]:
    """Return the module of ports by hand, in the sizes of this benchmark, and the port with more mistakes."""
    sys.path.insert(0, str(_WRITTEN))
    written: Any = importlib.import_module("hand_written")
    written.HIDDEN, written.HEADS, written.SHARED, written.WIDTH = _HIDDEN, _HEADS, _SHARED, _HIDDEN // _HEADS

    class Port(written.Llama):  # type: ignore[misc,name-defined]
        def norm(self, x: Tensor, weight: Tensor) -> Any:
            if self.mistake == "cubic norm":
                return x / (x.abs().pow(3).mean(-1, keepdim=True) + 1e-6).pow(1 / 3) * weight
            return super().norm(x, weight)

        def attention(self, x: Tensor, layer: Any) -> Any:
            if self.mistake == "noise on the scores":
                own = layer.self_attn
                q, k, v = (
                    written.heads(own.q_proj(x)),
                    *(written.heads(p(x), _SHARED) for p in (own.k_proj, own.v_proj)),
                )
                q, k = self.rotated(q), self.rotated(k)
                k, v = (t.repeat_interleave(_HEADS // _SHARED, 1) for t in (k, v))
                scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
                scores = scores + 0.3 * torch.randn(scores.shape, generator=torch.Generator().manual_seed(7))
                scores = scores.masked_fill(~written.causal(x.shape[1]), torch.finfo(scores.dtype).min)
                return own.o_proj(written.joined(F.softmax(scores, -1) @ v))
            return super().attention(x, layer)

        def mlp(self, x: Tensor, own: Any) -> Any:
            if self.mistake == "noise on the gate":
                gate = own.gate_proj(x)
                return own.down_proj(F.silu(gate + _wave(gate)) * own.up_proj(x))
            if self.mistake == "wave in the activation":
                gate = own.gate_proj(x)
                return own.down_proj((F.silu(gate) + 0.2 * torch.sin(3 * gate)) * own.up_proj(x))
            return super().mlp(x, own)

        def forward(self, input_ids: Tensor) -> Tensor:
            made: Tensor = super().forward(input_ids)
            return made + _wave(made) if self.mistake == "noisy logits" else made

    return written, Port


def _wave(x: Tensor) -> Tensor:
    """Return something that no catalog has: another number for each element, whatever the input."""
    return 0.3 * torch.sin(torch.arange(x.numel()).float() * 12.9898).view(x.shape)


def _timed(seconds: list[float], said: list[str]) -> Any:
    own = Hints.of

    def of(hints: Hints, node: Any, *args: Any) -> Any:
        started = time.thread_time()
        found = own(hints, node, *args)
        seconds.append(time.thread_time() - started)
        said.append(node.name)
        return found

    return of


def measured(mistake: str, written: Any, port: Any) -> tuple[list[float], Comparison]:
    """Return the seconds of each divergence that was asked about, and what came of the check."""
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=_HIDDEN, intermediate_size=1408, num_hidden_layers=2, num_attention_heads=_HEADS,
        num_key_value_heads=_SHARED, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    baseline = written.drawn(transformers.LlamaForCausalLM(config))
    ids = torch.randint(3, 1000, (2, 64), generator=torch.Generator().manual_seed(1))
    seconds: list[float] = []
    own, Hints.of = Hints.of, _timed(seconds, [])  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"input_ids": ids}, Path(folder) / "inputs.pt")
            candidate = port(copy.deepcopy(baseline), mistake).eval()
            result = check(baseline, candidate=candidate, inputs=str(Path(folder) / "inputs.pt"))
    finally:
        Hints.of = own  # type: ignore[method-assign]
    return seconds, result


def main(arguments: Sequence[str] = ()) -> None:
    """Print a line for each mistake: seconds of the slowest divergence, how many there were, what was said."""
    written, port = _written()
    lines = [f"{'mistake':24s} {'s':>6s} {'number':>6s}  said of the first"]
    largest = 0.0
    for mistake in arguments or (*EXPLAINED, *UNEXPLAINED):
        seconds, result = measured(mistake, written, port)
        first = result.first_divergence
        hint = first.hints[0] if first is not None and first.hints else None
        said = (
            "nothing"
            if hint is None
            else f"{'proven' if hint.proven else 'hint'}: {hint.kind}: {textwrap.shorten(hint.text, 70)}"
        )
        largest = max(largest, *seconds, 0.0)
        lines.append(f"{mistake:24s} {max(seconds, default=0.0):6.2f} {len(seconds):6d}  {said}")
        print(lines[-1], file=sys.stderr, flush=True)
    lines.append(f"{'slowest':24s} {largest:6.2f}         of {MOST_SECONDS:g} s")
    text = "\n".join(["$ python -m benchmarks hint_costs", surroundings(), "", *lines])
    print(text) if arguments else keep("hint_costs", text)
