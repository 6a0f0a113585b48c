"""Snapshots: graph, inputs and outputs of one execution, kept on disk to be run again elsewhere.

`take` keeps them while a block runs, of every execution or of those that `register_callback` chooses; with
`on="nonfinite"` the first execution that makes a NaN or an infinity ends with a `NonFiniteError`. `Snapshot.open` reads
one of them, `list` finds those of a directory, and `glassengine.replay` runs one.
"""

from typing import TYPE_CHECKING

from glassengine.deferred import deferred

if TYPE_CHECKING:
    from glassengine.executable.snapshot.nonfinite import NonFiniteError
    from glassengine.executable.snapshot.policy import register_snapshot_callback as register_callback
    from glassengine.executable.snapshot.reader import Snapshot
    from glassengine.executable.snapshot.reader import list_snapshots as list
    from glassengine.executable.snapshot.snapshots import Snapshots
    from glassengine.executable.snapshot.snapshots import snapshots as take
    from glassengine.results import ListedSnapshot

__all__ = ["ListedSnapshot", "NonFiniteError", "Snapshot", "Snapshots", "list", "register_callback", "take"]

_PUBLIC = {
    "ListedSnapshot": "glassengine.results",
    "NonFiniteError": "glassengine.executable.snapshot.nonfinite",
    "Snapshot": "glassengine.executable.snapshot.reader",
    "Snapshots": "glassengine.executable.snapshot.snapshots",
    "list": "glassengine.executable.snapshot.reader:list_snapshots",
    "register_callback": "glassengine.executable.snapshot.policy:register_snapshot_callback",
    "take": "glassengine.executable.snapshot.snapshots:snapshots",
}
__getattr__, __dir__ = deferred(__name__, _PUBLIC)
