"""Mistakes that are planted in a vLLM that runs: each a context in which it makes one. In vLLM's interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import torch


def layers(model):
    return model.model.layers if hasattr(model, "model") else model.transformer.h


@contextlib.contextmanager
def set_to(owner, name, value):
    had = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, had)


@contextlib.contextmanager
def hooked(module, hook, before=False):
    handle = (
        module.register_forward_pre_hook(hook, prepend=True)
        if before
        else module.register_forward_hook(hook, prepend=True)
    )
    try:
        yield
    finally:
        handle.remove()


def first(change):
    """Change the first of what a module returns."""
    return lambda module, args, out: (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)


def healthy(runner):
    return contextlib.nullcontext()


@contextlib.contextmanager
def rope_base(runner):
    rotary = layers(runner.model)[0].self_attn.rotary_emb
    cache, base = rotary.cos_sin_cache.clone(), rotary.base
    rotary.base = 500000.0
    rotary.cos_sin_cache.copy_(rotary._compute_cos_sin_cache().to(cache.dtype))
    try:
        yield
    finally:
        rotary.base = base
        rotary.cos_sin_cache.copy_(cache)


def swapped_gate(runner):
    return hooked(layers(runner.model)[1].mlp.gate_up_proj, first(lambda x: torch.cat(x.chunk(2, -1)[::-1], -1)))


def eps(runner):
    return set_to(layers(runner.model)[1].post_attention_layernorm, "variance_epsilon", 1e-3)


def norm_plus_one(runner):
    norm = layers(runner.model)[0].input_layernorm
    return set_to(norm, "weight", torch.nn.Parameter(norm.weight + 1, requires_grad=False))


def attention_scale(runner):
    impl = layers(runner.model)[1].self_attn.attn.impl
    return set_to(impl, "scale", impl.scale * 1.1)


def unpermuted_queries(runner):
    attention = layers(runner.model)[0].self_attn
    n = attention.num_heads * attention.head_dim

    def change(x):
        x = x.clone()
        x[:, :n] = x[:, :n].view(-1, attention.num_heads, 2, attention.head_dim // 2).transpose(2, 3).reshape(-1, n)
        return x

    return hooked(attention.qkv_proj, first(change))


def keys_for_values(runner):
    attention = layers(runner.model)[1].self_attn
    sizes = [attention.q_size, attention.kv_size, attention.kv_size]
    return hooked(attention.qkv_proj, first(lambda x: torch.cat([x.split(sizes, -1)[i] for i in (0, 2, 1)], -1)))


def missing_bias(runner):
    projection = layers(runner.model)[1].self_attn.qkv_proj
    return hooked(projection, first(lambda x: x - projection.bias))


def scaled_block(runner):
    def change(x):
        x = x.clone()
        x[:, 32:48] *= 1.0625
        return x

    return hooked(layers(runner.model)[0].mlp.down_proj, first(change))


def lost_residual(runner):
    def hook(module, args):
        return (args[0], torch.zeros_like(args[1])) if len(args) > 1 else args

    return hooked(layers(runner.model)[1].post_attention_layernorm, hook, before=True)


def embedding_row(runner):
    return hooked(runner.model.model.embed_tokens, lambda module, args: (args[0] ^ 1,), before=True)


def head_rows(runner):
    return hooked(runner.model.logits_processor, lambda module, args, out: out.roll(1, -1))


@contextlib.contextmanager
def window_ignored(runner):
    impl = layers(runner.model)[1].self_attn.attn.impl
    off = -1 if isinstance(impl.sliding_window, int) else (-1, -1)
    with set_to(impl, "sliding_window", off):
        yield


def query_norm_eps(runner):
    return set_to(layers(runner.model)[1].self_attn.q_norm, "variance_epsilon", 1e-2)


def another_gelu(runner):
    act = layers(runner.model)[0].mlp.act
    return hooked(act, lambda module, args, out: torch.nn.functional.gelu(args[0]))


def gpt2_positions(runner):
    return hooked(runner.model.transformer.wpe, lambda module, args: (args[0] + 1,), before=True)


def scaled_experts(runner):
    return hooked(layers(runner.model)[1].block_sparse_moe.experts, lambda module, args, out: out * 1.05)


def router_rows(runner):
    return hooked(layers(runner.model)[0].block_sparse_moe.gate, first(lambda x: x.roll(1, -1)))


@contextlib.contextmanager
def cache_slot(runner):
    """Decode writes its key and value into the next slot."""
    impl = layers(runner.model)[0].self_attn.attn.impl
    update = impl.do_kv_cache_update

    def wrong(layer, key, value, kv_cache, slot_mapping):
        return update(layer, key, value, kv_cache, slot_mapping + 1 if len(slot_mapping) <= 2 else slot_mapping)

    impl.do_kv_cache_update = wrong
    try:
        yield
    finally:
        del impl.do_kv_cache_update


@contextlib.contextmanager
def changed_forward(runner, change):
    """Change what the model is given: `change(runner, kwargs)`."""
    kind = type(runner)
    forward = kind._model_forward

    def _model_forward(self, *args, **kwargs):
        return forward(self, *args, **change(self, kwargs))

    kind._model_forward = _model_forward
    try:
        yield
    finally:
        kind._model_forward = forward


def chunk_positions(runner):
    """The second chunk of a prompt begins at position 0 again."""

    def change(runner, kwargs):
        positions = kwargs["positions"].clone()
        starts = runner.input_batch.num_computed_tokens_cpu
        at = 0
        for row, length in enumerate(runner.query_start_loc.np[1 : len(runner.input_batch.req_ids) + 1]):
            if starts[row] and length - at > 1:
                positions[at:length] -= int(starts[row])
            at = int(length)
        return {**kwargs, "positions": positions}

    return changed_forward(runner, change)


def exchanged_rows(runner):
    """Two requests that decode together get each other's attention."""

    def hook(module, args, out):
        return out.flip(0) if out.shape[0] == 2 else out

    return hooked(layers(runner.model)[1].self_attn.attn, hook)


