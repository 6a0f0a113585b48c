"""`executorch:FILE.pte`: ExecuTorch with a program, in the interpreter that it is installed for."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glassengine.errors import UsageError
from glassengine.plugins.serving.alignment import recorded
from glassengine.plugins.serving.interpreter import Interpreter, ValuesAlone
from glassengine.recording.formats.files import SafetensorsFile
from glassengine.recording.write.writer import RecordingWriter
from glassengine.serving.protocol import ServingOptions, ServingRun

INSIDE = Path(__file__).parent / "inside"
_RECORD = "etrecord.bin"
_INTERPRETER = Interpreter("ExecuTorch", "executorch", "glassengine_executorch", INSIDE)


@dataclass
class ExecutorchCandidate(ValuesAlone):
    """A program, with what says which of its operations is which of the exported graph's."""

    file: Path
    record_file: Path
    options: ServingOptions
    kind: str = "executorch"
    choices: Sequence[str] = ()
    runs_once: bool = True

    @property
    def spec(self) -> str:
        """As it was given."""
        return f"executorch:{self.file}"

    def record(self, run: ServingRun, path: Path) -> None:
        """Run the program: on a prompt that is repeated or cut to its length, or with its cache, step by step.

        A program of one token is given the prompt token by token, and the first one counts as the prefill.
        """
        with tempfile.TemporaryDirectory(prefix="glassengine-executorch-") as folder:
            request = {
                "file": str(self.file.resolve()),
                "record": str(self.record_file.resolve()),
                "folder": folder,
                "prompt": [int(token) for token in run.prompt],
                "steps": run.steps,
                "following": list(run.following) if run.following is not None else None,
            }
            _INTERPRETER.start(self.options.python, request)
            metadata = recorded("executorch", f"executorch:{self.file.absolute()}", run, as_deployed=True)
            files = sorted(Path(folder).glob("values-*.safetensors"), key=lambda one: int(one.stem.split("-")[1]))
            with RecordingWriter(path, metadata=metadata) as writer:
                for step, file in enumerate(files):
                    tokens = _take(file, step, writer)
                    if step == 0:
                        writer.metadata["prompt_lengths"] = [len(tokens)]
                    writer.commit(step, token_ids=[tokens])


def _take(file: Path, step: int, writer: RecordingWriter) -> list[int]:
    """Write the values of one call; return its tokens."""
    held = SafetensorsFile(file)
    tokens: list[int] = []
    for entry in held.entries:
        value = held.tensor(entry)
        if entry.site == "./in.input_ids":
            tokens = [int(token) for token in value[0]]
            writer.write(".:in.input_ids", step, value.clone())
        else:
            writer.write(entry.site, step, value)
    return tokens


def open_executorch(place: str, options: ServingOptions) -> ExecutorchCandidate:
    """Return the candidate of a file.

    Raises:
        UsageError: There is no such file, or its ETRecord is not beside it.
    """
    file = Path(place)
    if not file.is_file():
        near = sorted(str(path) for path in file.parent.glob("*.pte"))[:4] if file.parent.is_dir() else []
        raise UsageError("no such program of ExecuTorch", got=place, expected=near or None)
    record = next((one for one in (file.with_suffix(".etrecord"), file.parent / _RECORD) if one.is_file()), None)
    if record is None:
        raise UsageError(
            "nothing says which operation of the program is which: its ETRecord is not beside it",
            got=place,
            expected=f"{file.with_suffix('.etrecord').name} or {_RECORD}",
            hint="to_edge(..., generate_etrecord=True), and to_executorch().get_etrecord().save(FILE)",
        )
    return ExecutorchCandidate(file, record, options)
