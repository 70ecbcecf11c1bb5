"""Where weights and caches lie: memory, GPU, disk."""
