"""The source graph, run by ONNX Runtime: as written, with every value within reach, or with the options of a user.

`graph_optimization_level=basic` is an attribute of SessionOptions; the levels are disable, basic, extended, layout and
all. `session.set_denormal_as_zero=1` is an entry of its configuration, which has a dot in its name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from glassengine.blocks import agree
from glassengine.errors import BackendError, UsageError, first_line
from glassengine.extensions import require_package
from glassengine.program.onnx.file import INSTALL, OnnxFile
from glassengine.reading.documents import read_document
from glassengine.taps import deliver

if TYPE_CHECKING:
    import onnx


_LEVEL = "graph_optimization_level"
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class SessionSettings:
    """How a session is made; what is not said is ONNX Runtime's own default, which optimizes as far as it can.

    Attributes:
        given: Option -> value.
    """

    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def level(self) -> str:
        """How far the graph is optimized."""
        name = str(self.given.get(_LEVEL, "all")).lower()
        return "disable" if "disable" in name else name.removeprefix("ort_enable_")

    def options(self) -> Any:
        """Return the options as ONNX Runtime takes them.

        Raises:
            BackendError: It is not installed.
            UsageError: It has no such option, or refuses the value.
        """
        onnxruntime = require_package("onnxruntime", "an ONNX file cannot be run here", INSTALL, BackendError)
        made = onnxruntime.SessionOptions()
        made.intra_op_num_threads = torch.get_num_threads()
        made.log_severity_level = 4  # what it says is in the error
        for name, value in self.given.items():
            try:
                if "." in name:
                    made.add_session_config_entry(name, str(value))
                elif name == _LEVEL:
                    way = "DISABLE_ALL" if self.level == "disable" else f"ENABLE_{self.level.upper()}"
                    made.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{way}")
                else:
                    setattr(made, name, value)
            except Exception as error:  # whatever its C++ raises
                known = [one for one in dir(made) if not callable(getattr(made, one)) and one[0] != "_"]
                raise UsageError(
                    "ONNX Runtime does not take a session option", got=f"{name}={value}", expected=", ".join(known)
                ) from error
        return made


def session_settings(given: Mapping[str, Any] | str | Path | Sequence[str] | None) -> SessionSettings:
    """Return the settings that a user names: a mapping, the path of a JSON object, or texts "KEY=VALUE".

    Raises:
        UsageError: A text is neither.
    """
    if isinstance(given, Mapping):
        return SessionSettings(dict(given))
    settings: dict[str, Any] = {}
    for text in map(str, [given] if isinstance(given, str | Path) else given or ()):
        name, has_value, value = text.partition("=")
        if text.endswith(".json"):
            settings |= read_document(text, dict[str, Any], most=_MOST_BYTES, what="the session options")
        elif not has_value:
            raise UsageError("--session-options are KEY=VALUE, or a JSON file", got=text, expected=f"{_LEVEL}=basic")
        else:
            settings[name] = _plain(value)
    return SessionSettings(settings)


def _plain(text: str) -> bool | int | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdecimal() else text


def with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return a copy of a graph that returns `names` as well, each under its own name; weights are no inputs of it."""
    from onnx import ValueInfoProto

    copied = copy.deepcopy(model)
    known = {value.name: value for value in (*copied.graph.value_info, *copied.graph.input)}
    present = {value.name for value in copied.graph.output}
    copied.graph.output.extend(known.get(name) or ValueInfoProto(name=name) for name in names if name not in present)
    weights = {tensor.name for tensor in copied.graph.initializer}
    inputs = [value for value in copied.graph.input if value.name not in weights]
    if len(inputs) < len(copied.graph.input):
        del copied.graph.input[:]
        copied.graph.input.extend(inputs)
        copied.ir_version = max(4, copied.ir_version)  # before, every weight had to be an input
    return copied


def start(model: bytes | str, options: Any, providers: Sequence[Any] = ("CPUExecutionProvider",)) -> Any:
    """Return a session of ONNX Runtime for a model or its file, or raise what the runtime says.

    Left to itself, it prints that it tries again with other providers to stdout, where a command may write a document.
    """
    import onnxruntime

    return onnxruntime.InferenceSession(model, options, providers=list(providers), enable_fallback=0)


_FOLDER = "session.model_external_initializers_file_folder_path"


def open_session(file: OnnxFile, outputs: Sequence[str]) -> Any:
    """Return a session of ONNX Runtime that also returns `outputs`, in exact products of integers.

    Raises:
        BackendError: ONNX Runtime is not installed, or does not take the graph.
    """
    options = SessionSettings({"graph_optimization_level": "disable", "inter_op_num_threads": 1}).options()
    options.add_session_config_entry(_FOLDER, str(file.path.parent.absolute()))
    model = with_outputs(file.model, outputs)
    in_uint8(file, model)
    known = "standard operators, or those of ONNX Runtime (com.microsoft)"
    with errors_of_runtime(f"ONNX Runtime does not take {file.path.name}", known):
        return start(model.SerializeToString(), options)


