"""Layers of a model in groups, as EasySpec has it (arXiv 2502.02493).

The attention of each layer reads what the first layer of its group reads.
Devices could compute these attentions at once. Here one device computes them one after the other.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from edgespec.errors import UsageError

PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ROUNDING = 1 / 64  # of what a layer adds


class LayerGroups:
    """Takes the place of the layers' `forward`.

    Attributes:
        size: layers of a group; 1: the model as it is.
    """

    def __init__(self, layers: Sequence[Any], run: Callable[[], object]) -> None:
        """
        Args:
            layers: of the model.
            run: computes a pass of the model.

        Raises:
            UsageError: the layers are not two norms, attention and one more part in this order, each added as it is.
        """
        if any({name for name, _ in layer.named_children()} != PARTS for layer in layers):
            raise _other_layers()
        hooks = [layer.register_forward_hook(_check, with_kwargs=True) for layer in layers]
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()
        self.size = 1
        self._layers = layers
        self._input: Any = None
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
        return _compute(layer, self._input.to(states.device), states, *arguments, **options)


def _compute(layer: Any, read: Any, states: Any, *arguments: Any, **options: Any) -> Any:
    """A layer whose attention reads another input."""
    found, _ = layer.self_attn(layer.input_layernorm(read), *arguments, **options)
    states = states + found
    return states + layer.mlp(layer.post_attention_layernorm(states))


def _check(layer: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
    states, *others = arguments
    try:
        error = (_compute(layer, states, states, *others, **options) - output).abs().max()
    except (TypeError, ValueError) as raised:  # a part returns more or less
        raise _other_layers() from raised
    if not error <= ROUNDING * (output - states).abs().max():
        raise _other_layers()


def _other_layers() -> UsageError:
    return UsageError("the planner easyspec needs a draft whose layers are as in Llama, Mistral or Qwen")
