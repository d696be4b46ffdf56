"""Questions about graphs and programs: value ranges, verification against eager PyTorch."""
