"""One trial of `glass replay --bisect` in a process of its own: `python -m glassengine.diagnose.snapshot_trial`.

Reads the snapshot, the back-end and the nodes of the piece as JSON from stdin, and writes how it failed to stdout. A
compiler that takes its process with it takes this one.
"""

from __future__ import annotations

import json
import sys

from glassengine.backends.registry import get_backend
from glassengine.diagnose.reproduction.bisect_compiler import CompileTrials, recorded_values, weights_of
from glassengine.diagnose.snapshot_replay import as_recorded, captured_graph, device_of
from glassengine.executable.snapshot.reader import Snapshot
from glassengine.judge.pieces import piece_of


def main() -> int:
    """Try the piece that stdin describes and return the exit status."""
    request = json.load(sys.stdin)
    snapshot = Snapshot.open(request["snapshot"])
    graph, arguments = captured_graph(snapshot), snapshot.arguments(device=device_of(snapshot))
    with as_recorded(snapshot):
        wanted = set(request["nodes"])
        piece = piece_of([node for node in graph.nodes if node.name in wanted], recorded_values(graph, arguments))
        assert piece is not None
        found = CompileTrials(get_backend(request["backend"]), graph.kind, weights_of(graph)).try_piece(piece)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