def exchanged_logits(runner):
    return hooked(runner.model.logits_processor, lambda module, args, out: out.flip(0) if out.shape[0] == 2 else out)


@contextlib.contextmanager
def stale_prefix(runner):
    """What the prefix cache holds of layer 0 is not what the requests would have computed that reuse it."""
    attention = layers(runner.model)[0].self_attn.attn
    done = []

    def change(runner, kwargs):
        starts = runner.input_batch.num_computed_tokens_cpu
        num = len(runner.input_batch.req_ids)
        cache = attention.kv_cache[0] if isinstance(attention.kv_cache, (list, tuple)) else attention.kv_cache
        for row in range(num):
            name = runner.input_batch.req_ids[row]
            if starts[row] == 32 and name not in done:
                done.append(name)
                block = int(runner.input_batch.block_table[0].block_table.np[row, 0])
                cache[block].mul_(1.25)
        return kwargs

    with changed_forward(runner, change):
        yield


_HELP = ("layers", "set_to", "hooked", "first", "changed_forward")
PLANTS = {
    name: one
    for name, one in list(globals().items())
    if callable(one) and getattr(one, "__module__", None) == __name__ and name not in _HELP
}


def main():
    """Read {"model", "folder", "dtype", "steps", "prompts", "plants": {name: ["alone", ...]}}; one folder for each."""
    request = json.load(sys.stdin)
    import glassengine_vllm_run as running

    for name, value in running.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["GLASSENGINE_VLLM_RECORD"] = request["folder"]
    from vllm.entrypoints.llm import LLM

    given = {"folder": request["folder"], "following": None, "options": {"block_size": 32}, **request}
    llm = LLM(request["model"], **running.options_of(given))
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    for name, ways in request["plants"].items():
        with PLANTS[name](runner):
            running.run(llm, {**given, "folder": str(Path(request["folder"]) / name), "runs": ways})


if __name__ == "__main__":
    main()
