"""Benchmarks: comparisons with other programs, and with plain decoding."""
