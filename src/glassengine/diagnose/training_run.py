"""A training run as it happens, with what every step began and ended with, and one step of it as a program.

The program of a step has its forward and backward: loss and gradients from parameters and inputs, op by op. A backward
op has the path of the module whose forward op it differentiates, marked as such: `layers.0.mlp.up_proj:backward/mm.0`.
Autograd numbers its nodes as the forward makes them, and the backward ops that a node runs carry its number; so path
and source line of the forward are known.

Attention is written out: the fused kernels' backward has neither a rounding bound nor an inside.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, nn
from torch._decomp import get_decompositions
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from glassengine.errors import UsageError, first_line
from glassengine.judge.flat_graphs import flat_program, with_values
from glassengine.program import load_inputs, load_model
from glassengine.program.representation.outputs import is_view
from glassengine.program.representation.program import Program
from glassengine.program.user_code.calls import load_function, raised_by
from glassengine.program.user_code.module_state import own_copies, weights_of
from glassengine.program.user_code.tracing import fast_tracing
from glassengine.sites import ROOT
from glassengine.torch_versions import compiling, tracing_real_tensors

OptimizerFactory = Callable[[nn.Module], Any]
"""Makes the optimizer of a module, or (optimizer, scheduler of its learning rate)."""

_HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "initial_lr", "param_names"})
LEARNING_RATE = 1e-3
"""Of the optimizer that is taken where none is given."""
BACKWARD = ":backward"
LOSS = "loss"
GRADIENT = ":grad"
_OF = "differentiates"
Loss = Callable[[Any], Tensor]
_aten = torch.ops.aten
# Written out, these have rounding bounds op by op.
_DECOMPOSED = (
    _aten._log_softmax_backward_data,
    _aten._softmax_backward_data,
    _aten.embedding_dense_backward,
    _aten.gelu_backward,
    _aten.native_batch_norm,
    _aten.native_batch_norm_backward,
    _aten.native_layer_norm_backward,
    _aten.nll_loss_backward,
    _aten.sigmoid_backward,
    _aten.silu_backward,
    _aten.tanh_backward,
    _aten.threshold_backward,
)
# Functional counterparts of another name.
_OVERLOADS = {_aten.bernoulli_.float: "p"}


@dataclass(frozen=True)
class StepTaken:
    """One step of a training run; tensors are copies.

    Attributes:
        state: Parameters and buffers before the step, by name.
        loss: Scalar.
        gradients: By parameter; None where the parameter has none.
        memory: What the optimizer kept before its step: parameter -> name -> value.
        options: Hyperparameters of the step, by parameter: learning rate, betas and the like.
        parameters_after: Parameters after the optimizer's step.
        memory_after: What the optimizer keeps after it.
        buffers_written: Names of the buffers that the forward changed.
    """

    state: Mapping[str, Tensor]
    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    memory: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Mapping[str, Any]]
    parameters_after: Mapping[str, Tensor]
    memory_after: Mapping[str, Mapping[str, Any]]
    buffers_written: tuple[str, ...]


def train(
    module: nn.Module, batches: Sequence[Mapping[str, Any]], loss: Loss, optimizer: OptimizerFactory
) -> list[StepTaken]:
    """Train `module` for one step per batch and keep what happened. The module is changed.

    Raises:
        UsageError: The optimizer needs a closure, or the loss is not a scalar.
    """
    plain = getattr(module, "_orig_mod", module)
    with raised_by("the function that makes the optimizer"):
        updates, scheduler = split(optimizer(module))
    names = {parameter: name for name, parameter in plain.named_parameters()}
    steps = []
    for batch in batches:
        updates.zero_grad(set_to_none=True)
        state = {name: tensor.detach().clone() for name, tensor in weights_of(plain).items()}
        with raised_by(f"the forward of {type(plain).__name__}"):
            made = module(**own_copies(batch))
        with raised_by("the loss function"):
            value = loss(made)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UsageError("the loss is not a scalar", got=str(getattr(value, "shape", type(value).__name__)))
        with raised_by(f"the backward of {type(plain).__name__}"):
            value.backward()  # type: ignore[no-untyped-call]
        gradients = {
            name: None if parameter.grad is None else parameter.grad.detach().clone()
            for name, parameter in plain.named_parameters()
            if parameter.requires_grad
        }
        memory, options = _memory(updates, names), options_of(updates, names)
        written = tuple(name for name, buffer in plain.named_buffers() if not torch.equal(buffer, state[name]))
        with raised_by(f"the optimizer {type(updates).__name__}"):
            _update(updates)
        after = {name: p.detach().clone() for name, p in plain.named_parameters() if p.requires_grad}
        steps.append(
            StepTaken(
                state, value.detach().clone(), gradients, memory, options, after, _memory(updates, names), written
            )
        )
        if scheduler is not None:
            with raised_by(f"the scheduler {type(scheduler).__name__}"):
                scheduler.step()
    return steps


def split(made: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Return optimizer and scheduler (or None) of what a factory made."""
    optimizer, scheduler = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            "the optimizer factory did not return an optimizer",
            got=type(optimizer).__name__,
            expected="a torch.optim.Optimizer, or (optimizer, scheduler)",
        )
    return optimizer, scheduler


