"""Starts a module of ours in the interpreter that an engine is installed for, which may have none of this package's."""

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

from glassengine import starting
from glassengine.errors import BackendError, UsageError
from glassengine.reading.files import shown
from glassengine.serving.protocol import EngineSetting, ServedWeight

_PATIENCE = 3600
_REFUSED = "Refused: "
"""Begins a line of standard error that says in JSON (what, got, expected, hint) why there is no run."""
_STARTS = "import sys, importlib as i; sys.path[0] = sys.argv[1]; sys.exit(i.import_module(sys.argv[2]).main())"


@dataclass(frozen=True)
class Interpreter:
    """An engine that lives in an environment of its own.

    Attributes:
        engine: Its name.
        package: What is imported of it.
        module: Of ours, that runs there: `main()` reads a request from standard input.
        folder: Where that lies.
        flag: That names the interpreter.
    """

    engine: str
    package: str
    module: str
    folder: Path
    flag: str = "--python"

    def start(self, python: str | Path | None, request: Mapping[str, Any]) -> None:
        """Run the module on a request.

        Args:
            python: The interpreter; None for this one.
            request: What it reads.

        Raises:
            UsageError: The interpreter is not there, or does not have the engine.
            BackendError: The engine failed or crashed.
        """
        hint = f"{self.flag} VENV/bin/python, of an environment that has {self.engine}"
        given = Path(python) if python is not None else Path(sys.executable)
        if not given.is_file():
            raise UsageError("no such interpreter", got=str(given), hint=hint)
        # Another interpreter has packages of other versions: PYTHONPATH is for this one.
        flags = ["-E"] if python is not None else []
        # Its working directory is empty: what lies in the user's would be imported.
        with tempfile.TemporaryDirectory(prefix="glassengine-empty-") as empty:
            try:
                done = starting.run(
                    [str(given.absolute()), *flags, "-c", _STARTS, str(self.folder), self.module],
                    input=json.dumps(request).encode(),
                    capture_output=True,
                    timeout=_PATIENCE,
                    cwd=empty,
                )
            except subprocess.TimeoutExpired as error:
                raise BackendError(f"{self.engine} did not end", got=f"{_PATIENCE} s") from error
        if done.returncode == 0:
            return
        said = done.stderr[-4000:].decode("utf-8", "replace").strip().splitlines()
        refused = next((line for line in said if line.startswith(_REFUSED)), None)
        if refused is not None:
            words = {key: shown(str(text)) for key, text in json.loads(refused.removeprefix(_REFUSED)).items()}
            raise UsageError(words.pop("what"), **words)
        last = next((line for line in reversed(said) if "Error" in line), said[-1] if said else "no word")
        last = shown(last.strip())
        if f"No module named '{self.package}" in last:
            raise UsageError(f"{self.engine} is not installed for this interpreter", got=str(given), hint=hint)
        if done.returncode < 0:
            name = signal.Signals(-done.returncode).name
            raise BackendError(f"{self.engine} crashed", got=f"{name} after: {last}")
        raise BackendError(f"{self.engine} failed", got=last)


class ValuesAlone:
    """A candidate that shows the values that its engine computes; a subclass may show more."""

    def weights(self, module: nn.Module, config: Any) -> Mapping[str, ServedWeight]:
        """Return nothing: engines pack their weights for the processor that they run on."""
        return {}

    def extra_weights(self) -> Sequence[str]:
        """Return nothing."""
        return ()

    def settings(self, config: Any) -> Sequence[EngineSetting]:
        """Return nothing: an engine reads the checkpoint as it is, or has its numbers as constants."""
        return ()
