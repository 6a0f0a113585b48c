"""The one way in which files and documents are opened: plain files, inside of their directory, within bounds, typed."""
