"""The untouched bundled model on its default engines: twenty prompts, two dtypes, no false alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from glassengine.diagnose import check

PROMPTS = """The value of an expression is
If no exception is raised,
A class definition defines
The "try" statement specifies exception handlers
When a function is called
In the following example
Assignment statements are used to
The "import" statement
A list display is
For example, the expression
Names refer to objects.
Python 3
Note that
The operator
x
Changed in version 3.5:
If the object is mutable, then its
A generator expression yields a new generator object. It consists of
Raise an exception
See also: The standard type hierarchy
"""


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("bfloat16", 2),
        pytest.param("float32", 20, marks=pytest.mark.slow),
        pytest.param("bfloat16", 20, marks=pytest.mark.slow),
    ],
)
def test_prompts_agree(dtype: str, number: int, root: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(PROMPTS.splitlines(keepends=True)[:number]))
    result = check(root / "examples" / "tiny-llama", backend="inductor", dtype=dtype, inputs=str(prompts))
    assert result.ok, result.not_ok_because
    assert result.verdict == "rounding" and not result.origins
    assert len({pair.case for pair in result.pairs}) == number + 1
    assert result.coverage == 1.0
    by_floor = [pair.rho or 0.0 for pair in result.pairs if pair.judged_by == "noise floor"]
    assert 0.1 < max(by_floor) < 4.0, "neither a vacuous floor nor a suspicious tensor"
    # Of an op alone, the bound is asked for where the floor is exceeded.
    replayed = [pair for pair in result.pairs if pair.judged_by == "reverse replay"]
    assert len(replayed) > len(by_floor)
    assert max((pair.rho or 0.0) for pair in replayed) > 0.5
    assert all((pair.rho or 0.0) <= 2.0 or (pair.beta is not None and pair.beta < 0.8) for pair in replayed)
