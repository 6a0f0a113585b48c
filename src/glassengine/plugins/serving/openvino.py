"""`openvino:DIR`: a decoder as OpenVINO's converter writes it, run step by step, and names for the parts of its graph.

Its ops are observed in float32, by the names of the modules that they were traced in (`names`); its weights are those
that the graph makes of its constants (`held`).

The converter names what it makes of an operation by module and operation (`__module.model.norm/aten::mul/Multiply_1`),
and numbers repetitions in an order of its own. So repetitions are numbered here, and only where each is made of the one
before and none was taken away; of several that were made of one operation the last kind has its value. What an
attention reads is taken from its inputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.backends.openvino import shared_core
from glassengine.errors import BackendError, UsageError, first_line
from glassengine.extensions import require_package
from glassengine.plugins.serving.alignment import Unread, as_parameter, recorded
from glassengine.plugins.serving.inside.glassengine_executorch import MOVES, OTHERWISE
from glassengine.plugins.serving.interpreter import ValuesAlone
from glassengine.recording.write.writer import RecordingWriter
from glassengine.serving.protocol import ServedWeight, ServingOptions, ServingRun

_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}
_SHAPED = ("Convert", "Reshape", "Unsqueeze")
_ROUNDED = ("u8", "i8", "u4", "i4")
_MADE_BY = ("Convert", "Subtract", "Multiply", "Reshape")
"""What a constant goes through on its way to a product: its zero, its scale, its groups put together."""
_NAME = re.compile(r"__module\.(.+?)/aten::(\w+)/([A-Za-z]\w*?)(?:_(\d+))?")
_ATTENTION = "ScaledDotProductAttention"
_PRODUCTS = {"linear", "addmm", "matmul"}


def held(openvino: Any, model: Any, module: nn.Module) -> Unread:
    """Return what a file has for the parameters of a module, read when it is asked for."""
    constants = {op.get_friendly_name(): op for op in model.get_ordered_ops() if op.get_type_name() == "Constant"}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    weights = {name: constants.get(f"self.{name}", constants.get(f"self.{name}_compressed")) for name in parameters}
    unnamed = _unnamed(model)
    for name, parameter in parameters.items():
        if weights[name] is None and parameter.dim() == 1:
            near = unnamed.get(name.rpartition(".")[0], ())
            weights[name] = next((one for one in near if _is_rounded(openvino, one, parameter)), None)
    return Unread(
        {
            name: partial(_weight, openvino, model, constant, parameters[name])
            for name, constant in weights.items()
            if constant is not None
        }
    )


def _unnamed(model: Any) -> dict[str, list[Any]]:
    """Return constants that ops of a module multiply with or add, by module: those of norms have no names."""
    by_module: dict[str, list[Any]] = {}
    for op in model.get_ordered_ops():
        path, _, rest = op.get_friendly_name().removeprefix("__module.").partition("/")
        if rest and op.get_type_name() in ("Multiply", "Add"):
            for one in op.inputs():
                source = one.get_source_output().get_node()
                while source.get_type_name() in _SHAPED:
                    source = source.input(0).get_source_output().get_node()
                if source.get_type_name() == "Constant" and source.get_element_type().get_type_name() in _FLOATS:
                    by_module.setdefault(path, []).append(source)
    return by_module


def _is_rounded(openvino: Any, constant: Any, parameter: Tensor) -> bool:
    """Whether a constant has the numbers of a parameter, rounded to the type that it is stored in."""
    if math.prod(constant.get_output_shape(0)) != parameter.numel():
        return False
    dtype = _FLOATS[constant.get_element_type().get_type_name()]
    return torch.equal(_values(openvino, constant).flatten(), parameter.detach().to(dtype).float())


def _weight(openvino: Any, model: Any, constant: Any, parameter: Tensor) -> ServedWeight:
    """Return one weight; `model` is given lest it be gone, and what reads the constant with it."""
    stored = (constant.get_friendly_name(),)
    kind = constant.get_element_type().get_type_name()
    values = _values(openvino, constant)
    if kind in _FLOATS:
        return as_parameter(stored, None, [values], [None], (kind.upper(),), parameter)
    arithmetic = _arithmetic(constant)
    if kind not in _ROUNDED or "Multiply" not in arithmetic:
        return ServedWeight(stored, None, types=(kind,), reason=f"numbers of the type {kind} are not compared")
    bits = int(kind[1:])
    low, high = (0, 2**bits - 1) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    scale = _values(openvino, arithmetic["Multiply"])
    zero = _values(openvino, arithmetic["Subtract"]) if "Subtract" in arithmetic else 0.0
    step = scale.abs().expand(values.shape)
    step = torch.where((values == low) | (values == high), -step, step).reshape(parameter.shape)
    value = ((values - zero) * scale).reshape(parameter.shape)
    return as_parameter(stored, None, [value], [step], (kind,), parameter)


def _arithmetic(constant: Any) -> dict[str, Any]:
    """Return the constants that are subtracted from integers, and that they are multiplied with."""
    arithmetic: dict[str, Any] = {}
    op = constant
    while True:
        readers = list(op.output(0).get_target_inputs())
        following = readers[0].get_node() if len(readers) == 1 else None
        if following is None or following.get_type_name() not in _MADE_BY:
            return arithmetic
        others = [one.get_source_output().get_node() for one in following.inputs()]
        other = next((one for one in others if one.get_friendly_name() != op.get_friendly_name()), None)
        while other is not None and other.get_type_name() == "Convert":
            other = other.input(0).get_source_output().get_node()
        if other is not None and other.get_type_name() != "Constant":
            return arithmetic
        if other is not None:
            arithmetic[following.get_type_name()] = other
        op = following


def _values(openvino: Any, constant: Any) -> Tensor:
    """Return the numbers of a constant in float32, those of four bits one by one."""
    wide = openvino.opset13.convert(constant, "f32")
    compiled = openvino.compile_model(openvino.Model([wide], []), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled([])[0].copy())


def observed(model: Any) -> dict[str, Any]:
    """Return outputs by module, operation and number; and what products and attention read (`in.0`, `attn.q`)."""
    groups: dict[tuple[str, str], list[tuple[str, int, int, Any]]] = {}
    outputs: dict[str, Any] = {}
    above: dict[str, int] = {}
    for place, op in enumerate(model.get_ordered_ops()):
        sources = [source.get_source_output() for source in op.inputs()]
        above[op.get_friendly_name()] = 1 << place
        for source in sources:
            above[op.get_friendly_name()] |= above.get(source.get_node().get_friendly_name(), 0)
        known = _NAME.fullmatch(op.get_friendly_name())
        if known is None or op.get_output_size() != 1 or not op.output(0).get_element_type().is_real():
            continue
        path, name, kind, written = known.groups()
        if op.get_type_name() == _ATTENTION:
            outputs.update(_read(path, sources))
        if op.get_type_name() == "MatMul" and name in _PRODUCTS:
            outputs[f"{path}/in.0"] = sources[0]
        if name not in MOVES and not path.endswith(OTHERWISE):
            groups.setdefault((path, name), []).append((kind, int(written or 0), place, op))
    for (path, name), ops in groups.items():
        same = [(number, place, op) for kind, number, place, op in ops if kind == ops[-1][0]]
        kind, number, _, op = ops[-1]
        is_chain = all(above[after.get_friendly_name()] >> place & 1 for (_, place, _), (*_, after) in pairwise(same))
        if is_chain and sorted(written for written, *_ in same) == list(range(len(same))):
            outputs |= {f"{path}/{name}.{place}": op.output(0) for place, (*_, op) in enumerate(same)}
        elif len(same) == 1 and op.get_type_name() != kind:
            outputs[f"{path}/{name}.{number}"] = op.output(0)  # several became one, by the name of the last
    return outputs


def _read(path: str, sources: list[Any]) -> dict[str, Any]:
    """Return the rotated queries that an attention reads, and the keys and values that are new in this step."""
    sources_read = {f"{path}/attn.q": sources[0]}
    for name, source in (("attn.k", sources[1]), ("attn.v", sources[2])):
        port = source
        while port.get_node().get_type_name() in ("Reshape", "Broadcast", "Unsqueeze", "Transpose"):
            port = port.get_node().input(0).get_source_output()
        if port.get_node().get_type_name() == "Concat" and port.get_node().get_input_size() == 2:
            sources_read[f"{path}/{name}"] = port.get_node().input(1).get_source_output()
    return sources_read


def key_of(port: Any) -> tuple[str, int]:
    """Return what says which output this is, of two objects for one."""
    return port.get_node().get_friendly_name(), port.get_index()


FILE = "openvino_model.xml"
_SETTINGS = {
    "INFERENCE_PRECISION_HINT": "f32",
    "EXECUTION_MODE_HINT": "ACCURACY",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    "ENABLE_CPU_PINNING": False,
}
_INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")


@dataclass
class OpenvinoCandidate(ValuesAlone):
    """A file of OpenVINO."""

    file: Path
    openvino: Any
    options: ServingOptions
    kind: str = "openvino"
    choices: Sequence[str] = ()
    runs_once: bool = True

    @property
    def spec(self) -> str:
        """As it was given."""
        return f"openvino:{self.file}"

    def weights(self, module: nn.Module, config: Any) -> Mapping[str, ServedWeight]:
        """Return its constants."""
        return held(self.openvino, self._read(), module)

    def record(self, run: ServingRun, path: Path) -> None:
        """Run it in float32 with every op observed, and write down what each computed."""
        model = self._read()
        taken = [one.get_any_name() for one in model.inputs]
        if set(taken) - set(_INPUTS) or "input_ids" not in taken:
            raise UsageError(
                "the graph takes something else than a decoder with a cache inside",
                got=", ".join(taken),
                expected=", ".join(_INPUTS),
                hint="optimum-cli export openvino --task text-generation-with-past (stateful)",
            )
        names = observed(model)
        logits = next((place for place, one in enumerate(model.outputs) if "logits" in one.get_names()), 0)
        places = _shown(model, names)
        metadata = recorded("openvino", f"openvino:{self.file.absolute()}", run, as_deployed=False)
        try:
            settings = {**_SETTINGS, "INFERENCE_NUM_THREADS": self.options.threads}
            request = shared_core().compile_model(model, "CPU", settings).create_infer_request()
            request.reset_state()
            with RecordingWriter(path, metadata=metadata) as writer:
                self._steps(run, request, taken, {**places, "./logits.0": logits}, writer)
        except RuntimeError as error:
            raise BackendError(f"OpenVINO does not run {self.file.name}", got=first_line(error)) from error

    def _steps(
        self, run: ServingRun, request: Any, taken: Sequence[str], places: Mapping[str, int], writer: RecordingWriter
    ) -> None:
        tokens, before = list(run.prompt), 0
        for step in range(run.steps + 1):
            total = before + len(tokens)
            given = {
                "input_ids": torch.tensor([tokens]),
                "attention_mask": torch.ones((1, total), dtype=torch.int64),
                "position_ids": torch.arange(before, total)[None],
                "beam_idx": torch.zeros(1, dtype=torch.int32),
            }
            request.infer({name: given[name].numpy() for name in taken})
            writer.write(".:in.input_ids", step, given["input_ids"])
            for name, place in places.items():
                value = torch.from_numpy(request.get_output_tensor(place).data.copy())
                writer.write(name, step, value)
                if name == "./logits.0":
                    best = int(value[0, -1].argmax())
            writer.commit(step, token_ids=[tokens])
            forced = run.following is not None and step < len(run.following)
            tokens, before = [run.following[step] if forced and run.following else best], total

    def _read(self) -> Any:
        try:
            return shared_core().read_model(str(self.file))
        except RuntimeError as error:
            raise UsageError(
                "OpenVINO cannot read the file", got=f"{self.file}: {first_line(error)}", expected="its .bin beside it"
            ) from error


def _shown(model: Any, names: Mapping[str, Any]) -> dict[str, int]:
    """Make results of the graph of what is observed; return which result each is."""
    order = {key_of(one.input(0).get_source_output()): place for place, one in enumerate(model.results)}
    added = {key_of(port): port for port in names.values() if key_of(port) not in order}
    order |= {key: len(order) + place for place, key in enumerate(added)}
    model.add_outputs(list(added.values()))
    return {name: order[key_of(port)] for name, port in names.items()}


def open_openvino(place: str, options: ServingOptions) -> OpenvinoCandidate:
    """Return the candidate of a folder, or of a file.

    Raises:
        UsageError: There is none, or OpenVINO is not installed.
    """
    path = Path(place)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        near = sorted(one.name for one in path.glob("*.xml"))[:4] if path.is_dir() else []
        raise UsageError("no such file of OpenVINO", got=str(file), expected=near or [FILE])
    openvino = require_package("openvino", "OpenVINO is not installed", "pip install 'glassengine[openvino]'")
    return OpenvinoCandidate(file, openvino, options)