_SHIFT = 128
_OPERATORS = {
    **dict.fromkeys(("MatMulInteger", "ConvInteger"), (1, 3)),
    **dict.fromkeys(("QLinearMatMul", "QLinearConv", "QGemm"), (3, 5)),
}
"""Operator -> places of its weight and of the zero point of that."""


class OnnxModel(nn.Module):
    """An ONNX file as a module: its inputs are keyword arguments, its results a dict, its values taps.

    Attributes:
        settings: Of the session that makes the results; None for the graph as it is written.
        apart: Result -> sums of squares of what these settings change, and of the result as the graph is written.
    """

    settings: SessionSettings | None = None

    def __init__(self, file: OnnxFile, values: Sequence[str], inputs: Sequence[str]) -> None:
        super().__init__()
        self.file = file
        self._observed = list(values)
        self._inputs = list(inputs)
        self._results = [value.name for value in file.model.graph.output]
        self._session: Any = None
        self._own: Any = None
        self.apart: dict[str, tuple[float, float]] = {}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the weights, which have the names of the file and so are attributes of no module."""
        for name, tensor in self.file.weights().items():
            yield name, nn.Parameter(tensor, requires_grad=False)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Return the weights by their names in the file."""
        return dict(self.file.weights())

    def values(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the graph node by node and return results and observed values by name.

        Raises:
            BackendError: ONNX Runtime is not installed, or fails.
        """
        if self._session is None:
            self._session = open_session(self.file, self._observed)
        return self._run(self._session, inputs)

    def returned(
        self, inputs: Mapping[str, torch.Tensor], known: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the results as the session with `settings` makes them.

        Args:
            inputs: By name.
            known: What `values` returned for them; None runs the graph as it is written too.

        Raises:
            BackendError: ONNX Runtime is not installed, does not take the file, or fails.
        """
        known = self.values(inputs) if known is None else known
        plain = {name: known[name] for name in self._results if name in known}
        if self.settings is None:
            return plain
        if self._own is None:
            options = self.settings.options()
            options.add_session_config_entry(_FOLDER, str(self.file.path.parent.absolute()))
            with errors_of_runtime(
                f"ONNX Runtime does not take {self.file.path.name} at level {self.settings.level!r}"
            ):
                path = str(self.file.path.absolute())
                self._own = start(self.file.model.SerializeToString() if self.file.is_repaired else path, options)
        made = self._run(self._own, inputs)
        for name, value in made.items():
            if value.is_floating_point() and name in plain and value.shape == plain[name].shape:
                noise, signal = self.apart.get(name, (0.0, 0.0))
                one, other = plain[name].double(), value.double()
                error = torch.where(agree(one, other), 0.0, other - one)
                size = torch.where(one.isfinite(), one, 0.0)
                self.apart[name] = noise + float(error.square().sum()), signal + float(size.square().sum())
        return {name: made.get(name, value) for name, value in plain.items()}

    def _run(self, session: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = [output.name for output in session.get_outputs()]
        with errors_of_runtime(f"ONNX Runtime cannot run {self.file.path.name}"):
            found = session.run(names, {name: inputs[name].contiguous().numpy() for name in self._inputs})
        made = dict(zip(names, found, strict=True))  # text and dicts are no tensors
        return {name: torch.from_numpy(v) for name, v in made.items() if hasattr(v, "dtype") and v.dtype != object}

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the graph; every value goes through a tap of its name, in the order of the graph."""
        found = self.values(inputs)
        for name in self._observed:
            if name in found:
                deliver(name, found[name])
        return self.returned(inputs, found)


@contextmanager
def errors_of_runtime(what: str, expected: str | None = None) -> Iterator[None]:
    """Raise what ONNX Runtime raises as an error of a back-end."""
    try:
        yield
    except Exception as error:
        raise BackendError(what, got=f"{type(error).__name__}: {first_line(error)}", expected=expected) from error


def in_uint8(file: OnnxFile, model: onnx.ModelProto) -> None:
    """Store weights of int8 that uint8 is multiplied by as uint8, in a copy of a file's graph.

    Many x86 processors add products of uint8 and int8 in pairs of 16 bits that overflow; those of uint8 are exact
    everywhere. The numbers stay the same with a zero point that is 128 larger. So what a kernel of the user's session
    loses by saturation is a cost, and no mistake of the file.
    """
    from onnx import TensorProto, numpy_helper

    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for node in model.graph.node:
        places = _OPERATORS.get(node.op_type, (0, 0))
        if not any(places) or types.get(node.input[places[0]]) != TensorProto.INT8:
            continue
        node.input.extend([""] * (places[1] + 1 - len(node.input)))
        # The zero point of what is multiplied is at 2: that of integers which the graph makes itself is uint8.
        is_uint8 = types.get(node.input[2], TensorProto.UINT8) == TensorProto.UINT8
        if not is_uint8 or node.input[places[1]] not in (*types, ""):
            continue
        for place in places:
            name = node.input[place]
            node.input[place] = new = f"{name} in uint8"
            if new not in types:
                types[new] = TensorProto.UINT8
                own = file.weights()[name].numpy() if name else np.array(0)
                value = (own.astype(np.int16) + _SHIFT).astype(np.uint8)
                model.graph.initializer.append(numpy_helper.from_array(value, new))
