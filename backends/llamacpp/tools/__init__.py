"""Quantisation and importance matrices."""
