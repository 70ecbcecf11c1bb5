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
from edgespec.models.safetensors_header import Stored, read_safetensors_header

from ..common.hf_vocab import check_folder, first_line, read_config, weight_files
from .attention import Tree
from .backend import TorchBackend
from .head import TorchHead
from .loading import FULL

KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "glm4_moe", "nemotron_h")  # `model_type`
IN_FILES = re.compile(r"(?:model\.)?(mtp\.)?(?:layers\.(\d+)\.)?(.+)")
OWN = {  # names in files of what is in no layer -> those of `MtpHead`
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
    "shared_head.norm": "norm", "final_layernorm": "norm", "eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm",
}  # fmt: skip
OF_TARGET = ("embed_tokens.", "shared_head.head.")  # copies of the target's
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


def head_tensors(path: str) -> dict[str, tuple[Path, Stored]]:
    """
    Args:
        path: of a model's folder.

    Returns:
        The tensors of the head in it, by their names in `MtpHead` before experts are stacked; empty if it has none.

    Raises:
        ModelError: a file is damaged, or the head is of a kind that cannot be used.
    """
    folder = check_folder(path)
    config = read_config(folder).get_text_config()
    stored = {one.name: (file, one) for file in folder.glob("*.safetensors") for one in read_safetensors_header(file)}
    found = {own: stored[name] for name in stored if (own := _own_name(name, config.num_hidden_layers))}
    if found and config.model_type not in KINDS:
        raise ModelError(
            f"{path}: a head in a {config.model_type} model cannot be used; those of {', '.join(KINDS)} can"
        )
    kinds, numbers = _kinds(config), {name.split(".")[1] for name in found if name.startswith("layers.")}
    if found and (kinds[:1] != [FULL] or numbers != set(map(str, range(len(kinds))))):
        usable = f"heads of {len(kinds)} ({', '.join(kinds)}) with attention first"
        raise ModelError(f"{path}: its head has {len(numbers)} layers, but only {usable} can be used")
    return found


def _kinds(config: Any) -> list[str]:
    return list(getattr(config, "mtp_layers_block_type", None) or [FULL])


def _own_name(name: str, layers: int) -> str | None:
    """The name in `MtpHead`, before experts are stacked; None: the tensor is no part of a head of its own."""
    parts: tuple[str, str, str] = IN_FILES.findall(name)[0]
    inside, layer, rest = parts
    number = int(layer or 0) - (0 if inside else layers)
    if not (inside or layer) or number < 0 or rest.startswith(OF_TARGET):
        return None
    part = next((part for part in OWN if rest.startswith(f"{part}.")), None)
    if part:
        return OWN[part] + rest.removeprefix(part)
    return f"layers.{number}.{rest}" if layer else rest


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
    config.layer_types, config.num_hidden_layers = _kinds(config), len(_kinds(config))
    config.first_k_dense_replace, config.mlp_only_layers = 0, []  # its layers have experts if any layer has
    try:
        with torch.device("meta"):
            head = MtpHead(target.model, config)
        head.load_state_dict(_stacked(_read(found)), assign=True)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"its head does not fit the model: {first_line(error)}") from error
    head.to(target.device, target.dtype).eval().requires_grad_(False)
    backend = TorchMtp(target, head, options.sessions)
    backend.content = content_of(*weight_files(path))
    target.keep_states([head.of_target[0]])
    return backend


def _read(tensors: Mapping[str, tuple[Path, Stored]]) -> dict[str, Any]:
    found = dict[str, Any]()
    for file in {file for file, _ in tensors.values()}:
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(one.name) for name, (where, one) in tensors.items() if where == file}
    return found
