"""Makes the recordings of vLLM that the ordinary tests judge; by hand, with the interpreter that vLLM is installed for.

python tests/serving_engines/store.py VENV/bin/python FAMILY [PLANT [DTYPE]]
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from glassengine.plugins.serving.vllm.candidate import INSIDE
from glassengine.testing.checkpoints import save_small

HERE = Path(__file__).parent
PROMPTS = [[7, 99, 3, 200, 41, 17, 5, 88, 120], [11, 48, 85, 122, 159, 196, 233, 20, 57, 94, 131, 168]]
# What the tables name, and nothing that is in the recording twice.
KEPT = re.compile(
    r"\./in.*|\./(all_)?logits\.0|.*(embed_tokens|wte|wpe|_proj|c_attn|c_fc|c_proj|mlp\.act|act_fn)/out\.0"
    r"|.*(norm|ln_\w+)/out\.[01]|.*ln_2/in\.0|.*h\.0\.ln_1/in\.0|.*layers\.0\.input_layernorm/in\.0"
    r"|.*attn\.attn/(in\.[012]|out\.0)|transformer\.h\.\d+/out\.0|.*gate/out\.0|.*(mlp|moe)/out\.0"
)


def record(
    python: str,
    checkpoint: Path,
    folder: Path,
    plants: dict[str, list[str]],
    prompts: list[list[int]],
    dtype: str = "float32",
    *,
    graph: bool = False,
) -> None:
    """Run vLLM with each mistake planted; a folder for each, and in it one for each way."""
    request = {"model": str(checkpoint), "folder": str(folder), "dtype": dtype, "steps": 2, "prompts": prompts}
    request["graph"] = graph
    env = {**os.environ, "PYTHONPATH": f"{INSIDE}{os.pathsep}{HERE}"}
    text = json.dumps({**request, "plants": plants})
    done = subprocess.run([python, str(HERE / "plants.py")], input=text, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def main() -> None:
    python, family, plant, dtype = [*sys.argv[1:], *["", "", "healthy", "float32"][len(sys.argv) - 1 :]]
    with tempfile.TemporaryDirectory() as made:
        checkpoint = save_small(family, Path(made) / "checkpoint")
        record(python, checkpoint, Path(made), {plant: ["together"]}, PROMPTS, dtype)
        name = f"{family}-{plant}" if dtype == "float32" else f"{family}-{plant}-{dtype}"
        target = HERE / "recorded" / name / "rank0"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for path in sorted((Path(made) / plant / "together" / "rank0").iterdir()):
            with safe_open(path, "pt") as file:
                values = {name: file.get_tensor(name) for name in file.keys() if KEPT.fullmatch(name)}  # noqa: SIM118
                facts = json.loads(file.metadata()["facts"]) | {"model": family}
                save_file(values, target / path.name, {**file.metadata(), "facts": json.dumps(facts)})


if __name__ == "__main__":
    main()
