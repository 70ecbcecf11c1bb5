"""Many sequences, one model."""
