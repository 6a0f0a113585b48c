"""Which class of transformers a checkpoint is loaded with: the one that it was saved from.

A causal language model of a known configuration goes through transformers' own automatic class, which also serves
checkpoints that come with code. Everything else is what `architectures` of its configuration names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def model_class_of(config: Any, *, is_sentence_encoder: bool = False) -> Any:
    """Return the class to load with.

    Args:
        config: Configuration of the checkpoint.
        is_sentence_encoder: Whether the checkpoint is one of sentence-transformers, which uses the base model without
            a head, independent of the class it was saved from.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if is_sentence_encoder:
        return transformers.AutoModel
    remote = getattr(config, "auto_map", None) or {}
    named = (getattr(config, "architectures", None) or [""])[0]
    causal = CAUSAL.get(config.model_type, ())
    is_causal = named in causal if isinstance(causal, (list, tuple)) else named == causal
    if "AutoModelForCausalLM" in remote or is_causal or (not named and causal):
        return transformers.AutoModelForCausalLM
    automatic = next((name for name in remote if name.startswith("AutoModel")), "AutoModel")
    own = None if automatic in remote else getattr(transformers, named, None)
    return own if isinstance(own, type) and issubclass(own, nn.Module) else getattr(transformers, automatic)


def without_weights(model_class: Any, config: Any, dtype: torch.dtype, **options: Any) -> nn.Module:
    """Return a model of `model_class` on the meta device; `options` as for `from_pretrained`."""
    make = getattr(model_class, "from_config", None)
    if make is None:
        # A plain class has this counterpart, which the automatic ones end in as well; it runs no code of a checkpoint.
        options.pop("trust_remote_code", None)
        make = model_class._from_config
    with torch.device("meta"):
        module: nn.Module = make(config, dtype=dtype, **options)
    return module
