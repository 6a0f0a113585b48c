"""`LSTM`, `GRU` and `RNN`: one cell as a graph of ATen ops, run over the steps of a sequence.

What rounding does to a recurrence is what it does to the ops of the cell, step by step (see `Composite`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from glassengine.plugins.onnx.table import Call, OnnxNode, translation
from glassengine.program.onnx.control import Body
from glassengine.program.onnx.function import Composite, Each, OnnxFunction

_aten = torch.ops.aten
_DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_ALPHA = {
    "Elu": 1.0,
    "HardSigmoid": 0.2,
    "LeakyRelu": 0.01,
    "ScaledTanh": 1.7159,
    "ThresholdedRelu": 1.0,
    "Affine": 1.0,
}
_BETA = {"HardSigmoid": 0.5, "ScaledTanh": 0.6667}


class _Cell:
    """Builds the graph of a cell: placeholders are x, states, then weights."""

    def __init__(self, names: Sequence[str]) -> None:
        self.graph = Graph()
        self.given = {name: self.graph.placeholder(name) for name in names}
        for node in self.given.values():
            node.meta["val"] = torch.empty(1, 1)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = torch.empty(1, 1)
        return node

    def gates(self, value: Node, number: int, size: int) -> list[Node]:
        return [self.call(_aten.slice.Tensor, value, 1, i * size, (i + 1) * size) for i in range(number)]

    def body(self, *results: Node) -> Body:
        self.graph.output(results)
        return Body(self.graph, (), ())


@translation("LSTM", "GRU", "RNN")
def _recurrence(node: OnnxNode) -> Call:
    kind = node.proto.op_type
    directions = 2 if node.attribute("direction", "forward") == "bidirectional" else 1
    size = node.attribute("hidden_size")
    if size is None:
        raise NotImplementedError("a recurrence whose size is not given")
    default = _DEFAULTS[kind]
    names = node.attribute("activations") or default * directions
    names = [name.decode() if isinstance(name, bytes) else name for name in names]
    alphas, betas = list(node.attribute("activation_alpha") or []), list(node.attribute("activation_beta") or [])
    functions = []
    for name in names:
        alpha = alphas.pop(0) if name in _ALPHA and alphas else _ALPHA.get(name)
        beta = betas.pop(0) if name in (*_BETA, "Affine") and betas else _BETA.get(name, 0.0)
        functions.append(_activation(name, alpha, beta))
    options = {
        "clip": node.attribute("clip"),
        "input_forget": bool(node.attribute("input_forget", 0)),
        "before_reset": bool(node.attribute("linear_before_reset", 0)),
    }
    per = len(default)
    cells = [_CELLS[kind](functions[i * per : (i + 1) * per], size, **options) for i in range(directions)]
    backwards = [node.attribute("direction", "forward") == "reverse", True][:directions]
    function = _over_time(cells, backwards if directions == 1 else [False, True], kind, size)
    wanted = 8 if kind == "LSTM" else 6
    arguments = tuple(node.input(i) for i in range(wanted))
    several = len(node.proto.output)
    bodies = dict(zip(("forward cell", "backward cell"), cells, strict=False))
    called = Composite(_results(function, several), kind, bodies=bodies, attributes=node.attributes)
    return called, arguments, {"layout": node.attribute("layout", 0)}


def _results(function: Callable[..., tuple[Tensor, ...]], number: int) -> Callable[..., Any]:
    def recurrence(*values: Any, layout: int, each: Each | None = None) -> Any:
        found = function(*values, layout=layout, each=each)[:number]
        return found[0] if number == 1 else found

    return recurrence


def _activation(name: str, alpha: float | None, beta: float) -> Callable[[_Cell, Node], Node]:
    aten = {"Sigmoid": _aten.sigmoid, "Tanh": _aten.tanh, "Relu": _aten.relu, "Softplus": _aten.softplus}
    if name in aten:
        return lambda cell, x: cell.call(aten[name].default, x)
    if name in ("Affine", "ScaledTanh"):

        def scaled(cell: _Cell, x: Node) -> Node:
            if name == "Affine":
                return cell.call(_aten.add.Tensor, cell.call(_aten.mul.Tensor, x, alpha), beta)
            return cell.call(
                _aten.mul.Tensor, cell.call(_aten.tanh.default, cell.call(_aten.mul.Tensor, x, beta)), alpha
            )

        return scaled
    if name == "Softsign":
        return lambda cell, x: cell.call(
            _aten.div.Tensor, x, cell.call(_aten.add.Tensor, cell.call(_aten.abs.default, x), 1.0)
        )
    if name == "HardSigmoid":
        return lambda cell, x: cell.call(OnnxFunction(_hard_sigmoid, "hardsigmoid"), x, alpha=alpha, beta=beta)
    if name == "LeakyRelu":
        return lambda cell, x: cell.call(_aten.leaky_relu.default, x, alpha)
    if name == "Elu":
        return lambda cell, x: cell.call(_aten.elu.default, x, alpha)
    raise NotImplementedError(f"the activation {name} in a recurrence")


def _hard_sigmoid(x: Tensor, *, alpha: float, beta: float) -> Tensor:
    return (alpha * x + beta).clamp(0, 1)


def _clipped(cell: _Cell, x: Node, clip: float | None) -> Node:
    return x if clip is None else cell.call(_aten.clamp.default, x, -clip, clip)


def _products(cell: _Cell) -> Node:
    """X W + h R + both biases."""
    of_x = cell.call(_aten.linear.default, cell.given["x"], cell.given["w"])
    of_h = cell.call(_aten.linear.default, cell.given["h"], cell.given["r"])
    return cell.call(_aten.add.Tensor, cell.call(_aten.add.Tensor, of_x, of_h), cell.given["b"])


def _lstm_cell(functions: list[Any], size: int, *, clip: float | None, input_forget: bool, before_reset: bool) -> Body:
    f, g, h = functions
    cell = _Cell(("x", "h", "c", "w", "r", "b", "b2", "p"))
    i, o, forget, new = cell.gates(_products(cell), 4, size)
    state = cell.given["c"]
    peep_i, peep_o, peep_f = cell.gates(cell.given["p"], 3, size)

    def with_peephole(gate: Node, state: Node, peep: Node) -> Node:
        return cell.call(_aten.add.Tensor, gate, cell.call(_aten.mul.Tensor, peep, state))

    i = f(cell, _clipped(cell, with_peephole(i, state, peep_i), clip))
    if input_forget:
        forget = cell.call(_aten.rsub.Scalar, i, 1.0)
    else:
        forget = f(cell, _clipped(cell, with_peephole(forget, state, peep_f), clip))
    new = g(cell, _clipped(cell, new, clip))
    kept, added = cell.call(_aten.mul.Tensor, forget, state), cell.call(_aten.mul.Tensor, i, new)
    after = cell.call(_aten.add.Tensor, kept, added)
    o = f(cell, _clipped(cell, with_peephole(o, after, peep_o), clip))
    return cell.body(cell.call(_aten.mul.Tensor, o, h(cell, after)), after)


def _gru_cell(functions: list[Any], size: int, *, clip: float | None, input_forget: bool, before_reset: bool) -> Body:
    f, g = functions
    cell = _Cell(("x", "h", "c", "w", "r", "b", "b2", "p"))
    of_x = cell.call(_aten.linear.default, cell.given["x"], cell.given["w"], cell.given["b"])
    weights = [cell.call(_aten.slice.Tensor, cell.given["r"], 0, i * size, (i + 1) * size) for i in range(3)]
    own = [cell.call(_aten.slice.Tensor, cell.given["b2"], 0, i * size, (i + 1) * size) for i in range(3)]
    x_z, x_r, x_h = cell.gates(of_x, 3, size)
    state = cell.given["h"]

    def linear(value: Node, i: int) -> Node:
        return cell.call(_aten.linear.default, value, weights[i], own[i])

    z = f(cell, _clipped(cell, cell.call(_aten.add.Tensor, x_z, linear(state, 0)), clip))
    r = f(cell, _clipped(cell, cell.call(_aten.add.Tensor, x_r, linear(state, 1)), clip))
    if before_reset:
        of_h = cell.call(_aten.mul.Tensor, r, linear(state, 2))
    else:
        of_h = linear(cell.call(_aten.mul.Tensor, r, state), 2)
    new = g(cell, _clipped(cell, cell.call(_aten.add.Tensor, x_h, of_h), clip))
    other = cell.call(_aten.mul.Tensor, cell.call(_aten.rsub.Scalar, z, 1.0), new)
    after = cell.call(_aten.add.Tensor, other, cell.call(_aten.mul.Tensor, z, state))
    return cell.body(after, after)


def _rnn_cell(functions: list[Any], size: int, *, clip: float | None, input_forget: bool, before_reset: bool) -> Body:
    cell = _Cell(("x", "h", "c", "w", "r", "b", "b2", "p"))
    after = functions[0](cell, _clipped(cell, _products(cell), clip))
    return cell.body(after, after)


_CELLS = {"LSTM": _lstm_cell, "GRU": _gru_cell, "RNN": _rnn_cell}


def _over_time(cells: list[Body], backwards: list[bool], kind: str, size: int) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function of the inputs of the operator that gives all its results: Y, Y_h and, of an LSTM, Y_c."""
    number = _GATES[kind]

    def run(
        x: Tensor,
        w: Tensor,
        r: Tensor,
        b: Tensor | None = None,
        lengths: Tensor | None = None,
        h: Tensor | None = None,
        c: Tensor | None = None,
        p: Tensor | None = None,
        *,
        layout: int = 0,
        each: Each | None = None,
    ) -> tuple[Tensor, ...]:
        x = x.transpose(0, 1) if layout else x
        steps, batch = x.shape[:2]
        ends = torch.full((batch,), steps) if lengths is None else lengths.long()
        outputs, last_h, last_c = [], [], []
        for d, cell in enumerate(cells):
            bias = x.new_zeros(2 * number * size) if b is None else b[d]
            own, recurrent = bias[: number * size], bias[number * size :]
            peep = x.new_zeros(1, 3 * size) if p is None else p[d][None]
            state = x.new_zeros(batch, size) if h is None else (h[:, d] if layout else h[d])
            memory = x.new_zeros(batch, size) if c is None else (c[:, d] if layout else c[d])
            # A cell of a GRU takes its biases apart.
            first = own if kind == "GRU" else own + recurrent
            y = x.new_zeros(steps, batch, size)
            rows = torch.arange(batch)
            for t in range(steps):
                at = (ends - 1 - t).clamp(min=0) if backwards[d] else torch.full((batch,), t)
                values = [x[at, rows], state, memory, w[d], r[d], first, recurrent, peep]
                new_h, new_c = cell.run(values, torch.float32, each)
                live = (t < ends)[:, None]
                state, memory = torch.where(live, new_h, state), torch.where(live, new_c, memory)
                y[at[live[:, 0]], rows[live[:, 0]]] = state[live[:, 0]]
            outputs.append(y)
            last_h.append(state)
            last_c.append(memory)
        stacked, final = torch.stack(outputs, 1), torch.stack(last_h)
        results = [stacked, final, torch.stack(last_c)] if kind == "LSTM" else [stacked, final]
        if layout:
            results = [stacked.permute(2, 0, 1, 3), *(part.transpose(0, 1) for part in results[1:])]
        return tuple(part.contiguous() for part in results)

    return run
