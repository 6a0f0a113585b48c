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

from typing import TYPE_CHECKING

from glassengine.deferred import deferred

if TYPE_CHECKING:
    from glassengine.capture.model_debugger import model_addition_debugger_context as model_addition_debugger_context
    from glassengine.capture.observers import NetworkOutputs as NetworkOutputs
    from glassengine.capture.observers import named_network_outputs as named_network_outputs
    from glassengine.compat import libneuronxla as libneuronxla
    from glassengine.compat import torch_xla as torch_xla
    from glassengine.engine.run.step_files import StepFiles as StepFiles
    from glassengine.executable.counters import metrics_report as metrics_report
    from glassengine.executable.snapshot.policy import register_hlo_snapshot_callback as register_hlo_snapshot_callback
    from glassengine.executable.steps import add_step_closure as add_step_closure
    from glassengine.executable.steps import current_step as current_step
    from glassengine.executable.steps import is_master_ordinal as is_master_ordinal
    from glassengine.executable.steps import mark_step as mark_step
    from glassengine.frontends.eager_debug import eager_debug as eager_debug
    from glassengine.recording.source import Dump as Dump
    from glassengine.taps import register_network_output as register_network_output

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
__all__ = list(_PUBLIC)
__getattr__, __dir__ = deferred(__name__, _PUBLIC)
