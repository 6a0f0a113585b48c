"""An engine on disk: its manifest, its files, who built it."""
