"""Model folders on MLX."""
