"""Profiles of a program: taken around a block, or of a program that runs, and read again.

`start_server` and `Trace` are those of `torch_xla.debug.profiler`: a script that imports it as `xp` can import this
module in its place. `profile` takes a profile of a block, `request` one of a process that called `start_server`, and
`read` returns the newest profile of a directory with the one before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from glassengine.deferred import deferred

if TYPE_CHECKING:
    from glassengine.executable.profile.profile import Profile, profile
    from glassengine.executable.profile.server import ProfileServer, start_server
    from glassengine.executable.profile.server import request_profile as request
    from glassengine.executable.profile.trace import StoredProfile
    from glassengine.executable.profile.trace import read_profiles as read
    from glassengine.spans import Trace

__all__ = ["Profile", "ProfileServer", "StoredProfile", "Trace", "profile", "read", "request", "start_server"]

_PUBLIC = {
    "Profile": "glassengine.executable.profile.profile",
    "ProfileServer": "glassengine.executable.profile.server",
    "StoredProfile": "glassengine.executable.profile.trace",
    "Trace": "glassengine.spans",
    "profile": "glassengine.executable.profile.profile",
    "read": "glassengine.executable.profile.trace:read_profiles",
    "request": "glassengine.executable.profile.server:request_profile",
    "start_server": "glassengine.executable.profile.server",
}
__getattr__, __dir__ = deferred(__name__, _PUBLIC)
