"""Multi-token prediction: the head in a model's own folder, whose weights transformers leaves out.

    state     of the target: its last norm's output.
    a row     eh_proj of [enorm of its token's embedding, hnorm of the state before it], then layers of the model's.
    own state of a row: a norm's output after these layers. Its logits are by the target's output matrix.

So defined in llama.cpp (src/models/qwen35.cpp, qwen3next.cpp, glm4-moe.cpp), in transformers (modeling_layers.py,
`MtpLayer`) and in vLLM (qwen3_next_mtp.py, nemotron_h_mtp.py). In vLLM's glm4_moe_mtp.py an own state has no norm.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from edgespec.errors import ModelError
from edgespec.loop.engines import LoadOptions
from edgespec.loop.session_files import content_of
from edgespec.models.safetensors_header import Stored

from ..common.model_folder import content_files, refused
from .attention import Tree
from .backend import TorchBackend
from .head import TorchHead, as_target
from .mtp_files import head_tensors, kinds_of

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class MtpHead(nn.Module):  # type: ignore[misc]
    """
    Attributes:
        config: of the layers.
        embed_tokens: None, as for a head that uses its target's.
    """

    embed_tokens = None

    def __init__(self, target: Any, config: Any) -> None:
        """
        Args:
            target: transformers' model.
            config: of the layers.
        """
        super().__init__()
        decoder, width = target.get_decoder(), config.hidden_size
        last = getattr(decoder, "norm", None) or decoder.norm_f
        eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.config = config
        self.enorm, self.hnorm, self.norm = (type(last)(width, eps=eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        kind = type(decoder.layers[0])
        self.layers = nn.ModuleList(kind(config, number) for number in range(config.num_hidden_layers))
        self.of_target = last, target.get_output_embeddings(), getattr(decoder, "rotary_emb", None)  # in no module list

    def fuse(self, states: Any) -> Any:
        return self.of_target[0].forward(states)  # without the hooks of the target's passes

    def forward(self, embeddings: Any, states: Any, positions: Any, tree: Tree) -> Any:
        """Arguments but the last, and result, as for `EagleHead`."""
        hidden = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(states)], -1))[None]
        rotary, places = self.of_target[2], positions[None]
        rotation = rotary(hidden, places) if rotary is not None else None
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotation, position_ids=places, tree=tree)
        return self.norm(hidden)[0]

    def logits(self, states: Any) -> Any:
        return self.of_target[1].forward(states)


class TorchMtp(TorchHead):
    def _states(self, embeddings: Any, states: Any, places: Any, tree: Tree) -> Any:
        return self.model(embeddings, states, places, tree)


def _stacked(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Weights with those of all experts in one, as transformers has them."""
    made, experts = dict[str, Any](), dict[tuple[str, str], dict[int, Any]]()
    for name, weight in weights.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault((match[1], match[3]), {})[int(match[2])] = weight
        else:
            made[name] = weight
    stacks = {of: torch.stack([some[number] for number in sorted(some)]) for of, some in experts.items()}
    for (name, part), stack in stacks.items():
        if part == "up" and (name, "gate") in stacks:
            made[f"{name}.gate_up_proj"] = torch.cat([stacks[name, "gate"], stack], 1)
        elif part != "gate":
            made[f"{name}.{part}_proj"] = stack
    return made


def load_mtp(target: TorchBackend, path: str, options: LoadOptions) -> TorchMtp:
    """See `LoadsHeads.load_head`.

    Raises:
        ModelError: the folder has no head, or one that does not fit its model.
    """
    found, config = head_tensors(path), deepcopy(target.model.config.get_text_config())
    if not found:
        raise ModelError("has no head of its own")
    config.layer_types, config.num_hidden_layers = kinds_of(config), len(kinds_of(config))
    config.first_k_dense_replace, config.mlp_only_layers = 0, []  # its layers have experts if any layer has
    with refused("its head does not fit the model"):
        with torch.device("meta"):
            head = MtpHead(target.model, config)
        head.load_state_dict(_stacked(_read(found)), assign=True)
    as_target(head.eval().requires_grad_(False), target)
    backend = TorchMtp(target, head, options.sessions)
    backend.content = content_of(*content_files(path))
    target.keep_states([head.of_target[0]])
    return backend


def _read(tensors: Mapping[str, tuple[Path, Stored]]) -> dict[str, Any]:
    found = dict[str, Any]()
    for file in {file for file, _ in tensors.values()}:
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(one.name) for name, (where, one) in tensors.items() if where == file}
    return found
