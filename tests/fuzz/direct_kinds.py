"""The kinds that are read by functions of `direct`: quick, so that they are most of a campaign's inputs."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import kinds
import seeds
from kinds import Kind, copied, void

SHARE = 3.0
"""Of a campaign's time, where a kind that runs whole commands has one."""

_METRICS = """Metric: CompileTime
  TotalSamples: 2
  Accumulator: 002ms108.414us
  ValueRate: 006ms007.000us / second
  Rate: 1.5 / second
  Percentiles: 1%=001ms002.000us; 50%=002ms108.414us; 99%=002ms108.414us
Counter: MarkStep
  Value: 7
Metric: InboundData
  TotalSamples: 1
  Accumulator: 1.50KB
  Percentiles: 1%=1.50KB; 99%=1.50KB
"""


def only(make: Callable[[Path, Path], None], name: str) -> Callable[[Path, Path], None]:
    """Make what another kind does, and keep one file of it."""

    def made(here: Path, shared: Path) -> None:
        make(here, shared)
        for path in sorted(here.iterdir()):
            if path.name != name:
                path.unlink()

    return made


@functools.cache
def dumps() -> dict[str, seeds.Files]:
    """Return small files of every kind that recordings are compared with; made once."""
    return seeds.seeds()


def dump(name: str) -> Callable[[Path, Path], None]:
    def made(here: Path, shared: Path) -> None:
        for file, data in dumps()[name].items():
            (here / file).parent.mkdir(parents=True, exist_ok=True)
            (here / file).write_bytes(data)

    return made


DUMPS = (
    "recording", "safetensors", "pt", "npy", "fortran", "npz", "deflated", "polygraphy", "debug_tree_text", "msprobe",
    "sglang", "npy_folder",
)  # fmt: skip


def onnx_models(here: Path, shared: Path) -> None:
    """Copy small models that the package onnx is tested with: other people's files, and ops of every kind."""
    import onnx

    found = sorted((Path(onnx.__file__).parent / "backend" / "test" / "data").rglob("*.onnx"))
    small = [path for path in found if path.stat().st_size < 8192]
    for number, path in enumerate(small[:60]):
        shutil.copy(path, here / f"{number}.onnx")


def engine(here: Path, shared: Path) -> None:
    """A copied engine, without what is not read here."""
    shutil.copytree(shared / "small", here / "it")


def program(here: Path, shared: Path) -> None:
    shutil.copytree(shared / "small" / "main", here / "it")
    (here / "it" / "program.pt2").unlink()
    order = {"inputs": ["x"], "outputs": ["y"], "caches": {}, "device": "cpu", "one_token": {"x": {"2": 1}}}
    (here / "it" / "io.json").write_text(json.dumps(order))
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 3, "eos_token_id": [1, 2], "max_length": 20}
    (here / "generation_config.json").write_text(json.dumps(settings))


def written(**files: str) -> Callable[[Path, Path], None]:
    """Write files whose names have dots in the place of double underlines."""
    return lambda here, shared: void(
        *((here / name.replace("__", ".")).write_text(text) for name, text in files.items())
    )


def artifacts(here: Path, shared: Path) -> None:
    shutil.copytree(shared / "artifacts", here / "it")


_RULES = {
    "rules": [
        {"baseline": "fc", "candidate": "fc", "baseline_ops": [{"op": "reshape", "shape": [2, 4]}]},
        {"baseline": "re:(o.*)", "candidate": "{1}", "candidate_ops": [{"op": "permute", "dims": [1, 0]}]},
    ]
}
_KERNELS = {"backend": "it", "version": "1", "instruction_set": "x", "errors": {"exp": [1.0, 2.0]}}
_LINES = (
    "compare {shared}/record-a {shared}/record-b --rtol 0.1 --atol 1e-3 --show-only fc --json -",
    "show {shared}/record-a fc* --step 0 --rank 0 --json",
    "run {shared}/small --inputs {shared}/x.pt --debug fc --seed 3 --top-p 0.5 --max-new-tokens 4 --json",
    "record {shared}/model --inputs hello -o r --overwrite --steps 3",
    "build {shared}/model out --backend eager --max-batch-size 2 --max-seq-len 8 --dry-run",
    "check {shared}/model --candidate {shared}/small --inputs hello --json -",
    "profile --capture localhost:1 --steps 2",
    "replay {shared}/small --bisect --backend eager",
    "snapshot show {shared}/small --statistics",
)


