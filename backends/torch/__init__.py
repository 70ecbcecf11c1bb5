"""Model folders on PyTorch."""

from edgespec.errors import MissingPackage

try:
    import torch as torch
    import transformers as transformers

    from ..common import hf_vocab as hf_vocab
except ImportError as error:
    raise MissingPackage("torch and transformers", "torch", "running model folders on PyTorch") from error
