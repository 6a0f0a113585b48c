"""Train, save and measure the tiny Llama in this directory.

Pipeline: topics of ``pydoc_data`` -> unique paragraphs in sections -> training and held-out split -> byte-level
BPE -> Llama -> files beside this script. All random numbers come from ``SEED``: a second run on the same CPU with
the same versions and two threads reproduces the weights bit for bit; elsewhere only the figures should agree.

Usage:
    python train.py             train again and overwrite the files in this directory
    python train.py --verify    measure the files that are here and print the figures

Shape suffixes: B batch, T position, V vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

# Read by the libraries when they start their thread pools, hence set before the imports below.
os.environ.setdefault("OMP_NUM_THREADS", "2")
# A waiting thread that spins takes the core from the thread it waits for: 50 times slower when others use the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

DIRECTORY = Path(__file__).resolve().parent
WEIGHTS = "model.safetensors"
# The held-out text travels with the model, because the topics change a little with every Python release.
HELD_OUT = "held_out.txt"
SECTION_BREAK = "\f\n"
# Digest of the sections that the model was trained on (Python 3.11.7).
CORPUS_SHA256 = "23cbccd159aa4c96ba74200f53dbab112fb66c67d162024926b841af5206a8cd"

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
VOCAB_SIZE = 1024
MAX_POSITIONS = 512

SEED = 0
NUM_THREADS = 2
NUM_STEPS = 800
WARMUP_STEPS = 60
BATCH_SIZE = 8
PEAK_LR = 4e-3
FINAL_LR_FRACTION = 0.5
# Unusually strong, because 110 thousand tokens are seen about 37 times.
WEIGHT_DECAY = 1.5
EMA_DECAY = 0.995

# Of different lengths, so that generating from them in one batch also exercises left padding.
PROMPTS = (
    'The "with" statement',
    "When a function is called,",
    "Class definitions\n*****************\n\nA class definition",
    "If the expression is",
    "Called when an attribute",
    "String literals",
    "An exception",
    "The name of the module",
)
NUM_GREEDY_TOKENS = 64


def unwrap(paragraph: str) -> str:
    """Undo the hard wrapping of prose, leaving code and grammar alone.

    A line break was made by the wrapping when the next word would not have fitted within 70 columns.
    """
    lines = paragraph.split("\n")
    joined = lines[0]
    for previous, line in itertools.pairwise(lines):
        words = line.split()
        wrapped = previous and words and "::=" not in paragraph and len(previous) + 1 + len(words[0]) > 70
        if not wrapped:
            joined += f"\n{line}"
        elif re.search(r"\w-$", previous):
            joined += line.lstrip()
        else:
            joined += f" {line.lstrip()}"
    return joined


def sections(texts_by_topic: Mapping[str, str]) -> list[str]:
    """Cut the topics at their underlined headings and drop every paragraph that has occurred before.

    The topics quote each other at length: without this, much of a held-out section would also be trained on.
    """
    heading = re.compile(r"^(?=\S[^\n]*\n([*=\-~^])\1{3,}$)", re.MULTILINE)
    seen: set[str] = set()
    kept = []
    for name in sorted(texts_by_topic):
        for section in heading.split(texts_by_topic[name])[0::2]:
            fresh = []
            for paragraph in re.split(r"\n(?:[ ]*\n)+", section.strip("\n")):
                key = " ".join(paragraph.split())
                if key and key not in seen:
                    seen.add(key)
                    fresh.append(unwrap(paragraph))
            if len(fresh) > 1:
                kept.append("\n\n".join(fresh))
    return kept


def split_corpus(texts_by_topic: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Split into training and held-out sections, about 11 to 1.

    The digest of its heading places a section, so that an edit elsewhere in the text moves nothing.
    """
    training: list[str] = []
    held_out: list[str] = []
    for section in sections(texts_by_topic):
        heading_digest = hashlib.sha256(section.split("\n", 1)[0].encode()).digest()
        (held_out if heading_digest[0] % 12 == 0 else training).append(section)
    return training, held_out


def digest(texts: Iterable[str]) -> str:
    """Return the SHA-256 of sections of text, in hexadecimal."""
    return hashlib.sha256(SECTION_BREAK.join(texts).encode()).hexdigest()


def load_held_out(directory: Path = DIRECTORY) -> list[str]:
    """Read the held-out sections stored beside the model."""
    return (directory / HELD_OUT).read_bytes().decode().split(SECTION_BREAK)


def build_tokenizer(training: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the training sections; it puts BOS first and pads on the left."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        # All 256 bytes, so that any text can be encoded and there is no unknown token.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model() -> LlamaForCausalLM:
    """Return the untrained model, in float32 on the CPU."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> torch.Tensor:
    """Return the sections as one row of int64 tokens, each section between BOS and EOS."""
    return torch.tensor([token for text in texts for token in [*tokenizer(text, verbose=False).input_ids, EOS_ID]])


def learning_rate(step: int) -> float:
    """Return the rate of a step: linear warm-up, then a cosine down to a fraction of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    cosine = 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (NUM_STEPS - WARMUP_STEPS)))
    return PEAK_LR * (FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * cosine)


