"""The on-disk record of tensors: writer, reader, foreign formats and statistics."""
