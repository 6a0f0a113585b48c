"""Run and record a script as it is, with the processes that it spawns, to the end of its interpreter."""
