"""Model folders on PyTorch."""
