"""From names to a ready target and draft."""
