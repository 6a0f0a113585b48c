"""`vllm:DIR`: vLLM with a checkpoint, in the interpreter that it is installed for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from glassengine.errors import BackendError, UsageError
from glassengine.reading.files import shown
from glassengine.recording.formats.server_folder import ServerFolder
from glassengine.recording.read.source import TensorSource
from glassengine.recording.write.writer import RecordingWriter
from glassengine.serving.protocol import Options, Run, ServedWeight, Setting

INSIDE = Path(__file__).parent / "inside"
"""What goes on PYTHONPATH of vLLM's interpreter."""
_STARTS = "import sys; sys.path[0] = sys.argv[1]; import glassengine_vllm_run as r; sys.exit(r.main())"
_PATIENCE = 3600
_HINT = "--python VENV/bin/python, of the environment in which vLLM is installed"


@dataclass
class VllmCandidate:
    """A checkpoint, and the interpreter that vLLM is installed for.

    Args:
        place: Directory of the checkpoint.
        options: Of the run.
    """

    place: Path
    options: Options
    kind: str = "vllm"
    choices: Sequence[str] = ()

    @property
    def spec(self) -> str:
        """As it was given."""
        return f"vllm:{self.place}"

    def weights(self, module: nn.Module, config: Any) -> Mapping[str, ServedWeight]:
        """Return nothing: vLLM packs its weights for the processor that it runs on."""
        return {}

    def extra_weights(self) -> Sequence[str]:
        """Return nothing."""
        return ()

    def settings(self, config: Any) -> Sequence[Setting]:
        """Return nothing: a checkpoint is read by vLLM as it is."""
        return ()

    def record(self, run: Run, path: Path) -> None:
        """Run one prompt, alone or, as deployed, in chunks, and write a recording of the forwards."""
        way = "together" if run.as_deployed else "alone"
        with tempfile.TemporaryDirectory(prefix="glassengine-vllm-") as raw:
            found = self.record_together([run], Path(raw), [way])[way]
            metadata = {**found.metadata, "target": self.spec, "as_deployed": run.as_deployed, "device": ["cpu"]}
            with RecordingWriter(path, metadata=metadata) as writer:
                for step in range(len(metadata["forwards"])):
                    for entry in found.entries:
                        if entry.step == step:
                            writer.write(entry.site, step, found.tensor(entry))
                    writer.commit(step)

    def record_together(self, runs: Sequence[Run], folder: Path, ways: Sequence[str]) -> Mapping[str, TensorSource]:
        """Run prompts in one process; return a source of the forwards for each way of running them.

        Args:
            runs: Of one number of steps.
            folder: Where vLLM writes.
            ways: Of "alone" and "together".

        Raises:
            BackendError: vLLM failed.
        """
        followed = [run.following for run in runs]
        request = {
            "model": str(self.place.resolve()),
            "folder": str(folder.resolve()),
            "dtype": "float32",
            "steps": runs[0].steps,
            "prompts": [list(map(int, run.prompt)) for run in runs],
            "following": None if any(one is None for one in followed) else [list(one or ()) for one in followed],
            "runs": list(ways),
            "options": {},
        }
        start(self.options.python, request)
        return {way: ServerFolder(folder / way) for way in ways}


def open_vllm(place: str, options: Options) -> VllmCandidate:
    """Return the candidate of a checkpoint.

    Raises:
        UsageError: There is none.
    """
    folder = Path(place)
    if not (folder / "config.json").is_file():
        raise UsageError("no checkpoint for vLLM", got=place, expected="a directory with config.json and its weights")
    return VllmCandidate(folder, options)


def start(python: str | Path | None, request: Mapping[str, Any]) -> None:
    """Run vLLM on a request.

    Raises:
        UsageError: The interpreter is not there, or has no vLLM.
        BackendError: vLLM failed or crashed.
    """
    given = Path(python) if python is not None else Path(sys.executable)
    if not given.is_file():
        raise UsageError("no such interpreter", got=str(given), hint=_HINT)
    # Another interpreter has packages of other versions: PYTHONPATH is for this one.
    flags = ["-E"] if python is not None else []
    # Its working directory is empty: what lies in the user's would be imported.
    with tempfile.TemporaryDirectory(prefix="glassengine-empty-") as empty:
        try:
            done = subprocess.run(  # noqa: S603 (the interpreter that the user names, our own module)
                [str(given.absolute()), *flags, "-c", _STARTS, str(INSIDE)],
                input=json.dumps(request).encode(),
                capture_output=True,
                timeout=_PATIENCE,
                check=False,
                cwd=empty,
            )
        except subprocess.TimeoutExpired as error:
            raise BackendError("vLLM did not end", got=f"{_PATIENCE} s") from error
    if done.returncode == 0:
        return
    said = done.stderr[-4000:].decode("utf-8", "replace").strip().splitlines()
    last = next((line for line in reversed(said) if "Error" in line), said[-1] if said else f"exit {done.returncode}")
    if "No module named 'vllm" in last:
        raise UsageError("vLLM is not installed for this interpreter", got=str(given), hint=_HINT)
    if done.returncode < 0:
        raise BackendError("vLLM crashed", got=f"{signal.Signals(-done.returncode).name} after: {shown(last.strip())}")
    raise BackendError("vLLM failed", got=shown(last.strip()))
