"""Tokenizers that are trained here, and what is planted in copies of them."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from glassengine.prompt.check import compare_sides
from glassengine.prompt.side import PromptSide
from glassengine.prompt.worker import _open
from glassengine.results import PromptComparison

Change = Callable[[dict[str, Any]], None]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED = ("<|begin|>", "<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GENERATION = {"temperature": 0.6, "top_p": 0.95, "eos_token_id": [1, 4], "bos_token_id": 0, "do_sample": True}


def train(folder: Path, root: Path) -> Path:
    """Write a tokenizer of byte pairs, its configuration, a chat template and generation settings."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    draw = random.Random(0)
    numbers = [" ".join(str(draw.randrange(10**6)) for _ in range(20)) for _ in range(200)]
    texts = [(root / "examples/tiny-llama/held_out.txt").read_text(encoding="utf-8"), *numbers]
    texts += ["café déjà vu é è ö ü 東京 日本語 한국 नमस्ते don't I'LL WE'VE I'm they're it's"] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=[AddedToken(text, special=True) for text in ADDED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    config |= {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": tokenizer.get_vocab_size()}))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


@functools.cache
def opened(path: str) -> PromptSide:
    return _open(path)


def compared(baseline: Path, candidate: str | Path) -> PromptComparison:
    return compare_sides(opened(str(baseline)), _open(str(candidate)), (str(baseline), str(candidate)))


def wrong(result: PromptComparison) -> list[str]:
    return [one.cause for one in result.findings if one.level == "wrong"]


def copied(folder: Path, target: Path, file: str, change: Change) -> Path:
    shutil.copytree(folder, target)
    document = json.loads((target / file).read_text(encoding="utf-8"))
    change(document)
    (target / file).write_text(json.dumps(document), encoding="utf-8")
    return target


def processor(*tokens: str, last: tuple[str, ...] = ()) -> Change:
    def change(document: dict[str, Any]) -> None:
        ids = {one["content"]: one["id"] for one in document["added_tokens"]}
        special = [{"SpecialToken": {"id": one, "type_id": 0}} for one in (*tokens, *last)]
        text = {"Sequence": {"id": "A", "type_id": 0}}
        document["post_processor"]["single"] = [*special[: len(tokens)], text, *special[len(tokens) :]]
        document["post_processor"]["special_tokens"] = {
            one: {"id": one, "ids": [ids[one]], "tokens": [one]} for one in {*tokens, *last, "<|begin|>"}
        }

    return change


def split(old: str, new: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        pattern = document["pre_tokenizer"]["pretokenizers"][0]["pattern"]
        assert old in pattern["Regex"]
        pattern["Regex"] = pattern["Regex"].replace(old, new)

    return change


def normalizer(*kinds: str) -> Change:
    steps = [{"type": kind} for kind in kinds]
    return lambda document: document.update(normalizer={"type": "Sequence", "normalizers": steps} if steps else None)


def strip(document: dict[str, Any]) -> None:
    steps = [{"type": "NFC"}, {"type": "Strip", "strip_left": True, "strip_right": True}]
    document["normalizer"] = {"type": "Sequence", "normalizers": steps}


def shuffle(document: dict[str, Any]) -> None:
    merges = document["model"]["merges"]
    part = merges[200:700]
    random.Random(1).shuffle(part)
    merges[200:700] = part


def exchange(document: dict[str, Any]) -> None:
    vocabulary = document["model"]["vocab"]
    vocabulary["Ġthe"], vocabulary["Ġof"] = vocabulary["Ġof"], vocabulary["Ġthe"]


def prefix(document: dict[str, Any]) -> None:
    document["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


def unsplit(document: dict[str, Any]) -> None:
    document["added_tokens"] = [one for one in document["added_tokens"] if one["content"] != "<|im_end|>"]
    document["model"]["vocab"]["<|im_end|>"] = 4


def gguf_of(folder: Path, path: Path, **changes: Any) -> Path:
    """Write the metadata of a GGUF file with the tokenizer of a directory; None leaves a key out."""
    import gguf

    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(document["model"]["vocab"], key=document["model"]["vocab"].__getitem__)
    control = {one["content"] for one in document["added_tokens"]}
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": tokens,
        "token_type": [3 if token in control else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in document["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "padding_token_id": 2,
        "add_bos_token": True,
        **changes,
    }
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, size in (("context_length", 8), ("embedding_length", 32), ("block_count", 1), ("head_count", 1)):
        getattr(writer, f"add_{name}")(size)
    writer.add_feed_forward_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in keys.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{name}", value)
        elif value is not None:
            kind = {bool: "add_bool", str: "add_string", int: "add_uint32"}[type(value)]
            getattr(writer, kind)(f"tokenizer.ggml.{name}", value)
    writer.add_chat_template(changes.get("template", TEMPLATE))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def without_normalizer(trained: Path, target: Path) -> Path:
    return copied(trained, target, "tokenizer.json", normalizer())


def genai_of(trained: Path, folder: Path, change: dict[str, Any], template: str = TEMPLATE) -> str:
    copied(trained, folder, "tokenizer_config.json", lambda one: one.update(chat_template=template))
    decoder = {"filename": "m.onnx", "head_size": 32, "hidden_size": 64, "num_attention_heads": 2}
    decoder |= {"num_hidden_layers": 1, "num_key_value_heads": 2}
    model = {"type": "llama", "bos_token_id": 0, "eos_token_id": [1, 4], "pad_token_id": 2, "vocab_size": 1500}
    model |= {"context_length": 512, "decoder": decoder}
    search = {"max_length": 512, "temperature": 0.6, "top_p": 0.95, "do_sample": True, **change.get("search", {})}
    settings = {name: value for name, value in change.items() if name != "search"}
    (folder / "genai_config.json").write_text(json.dumps({"model": {**model, **settings}, "search": search}))
    return f"genai:{folder}"
