"""edgespec."""
