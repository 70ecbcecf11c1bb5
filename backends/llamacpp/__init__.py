"""GGUF models on llama.cpp."""
