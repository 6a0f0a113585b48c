"""`vllm:DIR`: vLLM with a checkpoint, in the interpreter that it is installed for."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from glassengine.errors import BackendError, CorruptError, UsageError
from glassengine.plugins.serving.interpreter import Interpreter, ValuesAlone
from glassengine.plugins.serving.requests import Forwards
from glassengine.recording.formats.folders import ServerFolder
from glassengine.recording.source import TensorSource
from glassengine.recording.write.writer import RecordingWriter
from glassengine.serving.protocol import ServingOptions, ServingRun

INSIDE = Path(__file__).parent / "inside"
"""What goes on PYTHONPATH of vLLM's interpreter."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
_INTERPRETER = Interpreter("vLLM", "vllm", "glassengine_vllm_run", INSIDE)


@dataclass
class VllmCandidate(ValuesAlone):
    """A checkpoint, and the interpreter that vLLM is installed for."""

    place: Path
    options: ServingOptions
    kind: str = "vllm"
    choices: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> str:
        """In which vLLM computes."""
        return "float32" if self.options.dtype == "auto" else self.options.dtype

    @property
    def spec(self) -> str:
        """As it was given."""
        return f"vllm:{self.place}"

    def record(self, run: ServingRun, path: Path) -> None:
        """Run one prompt, alone or, as deployed, in chunks, and write a recording of the forwards."""
        way = "together" if run.as_deployed else "alone"
        with tempfile.TemporaryDirectory(prefix="glassengine-vllm-") as raw:
            found = self.record_together([run], Path(raw), [way])[way]
            metadata = {**found.metadata, "target": self.spec, "as_deployed": run.as_deployed, "device": ["cpu"]}
            by_step = defaultdict(list)
            for entry in found.entries:
                by_step[entry.step].append(entry)
            with RecordingWriter(path, metadata=metadata) as writer:
                for step in range(len(metadata["forwards"])):
                    for entry in by_step[step]:
                        writer.write(entry.site, step, found.tensor(entry))
                    writer.commit(step)

    def record_together(
        self, runs: Sequence[ServingRun], folder: Path, ways: Sequence[str]
    ) -> Mapping[str, TensorSource]:
        """Run prompts in one process; return a source of the forwards for each way of running them.

        Raises:
            BackendError: vLLM failed.
        """
        recordings: dict[str, TensorSource] = {}
        following = [run.following for run in runs]
        if "alone" in ways:
            graph = self._of_graph(runs, following, folder / "graph")
            if graph is not None:
                recordings["alone"] = graph
                known = {one.prompt: one.metadata["token_ids"][0] for one in Forwards(graph).requests()[0]}
                tokens = [known.get(tuple(run.prompt), []) for run in runs]
                following = [one[len(run.prompt) :] for one, run in zip(tokens, runs, strict=True)]
        left = [way for way in ways if way not in recordings]
        if left:
            self._start(runs, following, folder, left, graph=False)
        return recordings | {way: ServerFolder(folder / way) for way in left}

    def _of_graph(
        self, runs: Sequence[ServingRun], following: Sequence[Sequence[int] | None], folder: Path
    ) -> TensorSource | None:
        """Run prompts alone, node by node of the graph that vLLM compiles; None where it compiles none."""
        try:
            self._start(runs, following, folder, ["alone"], graph=True)
            found = ServerFolder(folder / "alone")
        except (BackendError, CorruptError) as error:
            self.notes.append(f"vLLM is seen module by module: its graph cannot be run ({error.got or error})")
            return None
        if any("/out." in entry.site for entry in found.entries if not entry.site.startswith("./")):
            return found
        self.notes.append("vLLM is seen module by module: it does not compile this model")
        return None

    def _start(
        self,
        runs: Sequence[ServingRun],
        followed: Sequence[Sequence[int] | None],
        folder: Path,
        ways: Sequence[str],
        *,
        graph: bool,
    ) -> None:
        request = {
            "model": str(self.place.resolve()),
            "folder": str(folder.resolve()),
            "dtype": self.dtype,
            "steps": runs[0].steps,
            "prompts": [list(map(int, run.prompt)) for run in runs],
            "following": None if any(one is None for one in followed) else [list(one or ()) for one in followed],
            "runs": list(ways),
            "options": {},
            "graph": graph,
        }
        _INTERPRETER.start(self.options.python, request)


def open_vllm(place: str, options: ServingOptions) -> VllmCandidate:
    """Return the candidate of a checkpoint.

    Raises:
        UsageError: There is none, or vLLM does not compute in the dtype.
    """
    if options.dtype not in DTYPES:
        raise UsageError("vLLM does not compute in this dtype", got=options.dtype, expected=", ".join(DTYPES))
    folder = Path(place)
    if not (folder / "config.json").is_file():
        raise UsageError("no checkpoint for vLLM", got=place, expected="a directory with config.json and its weights")
    return VllmCandidate(folder, options)
