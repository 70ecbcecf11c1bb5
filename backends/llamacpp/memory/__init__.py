"""Places of weights and caches: memory, GPU, disk."""
