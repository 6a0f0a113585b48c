"""Most of what these tests cost is the export of equal models."""

from tests.diagnose.conftest import _export_once as _export_once
