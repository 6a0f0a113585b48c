"""Most of what these tests cost is the export of equal models, and the start of processes."""

from tests.diagnose.conftest import _export_once as _export_once
from tests.prompt.conftest import _with_transformers as _with_transformers
