"""The clients' dialects. Each translates to and from the internal form, and imports no other."""
