"""All kinds by name: whole commands, and the functions that they read with."""

from __future__ import annotations

import direct_kinds
import kinds

KINDS: dict[str, kinds.Kind] = {**direct_kinds.KINDS, **kinds.KINDS}
