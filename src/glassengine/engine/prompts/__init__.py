"""Prompts and text: templates, tokenizers, batches."""
