"""Runs a function of plain values: in this process, in other processes of this machine, or as tasks of a Ray cluster.

An argument and a result are pickled, so that a call may run anywhere, twice, or again after the process that ran it has
died. Results come in the order of the requests, so the number of workers makes no difference.
"""

from glassengine.workers.protocol import ATTEMPTS, Died, InProcess, Workers, windowed

__all__ = ["ATTEMPTS", "Died", "InProcess", "Workers", "windowed"]
