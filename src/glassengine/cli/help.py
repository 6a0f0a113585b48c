"""Arranges the help of a command: sections of options, and examples."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import typer

import glassengine

_GLOBAL = "Global options"
_SECTIONS = {
    "What is compared": "candidate rollout weights map layout transpose show_only floating_point_only series",
    "Model": "model dtype engine_dtype quantize device attn_implementation trust_remote_code revision adapter "
    "tensor_parallel pipeline_parallel max_batch_size max_seq_len passes",
    "Inputs": "inputs input_text input_ids input_file chat image tokenizer steps tokens_of max_new_tokens "
    "prefill_chunk",
    "Training": "optimizer candidate_optimizer loss gradients microbatches watch trigger tracker",
    "How it is judged": "fail_on min_coverage min_snr rtol atol accumulation drift only invariant all_levels "
    "bisect_outputs graft graft_until_clean suggest_precision first jobs cluster noise_floor",
    "Engines": "backend batch_invariant session_options library python against as_deployed trust_engine add_output",
    "Selection": "step rank nonfinite values full plot sites",
    "Sampling": "do_sample temperature top_k top_p repetition_penalty seed",
    "Debugging": "debug print_tensors debug_dir debug_format debug_mode synchronous snapshot snapshot_on profile",
    "Output": "output record export_format artifacts format report redact sarif reproduction byte_budget durable "
    "spool when_behind overwrite dry_run",
    _GLOBAL: "help version quiet verbose no_color no_progress metrics json",
}
_SECTION_OF = {name: section for section, names in _SECTIONS.items() for name in names.split()}
_FEW = 6
"""A command with at most so many options of its own has them in one section."""

_LINES = """\
build examples/tiny-llama
build my-model engine --dtype bfloat16
build net.py:net --inputs x.pt
sites examples/tiny-llama
sites examples/tiny-llama '*.mlp'
sites glass-recording
run engine --input-text '1 + 2'
run engine --input-ids ids.json --max-new-tokens 8
run engine --record run --debug '*.mlp*'
record examples/tiny-llama -o reference
record -o run -- train.py --lr 0.1
record --watch --trigger nonfinite=yes -- train.py
upload run s3://bucket/run
upload s3://bucket/run
upload run gs://bucket/run
show glass-recording
show run '*.attn*' --step 3
show dump.pt --values
compare reference port
compare a.safetensors b.safetensors --fail-on suspicious
compare engine-a engine-b --input-text '1 + 2'
check my-model port.py:port
check my-model --candidate gguf:model.gguf --report answer.html
check my-model --invariant batch --invariant padding
check-prompt my-model gguf:model.gguf
check-prompt my-model genai:folder
check-prompt my-model vllm:my-model --python VENV/bin/python
check-rollout my-model --rollout rollout.jsonl
check-rollout my-model --rollout batch.pt --weights step-90
check-rollout my-model --rollout rollout.json --report answer.html
check-training net.py:net --candidate port.py:port --inputs batches.pt
check-training net.py:net --candidate-optimizer port.py:optimizer
check-training net.py:net --candidate port.py:port --loss net.py:loss
watch reference.py -- port.py
watch 'train.py --seed 1' -- port.py --seed 1
watch reference.py --sites '*.mlp' -- port.py
explain answer.json
explain answer.json '*.mlp*'
explain answer.json re:attn
export answer.json --to model-explorer -o answer-graph.json
export answer.json --to perfetto -o trace.json
export answer.json --to onnx --model model.onnx -o judged.onnx
profile profiles
profile profiles --against earlier
profile --capture localhost:9012 --steps 5
snapshot show snapshots
snapshot show snapshots/0 --statistics
snapshot pack snapshots/0 -o step.safetensors
replay snapshots/0 --compare
replay step.safetensors --first-nonfinite
replay snapshots/0 --bisect
report answer.json -o page
report answer.json -o answer.html --redact
report answer.json -o page --recordings reference --recordings port
schema
schema check
schema compare --json=compare.schema.json
skill
skill -o SKILL.md
skill --json
mcp .
mcp /data/recordings --timeout 60
mcp . --run-code
doctor
doctor --batch
doctor --json
"""
_FIRST = {
    "check my-model port.py:port": "find the first wrong operation of a port, export or engine",
    "check-prompt my-model gguf:model.gguf": "compare tokens, templates and settings",
    "compare reference port": "compare two recordings or dumps; glass record makes them",
}
EXAMPLES = {name: tuple(lines) for name, lines in groupby(_LINES.splitlines(), key=lambda line: line.split()[0])}


def introduction() -> str:
    """Return what `glass` alone prints: what it is for, and three commands."""
    width = max(map(len, _FIRST))
    lines = [f"  glass {line:{width}}  {purpose}" for line, purpose in _FIRST.items()]
    purpose = (glassengine.__doc__ or "").partition("\n")[0]
    more = "All commands: glass --help. What to do for what you see: glass skill."
    return "\n".join([purpose, "", *lines, "", more])


def arrange(command: Any, name: str = "") -> None:
    """Put the options of a command into sections, and examples below them; flags and numbers show no type."""
    options = [one for one in command.params if one.param_type_name == "option"]
    own = [one for one in options if not one.hidden and _SECTION_OF.get(one.name) != _GLOBAL]
    for one in (*options, command.get_help_option(typer.Context(command))):
        if one.metavar is None:
            kind = one.type_descriptor.annotation
            one.metavar = "" if one.is_flag else "N" if kind in (int, float) else None
        section = _SECTION_OF.get(one.name)
        if section == _GLOBAL or len(own) > _FEW:
            one.rich_help_panel = section
    order = list(_SECTIONS)
    command.params.sort(key=lambda one: order.index(one.rich_help_panel) if one.rich_help_panel in order else -1)
    if name in EXAMPLES:
        command.epilog = "\n".join(["Examples:", *(f"  glass {line}" for line in EXAMPLES[name])])
