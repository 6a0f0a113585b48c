"""Which tensors of two records belong together: names, maps, layouts, and the elements that count."""
