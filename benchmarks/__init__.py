"""Benchmarks: `python -m benchmarks [SUITE]`. Figures are printed and kept under results/, never asserted."""

import sys
from pathlib import Path
from types import ModuleType

_TESTS = ModuleType("tests")
_TESTS.__path__ = [str(Path(__file__).parent.parent / "tests")]
sys.modules.setdefault("tests", _TESTS)  # packages of others install folders of that name, which would come first
