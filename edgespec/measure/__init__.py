"""Measuring: speed, losslessness, and what this machine can do."""
