"""The promise over whole grids: every model of the zoo, each strategy at each size. Run by `pytest --full tests/sweeps`."""
