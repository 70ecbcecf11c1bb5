"""Model folders and GGUF files made of each other."""
