"""Writes a checkpoint as a GGUF file: settings, names, layouts and tokenizer as llama.cpp wants them.

A rule of a table says how the file's tensor becomes the checkpoint's parameter; here it is read backwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from glassengine.compare.matching.layouts import LayoutOperation, apply
from glassengine.compare.matching.maps import MapRule
from glassengine.errors import UnknownNameError, UsageError, logger
from glassengine.plugins.serving.alignment import numbers_of, table_of
from glassengine.plugins.serving.ggml.candidate import stored_names
from glassengine.plugins.serving.ggml.types import BY_NAME, TensorType, q4_k

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPLITS = {
    rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_REST}": "qwen2",
}
"""How a text is split into words -> what llama.cpp calls that. Without one of them ByteLevel splits as GPT-2 does."""

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


@dataclass(frozen=True)
class GgufVocabulary:
    """A tokenizer of byte pairs as GGUF files have it.

    Attributes:
        tokens: By id.
        types: What each is: normal, control, defined by a user, unused.
        merges: Pairs that are joined, the first first.
        split: How a text is split before, in llama.cpp's words.
        special: "bos", "eos", "pad" -> id.
        adds_bos: Whether a text begins with the token "bos".
        template: Of a chat.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    split: str
    special: Mapping[str, int]
    adds_bos: bool
    template: str | None


def vocabulary_of(module: nn.Module, directory: str | None) -> GgufVocabulary | None:
    """Return the tokenizer of a checkpoint; None, which is logged, where there is none that llama.cpp has."""
    if directory is None:
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError, ImportError):  # there is none
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = json.loads(backend.to_str()) if backend is not None else {}
    split = _split_of(described)
    if split is None:
        logger.warning("the GGUF file takes token ids alone: llama.cpp has no tokenizer like that of %s", directory)
        return None
    size = int(getattr(module.config, "vocab_size", 0)) or len(tokenizer)
    special = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")}
    tokens, types = _tokens(described, size)
    bos = special["bos"]
    return GgufVocabulary(
        tokens=tokens,
        types=types,
        merges=[pair if isinstance(pair, str) else " ".join(pair) for pair in described["model"]["merges"]],
        split=split,
        special={name: number for name, number in special.items() if isinstance(number, int)},
        adds_bos=bos is not None and tokenizer("a")["input_ids"][:1] == [bos],
        template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
    )


def _split_of(described: Mapping[str, Any]) -> str | None:
    """Return how a tokenizer splits texts, as llama.cpp calls it; None where it has nothing like it."""
    model, before = described.get("model") or {}, described.get("pre_tokenizer") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("continuing_subword_prefix"):
        return None
    if (described.get("normalizer") or {}).get("type", "NFC") != "NFC":
        return None
    steps = before.get("pretokenizers", [before])
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return "gpt-2" if steps[0].get("use_regex", True) else None
    if len(steps) != 2 or steps[0].get("type") != "Split" or steps[-1].get("use_regex", True):
        return None
    return _SPLITS.get((steps[0].get("pattern") or {}).get("Regex", ""))


def _tokens(described: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    tokens, types = [f"[PAD{number}]" for number in range(size)], [_UNUSED] * size
    for text, number in described["model"]["vocab"].items():
        if number < size:
            tokens[number], types[number] = text, _NORMAL
    for added in described.get("added_tokens") or ():
        if added["id"] < size:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    return tokens, types


def add_vocabulary(writer: Any, vocabulary: GgufVocabulary | None) -> None:
    """Write a tokenizer with a `GGUFWriter`; None writes that there is none."""
    if vocabulary is None:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    writer.add_token_merges(list(vocabulary.merges))
    for name, number in vocabulary.special.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    if vocabulary.template is not None:
        writer.add_chat_template(vocabulary.template)


ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "gpt2": "gpt2",
    "bert": "bert",
}
"""Model type of transformers -> what llama.cpp calls it."""

WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K")


