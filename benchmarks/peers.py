"""Other runtimes for the models of `benchmarks.decode`, where they are installed.

Each takes a checkpoint of transformers, converts it the way its makers do it, and generates greedily: the same weights,
precision and threads, no end token. `prefill_s` ends with the first token, `token_s` is the mean of those after it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Timed:
    """Tokens of every sequence, seconds until the first, and seconds per token after it."""

    tokens: list[list[int]]
    prefill_s: float
    token_s: float


Generate = Callable[[torch.Tensor, int], Timed]
"""Takes prompts [B, S] int64 and the number of new tokens."""


def timed(step: Callable[[int], Sequence[int]], num_tokens: int) -> Timed:
    """Generate with `step`, which takes the number of the step (0 = prefill) and returns one token per sequence."""
    ticks, rows = [time.perf_counter()], []
    for index in range(num_tokens):
        rows.append([int(token) for token in step(index)])
        ticks.append(time.perf_counter())
    token_s = (ticks[-1] - ticks[1]) / max(num_tokens - 1, 1)
    return Timed([list(column) for column in zip(*rows, strict=True)], ticks[1] - ticks[0], token_s)


def onnxruntime_genai(checkpoint: Path, work: Path, dtype: str, threads: int) -> Generate:
    """ONNX of its own model builder, which fuses attention, rotary embedding and norms into operations of its own."""
    runtime = importlib.import_module("onnxruntime_genai")
    builder = importlib.import_module("onnxruntime_genai.models.builder")
    if dtype != "float32":
        raise ValueError(f"its CPU kernels know no {dtype}")
    target = ("", str(checkpoint), str(work), "fp32", "cpu", str(work / "cache"))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        builder.create_model(*target, **builder.parse_extra_options(*target, []))
    path = work / "genai_config.json"
    settings = json.loads(path.read_text())
    settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    path.write_text(json.dumps(settings))
    model = runtime.Model(str(work))

    def generate(prompts: torch.Tensor, num_tokens: int) -> Timed:
        batch, size = prompts.shape
        parameters = runtime.GeneratorParams(model)
        total = size + num_tokens
        # Nothing ends before its least length.
        parameters.set_search_options(max_length=total, min_length=total, batch_size=batch, do_sample=False)
        generator = runtime.Generator(model, parameters)
        ids = prompts.numpy().astype(np.int32)

        def step(index: int) -> list[int]:
            if not index:
                generator.append_tokens(ids)
            generator.generate_next_token()
            return [generator.get_sequence(row)[-1] for row in range(batch)]

        return timed(step, num_tokens)

    return generate


def openvino_genai(checkpoint: Path, work: Path, dtype: str, threads: int) -> Generate:
    """The stateful graph that transformers exports for OpenVINO, run by its generation pipeline."""
    genai, openvino = importlib.import_module("openvino_genai"), importlib.import_module("openvino")
    _export_openvino(checkpoint, work)
    options = {
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype],
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ATTENTION_BACKEND": "SDPA",
    }
    pipeline = genai.LLMPipeline(str(work), "CPU", **options)

    def generate(prompts: torch.Tensor, num_tokens: int) -> Timed:
        config = genai.GenerationConfig()
        config.do_sample, config.ignore_eos = False, True
        ids = prompts.numpy()
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        seconds, tokens = [], []
        # A batch cannot be streamed: the first token is timed by a run of its own.
        for count in (1, num_tokens):
            config.max_new_tokens = count
            start = time.perf_counter()
            tokens = [list(row) for row in pipeline.generate(inputs, config).tokens]
            seconds.append(time.perf_counter() - start)
        return Timed(tokens, seconds[0], (seconds[1] - seconds[0]) / max(num_tokens - 1, 1))

    return generate


def _export_openvino(checkpoint: Path, work: Path) -> None:
    import transformers
    from transformers.exporters import exporter_openvino as exporter

    openvino, converter = importlib.import_module("openvino"), importlib.import_module("openvino_tokenizers")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa").eval()
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(2, 5, dtype=torch.int64), past_key_values=cache, use_cache=True)
    inputs = {
        "input_ids": torch.ones(2, 3, dtype=torch.int64),
        "attention_mask": torch.ones(2, 8, dtype=torch.int64),
        "position_ids": torch.arange(5, 8)[None].repeat(2, 1),
        "past_key_values": cache,
        "use_cache": True,
    }
    config = exporter.OpenVINOConfig(dynamic=True, stateful=True)
    exporter.OpenVINOExporter().export(model, inputs, config).save_pretrained(work)
    tokenizer, detokenizer = converter.convert_tokenizer(some_tokenizer(), with_detokenizer=True)
    openvino.save_model(tokenizer, str(work / "openvino_tokenizer.xml"))
    openvino.save_model(detokenizer, str(work / "openvino_detokenizer.xml"))


_GGML_TYPE_BF16 = 30  # of ggml.h; not every version of the package names it


def some_tokenizer() -> Any:
    """Return a tokenizer of four words: some runtimes want one, though they are given tokens."""
    import tokenizers
    import transformers

    words = {f"t{index}": index for index in range(4)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="t0", eos_token="t2")


def llama_cpp(checkpoint: Path, work: Path, dtype: str, threads: int) -> Generate:
    """llama.cpp through its Python package, on a GGUF file with the weights as they are."""
    library = importlib.import_module("llama_cpp")
    path = work / "model.gguf"
    vocabulary = _write_gguf(checkpoint, path, dtype)
    library.llama_log_set(_silent(library), None)
    library.llama_backend_init()
    model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())

    def generate(prompts: torch.Tensor, num_tokens: int) -> Timed:
        batch, size = prompts.shape
        settings = library.llama_context_default_params()
        settings.n_ctx = batch * -(-(size + num_tokens) // 256) * 256
        settings.n_batch, settings.n_seq_max = batch * size, batch
        settings.n_threads = settings.n_threads_batch = threads
        settings.type_k = settings.type_v = {"float32": library.GGML_TYPE_F32, "bfloat16": _GGML_TYPE_BF16}[dtype]
        context = library.llama_init_from_model(model, settings)
        pieces = library.llama_batch_init(batch * size, 0, batch)
        last: list[int] = []

        def step(index: int) -> list[int]:
            rows = prompts.tolist() if not index else [[token] for token in last]
            start = 0 if not index else size + index - 1
            entries = [(row, place, token) for row, tokens in enumerate(rows) for place, token in enumerate(tokens)]
            pieces.n_tokens = len(entries)
            for entry, (row, place, token) in enumerate(entries):
                pieces.token[entry], pieces.pos[entry] = token, start + place
                pieces.n_seq_id[entry], pieces.seq_id[entry][0] = 1, row
                pieces.logits[entry] = place == len(rows[row]) - 1
            if library.llama_decode(context, pieces):
                raise RuntimeError("llama_decode failed")
            ends = [entry for entry in range(len(entries)) if pieces.logits[entry]]
            found = [library.llama_get_logits_ith(context, entry) for entry in ends]
            last[:] = [int(np.ctypeslib.as_array(values, (vocabulary,)).argmax()) for values in found]
            return last

        try:
            return timed(step, num_tokens)
        finally:
            library.llama_batch_free(pieces)
            library.llama_free(context)

    return generate


def _silent(library: Any) -> Any:
    callback = library.llama_log_callback(lambda *_: None)
    _KEPT.append(callback)  # the library keeps only its address
    return callback


_KEPT: list[Any] = []


def _write_gguf(checkpoint: Path, path: Path, dtype: str) -> int:
    """Write a Llama as GGUF; return the size of its vocabulary."""
    import transformers

    gguf = importlib.import_module("gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        own = name.removesuffix(".weight")
        layer = ""
        if own.startswith("model.layers."):
            _, _, index, own = own.split(".", 3)
            layer = f"blk.{index}."
        if own in heads:
            # llama.cpp rotates neighboring pairs, transformers halves.
            rows, columns = tensor.shape
            tensor = tensor.reshape(heads[own], 2, rows // heads[own] // 2, columns).transpose(1, 2).reshape(rows, -1)
        if dtype == "bfloat16" and tensor.dim() > 1:
            raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
            writer.add_tensor(f"{layer}{names[own]}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(f"{layer}{names[own]}.weight", tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return int(config.vocab_size)


PEERS: dict[str, Callable[[Path, Path, str, int], Generate]] = {
    "onnxruntime-genai": onnxruntime_genai,
    "openvino-genai": openvino_genai,
    "llama.cpp": llama_cpp,
}
