"""Communication inside segments, behind the computation that does not need it."""
