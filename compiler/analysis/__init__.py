"""Questions about graphs and programs: value ranges, costs, verification against eager PyTorch."""
