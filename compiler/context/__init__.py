"""Context parallelism: the sequence is cut over ranks."""
