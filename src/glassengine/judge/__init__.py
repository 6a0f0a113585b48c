"""Is this tensor right? References, replays, sides, pairs and verdicts; knows no command."""