def write_gguf(
    module: nn.Module,
    path: Path,
    *,
    kind: str = "F32",
    changed: Mapping[str, Tensor] | None = None,
    vocabulary: GgufVocabulary | None = None,
    **settings: Any,
) -> list[str]:
    """Write a model of transformers as a GGUF file; return the matrices that are F16 as their rows are no whole blocks.

    Args:
        module: With its configuration.
        path: Of the file.
        kind: Type of matrices; vectors, and matrices whose rows are no blocks of it, are F32 and F16.
        changed: Other values for tensors of the file, by their names there.
        vocabulary: Of its tokenizer; without, llama.cpp runs it on token ids.
        settings: Other settings: `rope_freq_base=500000.0`, by the name after the architecture, dots as underscores.

    Raises:
        UnknownNameError: No such architecture or type.
        UsageError: A parameter has no name in the file.
    """
    import gguf

    config = module.config
    model_type = str(getattr(config, "model_type", ""))
    if model_type not in ARCHITECTURES:
        raise UnknownNameError("kind of model that is written as GGUF", model_type, ARCHITECTURES)
    if kind not in WRITTEN:
        raise UnknownNameError("type of a GGUF file", kind, WRITTEN)
    architecture = ARCHITECTURES[model_type]
    writer = gguf.GGUFWriter(str(path), architecture)
    for name, value in {**_settings(config, architecture), **_renamed(settings)}.items():
        key = f"{architecture}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_name(model_type)
    add_vocabulary(writer, vocabulary)
    if architecture == "bert":
        writer.add_token_type_count(int(getattr(config, "type_vocab_size", 1)))
    left = []
    for name, tensor in {**dict(file_tensors(module, architecture)), **(changed or {})}.items():
        written = _add(writer, name, tensor, BY_NAME[kind])
        if written == "F16" and kind != "F16":
            left.append(name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return left


def file_tensors(module: nn.Module, architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Yield name and float32 values of each tensor of the file."""
    numbers = numbers_of(module.config)
    table = table_of("ggml", architecture, numbers)
    tied = {id(parameter) for parameter in [_embedding(module)] if parameter is not None}
    for name, parameter in module.named_parameters():
        rule, stored = stored_names(name, table, architecture, numbers["layers"] or 0)
        if stored == ("output.weight",) and id(parameter) in tied:
            continue
        value = parameter.detach().float()
        if rule is None and not stored:
            if name.startswith("pooler."):
                continue
            raise UsageError("a parameter has no name in GGUF files", got=name)
        yield from zip(stored, _backwards(rule, value, len(stored)), strict=True)


def _embedding(module: nn.Module) -> Tensor | None:
    found = getattr(module, "get_input_embeddings", lambda: None)()
    return None if found is None else found.weight


def _backwards(rule: MapRule | None, value: Tensor, number: int) -> list[Tensor]:
    if rule is None:
        return [value]
    parts = list(value.chunk(number, rule.concat_dim)) if rule.concat_dim is not None else [value]
    undone = [_opposite(one) for one in reversed(rule.candidate_ops)]
    return [apply(undone, part, lookup=_nothing).contiguous() for part in parts]


def _opposite(operation: LayoutOperation) -> LayoutOperation:
    if operation.op in ("pair", "unpair"):
        return LayoutOperation("pair" if operation.op == "unpair" else "unpair", operation.arguments)
    if operation.op == "add":
        return LayoutOperation("add", {"value": -operation.arguments["value"]})
    if operation.op == "transpose":
        return operation
    raise UsageError("a rule of weights cannot be read backwards", got=str(operation))


def _nothing(name: str) -> Tensor:
    raise UsageError("rules of weights look nothing up", got=name)


def _add(writer: Any, name: str, tensor: Tensor, kind: TensorType) -> str:
    """Add a tensor; return its type."""
    import gguf

    values = tensor.detach().float().contiguous().numpy()
    is_small = values.ndim < 2 or name.startswith("position_embd") or name.endswith("gate_inp.weight")
    if is_small or kind.name == "F32":
        writer.add_tensor(name, values)
        return "F32"
    if kind.name == "F16" or values.shape[-1] % kind.block:
        writer.add_tensor(name, values.astype(np.float16))
        return "F16"
    own = gguf.GGMLQuantizationType(kind.number)
    blocks = q4_k(values) if kind.name == "Q4_K" else gguf.quants.quantize(values, own)
    writer.add_tensor(name, blocks, raw_dtype=own)
    return kind.name


def _renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    known = {name.replace(".", "_"): name for name in _KNOWN}
    return {known.get(name, name): value for name, value in settings.items()}


_KNOWN = (
    "rope.freq_base",
    "rope.dimension_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attention.sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.scale",
    "expert_used_count",
)


def _settings(config: Any, architecture: str) -> dict[str, Any]:
    numbers = numbers_of(config)

    def of(*names: str) -> Any:
        return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)

    rope = of("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    local = rope.get("sliding_attention")
    is_rms = of("rms_norm_eps") is not None
    norm = "attention.layer_norm_rms_epsilon" if is_rms else "attention.layer_norm_epsilon"
    has_rope = bool(full)
    settings: dict[str, Any] = {
        "context_length": of("max_position_embeddings", "n_positions"),
        "embedding_length": numbers["hidden"],
        "block_count": numbers["layers"],
        "feed_forward_length": numbers["inner"],
        "attention.head_count": numbers["heads"],
        "attention.head_count_kv": numbers["kv_heads"],
        norm: float(of("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")),
        "vocab_size": of("vocab_size"),
        "attention.key_length": numbers["head_dim"] if has_rope else None,
        "attention.value_length": numbers["head_dim"] if has_rope else None,
        "rope.dimension_count": numbers["rotated"] if has_rope else None,
        "rope.freq_base": float(full["rope_theta"]) if "rope_theta" in full else None,
        "rope.freq_base_swa": float(local["rope_theta"]) if isinstance(local, dict) else None,
        "attention.sliding_window": of("sliding_window"),
        "attn_logit_softcapping": of("attn_logit_softcapping"),
        "final_logit_softcapping": of("final_logit_softcapping"),
        "expert_count": numbers["experts"],
        "expert_used_count": of("num_experts_per_tok") if numbers["experts"] else None,
        "expert_feed_forward_length": numbers["expert_inner"] if architecture in ("qwen2moe", "qwen3moe") else None,
        "expert_shared_feed_forward_length": of("shared_expert_intermediate_size"),
        "embedding_scale": of("embedding_multiplier"),
        "residual_scale": of("residual_multiplier"),
        "logit_scale": of("logits_scaling"),
        "attention.scale": of("attention_multiplier"),
        "use_parallel_residual": of("use_parallel_residual"),
        "attention.causal": False if architecture == "bert" else None,
    }
    if architecture == "phi3":
        settings["rope.scaling.original_context_length"] = of("original_max_position_embeddings")
    if full.get("rope_type") == "linear":
        settings |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(full["factor"])}
    kinds = of("layer_types")
    if architecture == "gemma3" and kinds and of("sliding_window"):
        settings["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    return {name: value for name, value in settings.items() if value is not None}
