"""The tables of `docs/families.md`: Markdown, and the checks that fill the cells."""
