"""Modules under the names of other tools, so that a script of theirs needs other imports only.

| of | names |
|---|---|
| TensorRT-LLM | `NetworkOutputs` and its method `register_network_output`, `named_network_outputs` |
| Ditto | `StepFiles`: the `step<i>.pt` and `step<i>.txt` of a run |
| PyTorch NeuronX, torch-xla | `mark_step`, `add_step_closure`, `is_master_ordinal`, `metrics_report` |
| | `register_hlo_snapshot_callback`; `eager_debug` is their eager debug mode, `current_step` counts the steps |
| | `torch_xla` and `libneuronxla`: their modules by name, for scripts whose imports alone are changed |
| transformers | `model_addition_debugger_context` |

`torch_xla.debug.profiler` is `glassengine.profiler`. `Dump` is a record of tensors that any other tool wrote, as
`glassengine.open` returns it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from glassengine.deferred import deferred

if TYPE_CHECKING:
    from glassengine.capture.model_debugger import model_addition_debugger_context
    from glassengine.capture.observers import NetworkOutputs, named_network_outputs
    from glassengine.compat import libneuronxla, torch_xla
    from glassengine.engine.run.step_files import StepFiles
    from glassengine.executable.counters import metrics_report
    from glassengine.executable.snapshot.policy import register_hlo_snapshot_callback
    from glassengine.executable.steps import add_step_closure, current_step, is_master_ordinal, mark_step
    from glassengine.frontends.eager_debug import eager_debug
    from glassengine.recording.source import Dump
    from glassengine.taps import register_network_output

__all__ = [
    "Dump",
    "NetworkOutputs",
    "StepFiles",
    "add_step_closure",
    "current_step",
    "eager_debug",
    "is_master_ordinal",
    "libneuronxla",
    "mark_step",
    "metrics_report",
    "model_addition_debugger_context",
    "named_network_outputs",
    "register_hlo_snapshot_callback",
    "register_network_output",
    "torch_xla",
]

_PUBLIC = {
    "Dump": "glassengine.recording.source",
    "NetworkOutputs": "glassengine.capture.observers",
    "StepFiles": "glassengine.engine.run.step_files",
    "add_step_closure": "glassengine.executable.steps",
    "current_step": "glassengine.executable.steps",
    "eager_debug": "glassengine.frontends.eager_debug",
    "is_master_ordinal": "glassengine.executable.steps",
    "libneuronxla": "glassengine.compat.libneuronxla",
    "mark_step": "glassengine.executable.steps",
    "metrics_report": "glassengine.executable.counters",
    "model_addition_debugger_context": "glassengine.capture.model_debugger",
    "named_network_outputs": "glassengine.capture.observers",
    "register_hlo_snapshot_callback": "glassengine.executable.snapshot.policy",
    "register_network_output": "glassengine.taps",
    "torch_xla": "glassengine.compat.torch_xla",
}
__getattr__, __dir__ = deferred(__name__, _PUBLIC)
