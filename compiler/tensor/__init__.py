"""Tensor parallelism: which parameters are cut, and along what."""
