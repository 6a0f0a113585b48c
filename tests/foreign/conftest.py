"""Foreign packages are installed by `make test-foreign`; what is not there is skipped, and these tests are slow."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported, which torch may do
sys.path.insert(0, str(Path(__file__).parent))
