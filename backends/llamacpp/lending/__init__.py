"""Layers in the memory of other machines, and models in processes of their own."""
