"""Several copies of the target verify in parallel: distributed speculative inference (arXiv 2405.14105)."""