def fit(model: LlamaForCausalLM, tokens: torch.Tensor) -> LlamaForCausalLM:
    """Train on windows at random places of the tokens.

    Returns:
        The moving average of the weights over the steps. On so little text it is 0.2 nats better than the last step.
    """
    average = copy.deepcopy(model)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    model.train()
    for step in range(NUM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        starts = torch.randint(len(tokens) - MAX_POSITIONS, (BATCH_SIZE,))
        windows_BT = torch.stack([tokens[start : start + MAX_POSITIONS + 1] for start in starts])
        logits_BTV = model(windows_BT[:, :-1]).logits
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), windows_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            # The early average forgets faster, or it would remember the random initialization.
            decay = min(EMA_DECAY, (step + 1) / (step + 10))
            for averaged, current in zip(average.parameters(), model.parameters(), strict=True):
                averaged.lerp_(current, 1 - decay)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{NUM_STEPS}: training loss {loss.item():.3f}", flush=True)
    return average.eval()


def top1_margin(logits: torch.Tensor) -> torch.Tensor:
    """Return log p(first choice) - log p(second choice) in nats, over the last axis."""
    best = logits.double().log_softmax(-1).topk(2).values
    return best[..., 0] - best[..., 1]


@torch.no_grad()
def held_out_figures(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> tuple[float, float]:
    """Measure teacher-forced prediction of held-out sections, in windows of the full context.

    Returns:
        The mean loss in nats per token, and the median top-1 margin in nats.
    """
    losses, margins = [], []
    for window_T in encode(tokenizer, texts).split(MAX_POSITIONS):
        logits_TV = model(window_T[None]).logits[0, :-1]
        losses.append(F.cross_entropy(logits_TV, window_T[1:], reduction="none"))
        margins.append(top1_margin(logits_TV))
    return torch.cat(losses).double().mean().item(), torch.cat(margins).median().item()


@dataclass(frozen=True)
class GreedySample:
    """What the model continues the prompts with.

    Attributes:
        texts: Prompt and continuation, one per prompt.
        median_margin: Median top-1 margin of the generated tokens, in nats.
    """

    texts: tuple[str, ...]
    median_margin: float


@torch.no_grad()
def generate_greedily(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> GreedySample:
    """Continue all prompts greedily, as one left-padded batch."""
    prompts = tokenizer(list(PROMPTS), padding=True, return_tensors="pt")
    output = model.generate(
        input_ids=prompts.input_ids,
        attention_mask=prompts.attention_mask,
        max_new_tokens=NUM_GREEDY_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits_BTV = torch.stack(output.logits, dim=1)
    generated_BT = output.sequences[:, prompts.input_ids.shape[1] :]
    # A row that has ended is filled with padding, about which the model was not asked.
    margins = top1_margin(logits_BTV)[generated_BT != PAD_ID]
    return GreedySample(
        texts=tuple(tokenizer.batch_decode(output.sequences, skip_special_tokens=True)),
        median_margin=margins.median().item(),
    )


def make_deterministic() -> None:
    """Fix the seed, the number of threads and the algorithms of PyTorch for this process."""
    torch.manual_seed(SEED)
    torch.set_num_threads(NUM_THREADS)
    torch.use_deterministic_algorithms(True)


def train() -> None:
    """Train and overwrite the files of this directory."""
    started = time.perf_counter()
    make_deterministic()
    training, held_out = split_corpus(topics)
    corpus = digest(training + held_out)
    if corpus != CORPUS_SHA256:
        print(f"note: this Python ships other topics (sha256 {corpus}): the weights will differ from the bundled ones")
    tokenizer = build_tokenizer(training)
    model = fit(build_model(), encode(tokenizer, training))
    tokenizer.save_pretrained(DIRECTORY)
    model.save_pretrained(DIRECTORY)
    (DIRECTORY / HELD_OUT).write_bytes(SECTION_BREAK.join(held_out).encode())
    print(f"trained in {time.perf_counter() - started:.0f} s")


def verify() -> None:
    """Print the figures of the files in this directory."""
    make_deterministic()
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
    model = AutoModelForCausalLM.from_pretrained(DIRECTORY)
    loss, margin = held_out_figures(model, tokenizer, load_held_out())
    sample = generate_greedily(model, tokenizer)
    for text in sample.texts:
        print(f"{text}\n{'-' * 40}")
    print(f"held-out loss            {loss:.4f} nats per token")
    print(f"held-out median margin   {margin:.3f} nats")
    print(f"greedy median margin     {sample.median_margin:.3f} nats")
    print(f"sha256 of {WEIGHTS} {hashlib.sha256((DIRECTORY / WEIGHTS).read_bytes()).hexdigest()}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train or measure the bundled tiny Llama.")
    parser.add_argument("--verify", action="store_true", help="measure the files that are here instead of training")
    if not parser.parse_args().verify:
        train()
    verify()


if __name__ == "__main__":
    main()