def options_of(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, dict[str, Any]]:
    """Return the hyperparameters of each parameter, without those that say how fast the same is computed."""
    return {
        names[parameter]: {key: number_of(value) for key, value in group.items() if key not in _HOW}
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in names
    }


def repeat_update(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    step: StepTaken,
    change: Callable[[Tensor], Tensor],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Make the update of `optimizer` on parameters, gradients and memory of another run's step.

    Args:
        optimizer: Of a module of the same parameters, in any dtype; its own hyperparameters hold.
        names: Its parameters.
        step: Of the other run.
        change: Done to every floating tensor that is taken over.

    Returns:
        Parameters and memory after the update, by parameter.
    """
    for parameter, name in names.items():
        if name not in step.gradients:
            continue
        with torch.no_grad():
            parameter.copy_(change(step.state[name]))
        gradient = step.gradients[name]
        # Optimizers write to their memory, and may write to gradients: what the other run had stays as it was.
        parameter.grad = None if gradient is None else change(gradient).to(parameter.dtype, copy=True)
        known = step.memory.get(name)
        if known is not None:
            optimizer.state[parameter] = {
                key: change(value).to(parameter.dtype, copy=True)
                if _follows(value, parameter)
                else copy.deepcopy(value)
                for key, value in known.items()
            }
    _update(optimizer)
    after = {name: parameter.detach().clone() for parameter, name in names.items() if name in step.gradients}
    return after, _memory(optimizer, names)


def _update(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except TypeError as error:
        if "closure" not in str(error):
            raise
        got = type(optimizer).__name__
        raise UsageError("an optimizer that needs a closure cannot be judged", got=got) from error


def _follows(value: Any, parameter: Tensor) -> bool:
    """Whether a value in the memory of an optimizer has the dtype of its parameter; step counters have their own."""
    return (
        isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape and value.dim() > 0
    )


def _memory(optimizer: torch.optim.Optimizer, names: Mapping[Any, str]) -> dict[str, dict[str, Any]]:
    return {
        names[parameter]: {key: v.detach().clone() if isinstance(v, Tensor) else v for key, v in kept.items()}
        for parameter, kept in optimizer.state.items()
        if parameter in names
    }


def number_of(value: Any) -> Any:
    """Return the number that a tensor of one element holds; anything else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def module_of(target: str | Path | nn.Module, **options: Any) -> nn.Module:
    """Return a module as it is, or load one by name, in training mode; `options` are those of `load_model`."""
    return target if isinstance(target, nn.Module) else load_model(target, **options).module.train()


def batches_of(inputs: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the keyword arguments of each step.

    Raises:
        UsageError: There are none.
    """
    given = load_inputs(str(inputs)) if isinstance(inputs, (str, Path)) else inputs
    batches = [dict(batch) for batch in ([given] if isinstance(given, Mapping) else given or ())]
    if not batches:
        raise UsageError(
            "no step would be trained",
            expected="one dict of keyword arguments per step",
            hint="--inputs file.py:factory, or a tensor file",
        )
    return batches


def optimizer_of(made_by: str | OptimizerFactory | None) -> OptimizerFactory:
    """Return what makes the optimizer of a module: `file.py:function`, a function, or AdamW."""
    if made_by is None:
        return lambda module: torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    return load_function(made_by) if isinstance(made_by, str) else made_by


def loss_of(made_by: str | Loss | None) -> Loss:
    """Return what takes the scalar loss out of a module's result: `file.py:function`, a function, or its `.loss`."""
    if made_by is None:
        return _own_loss
    return load_function(made_by) if isinstance(made_by, str) else made_by


def _own_loss(result: Any) -> Tensor:
    value = result["loss"] if isinstance(result, Mapping) and "loss" in result else getattr(result, "loss", result)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UsageError(
            "what the model returns holds no loss",
            got=type(result).__name__,
            expected='a scalar, .loss or ["loss"]: a model of transformers needs labels among its inputs',
            hint="--loss file.py:function (loss=lambda result: ...)",
        )
    return value.reshape(())


def gradient_program(
    module: nn.Module, inputs: Mapping[str, Any], loss: Loss, values: Mapping[str, Tensor] | None = None
) -> Program:
    """Trace one training step of `module`; its own parameters are left as they are.

    Args:
        module: In the mode in which it is trained.
        inputs: Keyword arguments of one step.
        loss: Gives the scalar to differentiate, from what the module returns.
        values: Parameters and buffers to trace with, by name; the module's own by default.

    Returns:
        A program of parameters, buffers and tensors of `inputs` (see `step_inputs`), with the results `loss` and
        `<parameter>:grad`.

    Raises:
        UsageError: The step cannot be traced, or writes to a buffer.
    """
    named = dict(values or weights_of(module))
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    places: list[str] = []
    made: list[str] = []

    def step(state: list[Tensor], given: list[Tensor]) -> list[Tensor]:
        state = [tensor.detach().requires_grad_(name in trained) for name, tensor in zip(named, state, strict=True)]
        parameters = dict(zip(named, state, strict=True))
        arguments = {**inputs, **dict(zip(tensors, given, strict=True))}
        with _watched(module, places):
            value = loss(torch.func.functional_call(module, parameters, (), arguments))
        assert value.grad_fn is not None
        setup_stacktrace_preservation_hooks([value.grad_fn])
        fx_traceback.current_meta["nn_module_stack"] = {"": (BACKWARD, "")}
        found = torch.autograd.grad(value, [parameters[name] for name in trained], allow_unused=True)
        gradients = {name + GRADIENT: g for name, g in zip(trained, found, strict=True) if g is not None}
        made[:] = [LOSS, *gradients]
        return [value.detach(), *gradients.values()]

    try:
        kept = fx_traceback.preserve_node_meta()
        with kept, sdpa_kernel(SDPBackend.MATH), compiling(), fast_tracing(None), tracing_real_tensors():
            table: Any = get_decompositions(_DECOMPOSED)
            traced = make_fx(step, table, record_stack_traces=True)(
                [tensor.detach() for tensor in named.values()], list(tensors.values())
            )
    except RuntimeError as error:
        reason = first_line(error)
        raise UsageError("the training step cannot be traced", got=f"{type(module).__name__}: {reason}") from error
    names = [placeholder_name(name) for name in (*named, *tensors)]
    for node, name in zip(traced.graph.find_nodes(op="placeholder"), names, strict=True):
        node.name = node.target = name
    _name_backward(traced)
    constants = _lift_constants(traced)
    _without_writes(traced)
    traced.recompile()
    # A program has values of a fake mode that knows its inputs.
    with_values(traced, [*reversed([value for _, value in constants.values()]), *named.values(), *tensors.values()])
    return flat_program(traced, weights=constants, output_names=made)


def step_inputs(state: Mapping[str, Tensor], inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return parameters, buffers and tensors of one step by the names of the program's inputs."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    return {placeholder_name(name): tensor.detach() for name, tensor in {**state, **tensors}.items()}


def placeholder_name(name: str) -> str:
    """Return the name of the program's input for a parameter, buffer or argument."""
    return "given_" + re.sub(r"\W", lambda found: f"_{ord(found[0]):x}_" if found[0] != "." else "__", name)


def is_backward(site: str) -> bool:
    """Whether a site of such a program belongs to the backward."""
    return BACKWARD in site


class _watched:
    """While it is on, every node is traced with the path of the module that runs."""

    def __init__(self, module: nn.Module, places: list[str]) -> None:
        self._module, self._places = module, places
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> None:
        for name, module in self._module.named_modules():
            self._hooks.enter_context(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name)))
            self._hooks.enter_context(module.register_forward_hook(lambda *_: self._leave(), always_call=True))

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _enter(self, name: str) -> None:
        self._places.append(name)
        self._note()

    def _leave(self) -> None:
        self._places.pop()
        self._note()

    def _note(self) -> None:
        path = self._places[-1] if self._places else ""
        fx_traceback.current_meta["nn_module_stack"] = {"": (path, "")}


def _name_backward(traced: GraphModule) -> None:
    """Give backward nodes path and source line of the forward op that they differentiate."""
    forward: dict[int, Node] = {}
    source: Node | None = None
    for node in traced.graph.nodes:
        if node.op != "call_function":
            continue
        is_sum = "Gradient addition" in (node.meta.get("stack_trace") or "")
        node.meta["stack_trace"] = _without_own_frames(node.meta.get("stack_trace"))
        number = node.meta.get("seq_nr", -1)
        if _path(node) != BACKWARD:
            # Of several ops of one autograd node the last is the one it is named after.
            forward[number] = node
            continue
        if not is_sum:
            source = forward.get(max((known for known in forward if known <= number), default=-1))
        # Where several gradients of one tensor are added up, what was differentiated last is near enough.
        path = ROOT if source is None else _path(source) or ROOT
        node.meta["nn_module_stack"] = {"": (path + BACKWARD, "")}
        node.meta[_OF] = None if source is None else source.name
        if source is not None and not node.meta["stack_trace"]:
            node.meta["stack_trace"] = source.meta.get("stack_trace")


def differentiated(node: Node) -> str | None:
    """Return the op of the forward whose gradient an op computes, by name; None of a forward."""
    return node.meta.get(_OF)


def _path(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {"": ("", "")}
    return str(next(iter(stack.values()))[0])


def _without_own_frames(trace: str | None) -> str:
    """Return a stack trace without frames of this package: its lines are not of the model."""
    frames = re.split(r'(?m)^(?=\s*File ")', trace or "")
    return "".join(frame for frame in frames if 'File "' in frame and "/glassengine/diagnose/" not in frame)


def _without_writes(traced: GraphModule) -> None:
    """Let ops that write into fresh tensors (the mask of a dropout) return another one; what is used later is theirs.

    A write into a view, or into what has views, is left: the graph does not say what else it changes. One into a
    buffer (running statistics) matters to the next step only, which begins with the buffers of the run.
    """
    for node in traced.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name.split("::")[-1]
        if not node.target._schema.is_mutable or not name.endswith("_"):
            continue
        written = node.args[0]
        is_state = written.target is _aten.detach.default and written.args[0].op == "placeholder"
        overload = _OVERLOADS.get(node.target, node.target._overloadname)
        functional = getattr(getattr(_aten, name[:-1], None), overload, None)
        has_views = (is_view(written) and not is_state) or any(is_view(user) for user in written.users)
        if functional is None or has_views:
            continue
        node.target = functional
        if functional is _aten.bernoulli.p and len(node.args) == 1:
            node.args = (written, 0.5)


def _lift_constants(traced: GraphModule) -> dict[str, tuple[str, Tensor]]:
    """Make constants of the trace inputs, and return them by placeholder: an op that uses one can be replayed."""
    constants: dict[str, tuple[str, Tensor]] = {}
    for node in list(traced.graph.find_nodes(op="get_attr")):
        target = str(node.target)
        value = getattr(traced, target)
        with traced.graph.inserting_before(next(iter(traced.graph.nodes))):
            placeholder = traced.graph.placeholder(f"constant_{target}")
        node.replace_all_uses_with(placeholder)
        traced.graph.erase_node(node)
        constants[placeholder.name] = (target, value)
    return constants
