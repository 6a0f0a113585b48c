"""One page of HTML that opens from disk, and the data beside it, from the JSON of a result."""
