"""Example plans (`*.plan`) and the plain PyTorch models that they train."""
