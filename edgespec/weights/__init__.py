"""Weights that are larger than memory: what stays, what is streamed, and the streaming."""
