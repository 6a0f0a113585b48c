"""The accuracy of a back-end's kernels: from the table that ships, or measured here."""
