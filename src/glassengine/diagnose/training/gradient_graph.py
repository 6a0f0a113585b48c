"""Forward and backward of one training step as a program: loss and gradients from parameters and inputs, op by op.

A backward op has the path of the module whose forward op it differentiates, marked as such:
`layers.0.mlp.up_proj:backward/mm.0`. Autograd numbers its nodes as the forward makes them, and the backward ops that a
node runs carry its number; so path and source line of the forward are known.

Attention is written out: the fused kernels' backward has neither a rounding bound nor an inside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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
from glassengine.judge.graphs.flat import flat_program, with_values
from glassengine.program.representation.outputs import is_view
from glassengine.program.representation.program import Program
from glassengine.program.user_code.tracing import fast_tracing
from glassengine.sites import ROOT
from glassengine.torch_versions import compiling, tracing_real_tensors

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
    named = dict(values or state_of(module))
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


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


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
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._module.named_modules():
            self._handles += [
                module.register_forward_pre_hook(lambda *_, name=name: self._enter(name)),
                module.register_forward_hook(lambda *_: self._leave(), always_call=True),
            ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

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