def _direct(make: Callable[[Path, Path], None], reader: str, share: float = SHARE, **options: object) -> Kind:
    return replace(Kind(make, (f"[{reader}]",), owned=False, share=share), **options)  # type: ignore[arg-type]


KINDS: dict[str, Kind] = {
    "read_recording": _direct(copied("record-a"), "read_recording", proven=("it/**/shard*",), owned=True),
    "read_snapshot": _direct(kinds.snapshot, "read_snapshot", proven=("it/*",), owned=True),
    "read_packed": _direct(kinds.packed, "read_snapshot", proven=("it.safetensors",)),
    "read_engine": _direct(engine, "read_engine", proven=("it/*.safetensors", "it/main/*"), owned=True),
    "read_program": _direct(program, "read_program"),
    # Without a checksum a profile counts as one of an earlier version.
    "read_profile": _direct(kinds.profile, "read_profile", changed=("**/profile.json",), owned=True),
    "read_artifacts": _direct(artifacts, "read_artifacts", changed=("**/*.json",), owned=True),
    "read_adapter": _direct(kinds.adapter, "read_adapter"),
    "read_checkpoint": _direct(copied("model"), "read_checkpoint", changed=("it/*model*",)),
    "read_shards": _direct(kinds.sharded, "read_checkpoint", changed=("it/*model*",)),
    "read_checkpoint_bin": _direct(kinds.checkpoint_bin, "read_checkpoint", changed=("it/*.bin",)),
    **{
        f"inputs_{end}": _direct(only(kinds.tensor_files, f"x.{end}"), "read_inputs")
        for end in ("pt", "npz", "safetensors", "json")
    },
    **{
        f"token_ids_{end}": _direct(only(kinds.token_files, f"ids.{end}"), "read_token_ids", 1.0)
        for end in ("pt", "npz", "safetensors", "json")
    },
    **{
        f"prompts_{name.replace('.', '_')}": _direct(only(kinds.prompt_files, name), "read_prompts", 1.0)
        for name in ("p.txt", "p.json", "p.jsonl", "c.json", "c.jsonl")
    },
    "aliases": _direct(written(aliases__json='{"fc": "a", "out:float32": "b"}'), "read_aliases", 1.0),
    "map_rules": _direct(written(map__json=json.dumps(_RULES)), "read_map"),
    "map_names": _direct(written(map__json=json.dumps({"fc": "fc", "o*": "out"})), "read_map", 1.0),
    "read_onnx": _direct(kinds.onnx, "read_onnx"),
    "foreign_onnx": _direct(onnx_models, "read_changed", 2.0),
    "read_pt2": _direct(kinds.exported, "read_archive"),
    "metrics_text": _direct(written(metrics__txt=_METRICS), "read_metrics"),
    "kernels": _direct(
        lambda here, shared: void(
            (here / "kernels").mkdir(), (here / "kernels/it-1-x.json").write_text(json.dumps(_KERNELS))
        ),
        "read_kernels",
        1.0,
    ),
    "requests": _direct(kinds.server, "serve", places=False),
    **{
        f"options_{number}": _direct(
            written(line__json=json.dumps(line.split())), "parse_line", 1.0, places=False, code=True
        )
        for number, line in enumerate(_LINES)
    },
    **{f"dump_{name}": _direct(dump(name), "read_dump", 2.0) for name in DUMPS},
}
ALL: dict[str, Kind] = {**KINDS, **kinds.KINDS}
"""Whole commands as well."""
