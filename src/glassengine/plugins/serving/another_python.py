"""`glass check MODEL --against PYTHON`: the model in another environment, recorded there and judged here."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from glassengine import environment
from glassengine.asked import is_factory
from glassengine.diagnose.ladder.request import CheckRequest
from glassengine.errors import UsageError
from glassengine.judge.cases import Case, causal_cases, read_inputs
from glassengine.plugins.serving.interpreter import Interpreter
from glassengine.program import LoadedModel, load_model, made_up_inputs
from glassengine.progress import Work
from glassengine.recording.write.writer import RecordingWriter
from glassengine.results import Comparison
from glassengine.results.sentences import differences

INSIDE = Path(__file__).parent / "inside"
_INTERPRETER = Interpreter("PyTorch", "torch", "glassengine_recorder", INSIDE, "--against")


def check_against(request: CheckRequest, python: str) -> Comparison:
    """Run the baseline in another interpreter, and judge what its modules gave there.

    Raises:
        UsageError: The model is an object, or the interpreter cannot run it.
        BackendError: It fails there.
    """
    if not isinstance(request.baseline, str | Path):
        raise UsageError(
            "--against loads the model in another interpreter",
            got=f"a {type(request.baseline).__name__}",
            expected="a directory, or file.py:factory",
        )
    request.progress(Work.LOADING.says("loading the baseline"))
    model = load_model(request.baseline, dtype=request.dtype, adapter=request.adapter, **request.loading)
    model = model.judged_as(model.generation.alone)
    inputs = read_inputs(request.inputs)
    with tempfile.TemporaryDirectory(prefix="glassengine-against-") as folder:
        if model.generation.decodes_tokens:
            case = causal_cases(model, inputs, request.steps)[0]
            given: Sequence[Mapping[str, Any]] = [{"input_ids": case.input_ids, "attention_mask": case.attention_mask}]
            judged = None
        else:
            case, given = None, list(made_up_inputs(model) if inputs is None else inputs)  # type: ignore[arg-type]
            judged = given
        request.progress(Work.LOADING.says(f"running the model by {python}"))
        about = _run(request, model, given, python, Path(folder), decodes=case is not None)
        record = Path(folder) / "record"
        _write(record, Path(folder), about, model, case)
        assert request.route is not None
        # A factory may make other weights each time: what is judged is the module whose weights were sent.
        baseline = model.module if is_factory(model.spec) else request.baseline
        result = request.route(replace(request, baseline=baseline, candidate=record, inputs=judged))
    theirs = about["environment"]
    known = theirs["versions"]
    versions = ", ".join(f"{name} {known[name]}" for name in ("torch", "transformers") if name in known)
    own = {
        "num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    sides = {"baseline": {**environment.describe(), **own}, "candidate": theirs}
    notes = [] if result.ok else [f"the environments differ: {'; '.join(differences(sides)) or 'in nothing recorded'}"]
    return replace(
        result,
        baseline=model.spec,
        candidate=f"{model.spec} by {python} ({versions})",
        environment=sides,
        notes=(*notes, *result.notes),
    )


def _run(
    request: CheckRequest,
    model: LoadedModel,
    given: Sequence[Mapping[str, Any]],
    python: str,
    folder: Path,
    *,
    decodes: bool,
) -> dict[str, Any]:
    """Run the model there; its values and `about.json` are then in the folder."""
    spec = str(request.baseline)
    where, _, name = spec.rpartition(":")
    weights = None
    if is_factory(spec):
        spec = f"{Path(where).resolve()}:{name}" if where.endswith(".py") else spec
        weights = folder / "weights.pt"
        torch.save(dict(model.module.state_dict()), weights)
    elif model.directory is not None:
        spec = str(Path(model.directory).resolve())
    else:
        raise UsageError(
            "--against runs a checkpoint of transformers or a factory", got=spec, expected="DIR or file.py:factory"
        )
    torch.save([dict(step) for step in given], folder / "inputs.pt")
    asked = {key: value for key, value in request.loading.items() if value and key != "revision"}
    _INTERPRETER.start(
        python,
        {
            "target": spec,
            "dtype": model.dtype,
            "loading": asked,
            "inputs": str(folder / "inputs.pt"),
            "weights": None if weights is None else str(weights),
            "folder": str(folder),
            "steps": request.steps,
            "decodes": decodes,
        },
    )
    about: dict[str, Any] = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    return about


def _write(record: Path, folder: Path, about: Mapping[str, Any], model: LoadedModel, case: Case | None) -> None:
    """Write what was computed there as a recording."""
    metadata: dict[str, Any] = {"kind": "model", "class": about["class"], "dtype": model.dtype, "device": ["cpu"]}
    prompts: list[list[int]] = []
    if case is not None:
        assert case.input_ids is not None and case.attention_mask is not None
        real = case.attention_mask.bool()
        prompts = [row[kept].tolist() for row, kept in zip(case.input_ids, real, strict=True)]
        metadata["prompt_lengths"] = [len(row) for row in prompts]
    layers = [name for name, one in model.module.named_modules() if getattr(one, "layer_idx", None) is not None]
    numbered = {int(model.module.get_submodule(name).layer_idx): name for name in layers}  # type: ignore[arg-type]
    files = sorted(folder.glob("values-*.pt"), key=lambda one: int(one.stem.split("-")[1]))
    with RecordingWriter(record, metadata=metadata) as writer:
        for step, file in enumerate(files):
            for site, tensor in torch.load(file, weights_only=True).items():
                number, at, port = site.partition(">:kv")
                own = f"{numbered.get(int(number[1:]), number)}:kv{port}" if at else site
                writer.write(own, step, tensor)
            tokens = prompts if step == 0 else [[row[step - 1]] for row in about["tokens"]] if case else []
            writer.commit(step, token_ids=tokens)
