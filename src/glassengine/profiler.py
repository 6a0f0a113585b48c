"""Profiles of a program: taken around a block, or of a program that runs, and read again.

`start_server` and `Trace` are those of `torch_xla.debug.profiler`: a script that imports it as `xp` can import this
module in its place. `profile` takes a profile of a block, `request` one of a process that called `start_server`, and
`read` returns the newest profile of a directory with the one before.
"""

from typing import TYPE_CHECKING

from glassengine.deferred import deferred

if TYPE_CHECKING:
    from glassengine.executable.profile_server import ProfileServer, start_server
    from glassengine.executable.profile_server import request_profile as request
    from glassengine.executable.profile_trace import StoredProfile
    from glassengine.executable.profile_trace import read_profiles as read
    from glassengine.executable.profiling import Profile, profile
    from glassengine.spans import Trace

__all__ = ["Profile", "ProfileServer", "StoredProfile", "Trace", "profile", "read", "request", "start_server"]

_PUBLIC = {
    "Profile": "glassengine.executable.profiling",
    "ProfileServer": "glassengine.executable.profile_server",
    "StoredProfile": "glassengine.executable.profile_trace",
    "Trace": "glassengine.spans",
    "profile": "glassengine.executable.profiling",
    "read": "glassengine.executable.profile_trace:read_profiles",
    "request": "glassengine.executable.profile_server:request_profile",
    "start_server": "glassengine.executable.profile_server",
}
__getattr__, __dir__ = deferred(__name__, _PUBLIC)
