"""Object stores behind fsspec: paths that are URLs, their bytes by ranges, copies of whole objects, and uploads."""
