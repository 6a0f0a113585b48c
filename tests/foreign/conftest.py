"""Foreign packages are installed by `make test-foreign`; what is not there is skipped, and these tests are slow."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
