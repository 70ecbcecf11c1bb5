"""Weights that are larger than memory: what stays, what moves, and the moving."""
