"""Parts of scripts/train-head."""
