"""Runs pure functions of bytes elsewhere: in processes of this machine, or as tasks of a Ray cluster.

What a function needs is in its argument, and what it finds in its result, so that it may run anywhere, twice, or again
after the process that ran it has died. Results come in the order of the requests, so that who merges them makes the
same of them however many workers there are.
"""

from glassengine.workers.protocol import ATTEMPTS, Died, Workers, windowed

__all__ = ["ATTEMPTS", "Died", "Workers", "windowed"]
