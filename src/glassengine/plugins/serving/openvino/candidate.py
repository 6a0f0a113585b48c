"""`openvino:DIR`: a decoder as OpenVINO's converter writes it, run step by step with a cache inside of it.

Its ops are observed in float32, by the names of the modules that they were traced in (`names`); its weights are those
that the graph makes of its constants (`held`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glassengine.backends.openvino import shared_core
from glassengine.errors import BackendError, UsageError, first_line
from glassengine.plugins.serving.openvino.graph import held, key_of, observed
from glassengine.recording.write.writer import RecordingWriter
from glassengine.serving.protocol import EngineSetting, ServedWeight, ServingOptions, ServingRun

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
class OpenvinoCandidate:
    """A file of OpenVINO.

    Args:
        file: The graph; its weights lie beside it.
        openvino: The package.
        options: Of the run.
    """

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

    def extra_weights(self) -> Sequence[str]:
        """Return nothing: constants that stand for no parameter are numbers of operations."""
        return ()

    def settings(self, config: Any) -> Sequence[EngineSetting]:
        """Return nothing: its numbers are constants of the graph."""
        return ()

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
        metadata = {
            "kind": "model",
            "layout": "openvino",
            "architecture": "decoder",
            "target": f"openvino:{self.file.absolute()}",
            "as_deployed": False,
            "dtype": "float32",
            "device": ["cpu"],
            "prompt_lengths": [len(run.prompt)],
        }
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
    try:
        import openvino
    except ImportError as error:
        hint = "pip install 'glassengine[openvino]'"
        raise UsageError("OpenVINO is not installed", got=str(error), hint=hint) from error
    return OpenvinoCandidate(file, openvino, options)
