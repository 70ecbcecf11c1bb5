"""Model folders on MLX."""

from edgespec.errors import MissingPackage

try:
    import mlx_lm as mlx_lm

    from ..common import hf_vocab as hf_vocab
except ImportError as error:
    raise MissingPackage("mlx-lm", "mlx", "running models on MLX") from error
