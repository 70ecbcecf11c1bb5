"""Layers of a model in groups, as EasySpec has it (arXiv 2502.02493): the attention of each has the group's input.

Devices could compute these attentions at once. Here one device computes them one after the other.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from edgespec.errors import UsageError

PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class LayerGroups:
    """Takes the place of the layers' `forward`.

    Attributes:
        size: layers of a group; 1: the model as it is.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        """
        Raises:
            UsageError: the layers are not two norms, attention and one more part in this order.
        """
        if any({name for name, _ in layer.named_children()} != PARTS for layer in layers):
            raise UsageError("the planner easyspec needs a draft whose layers are as in Llama, Mistral or Qwen")
        self.size = 1
        self._layers, self._input = layers, None
        for number, layer in enumerate(layers):
            layer.forward = partial(self._forward, number, layer, layer.forward)

    def close(self) -> None:
        """Give the layers their own `forward` back."""
        for layer in self._layers:
            del layer.forward

    def _forward(self, number: int, layer: Any, forward: Any, states: Any, *arguments: Any, **options: Any) -> Any:
        if self.size == 1:
            return forward(states, *arguments, **options)
        if number % self.size == 0:
            self._input = states
        found, _ = layer.self_attn(layer.input_layernorm(self._input), *arguments, **options)
        states = states + found
        return states + layer.mlp(layer.post_attention_layernorm(states))
