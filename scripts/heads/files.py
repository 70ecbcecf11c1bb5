"""A trained head as files: in the format of published heads, and as llama.cpp's architecture eagle3."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgespec.backends.torch.eagle import EagleHead
from gguf import GGUFWriter, LlamaFileType
from safetensors.torch import save

from benchmarks.made_up import add_field, add_values
from edgespec.machine.files import write_whole
from edgespec.models.convert.folder_from_gguf import appearing, read_gguf

STORED = torch.float16


def write_folder(head: EagleHead, folder: Path) -> None:
    """Write config.json and model.safetensors; raises OSError."""
    about = head.config.to_dict() | {"rope_theta": head.config.rope_parameters["rope_theta"]}  # read by older programs
    tensors = {
        name: (tensor.to(STORED) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in head.state_dict().items()
    }
    for name, data in (
        ("model.safetensors", save(tensors, {"format": "pt"})),
        ("config.json", f"{json.dumps(about, indent=2)}\n".encode()),  # the last one: it says that the head is whole
    ):
        write_whole(folder / name, data)


def write_gguf(head: EagleHead, vocabulary: Path, path: Path) -> None:
    """Write what llama.cpp's converter makes of a published head; the target's embeddings are left out.

    Args:
        head: to write.
        vocabulary: a GGUF of the target.
        path: where to; it appears when it is whole.
    """
    with appearing(path) as partial:
        writer = GGUFWriter(partial, "eagle3")
        add_values(writer, {"general.type": "model", "general.name": path.stem, **_values(head)})
        for key, field in read_gguf(vocabulary).fields.items():
            if key.startswith("tokenizer."):
                add_field(writer, key, field)
        for name, values in _tensors(head):
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _values(head: EagleHead) -> dict[str, Any]:
    config = head.config
    found = {
        "block_count": 1, "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim, "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size, "target_layers": list(head.layers),
        "target_hidden_size": config.target_hidden_size, "norm_before_residual": False, "norm_before_fc": False,
    }  # fmt: skip
    return {"general.file_type": int(LlamaFileType.MOSTLY_F16), **{f"eagle3.{key}": one for key, one in found.items()}}


NAMES = {
    "fc": "fc", "norm": "output_norm", "lm_head": "output", "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2", "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    "midlayer.self_attn.q_proj": "blk.0.attn_q", "midlayer.self_attn.k_proj": "blk.0.attn_k",
    "midlayer.self_attn.v_proj": "blk.0.attn_v", "midlayer.self_attn.o_proj": "blk.0.attn_output",
    "midlayer.mlp.gate_proj": "blk.0.ffn_gate", "midlayer.mlp.up_proj": "blk.0.ffn_up",
    "midlayer.mlp.down_proj": "blk.0.ffn_down",
}  # fmt: skip


def _tensors(head: EagleHead) -> list[tuple[str, Any]]:
    found = [("d2t", head.draft_ids.cpu().numpy())]
    tensors = head.state_dict()
    for name, new in NAMES.items():
        values = tensors[f"{name}.weight"].float().cpu().numpy()
        if name.endswith(("q_proj", "k_proj")):  # llama.cpp rotates neighbours, and transformers two halves
            values = (
                values.reshape(-1, 2, head.config.head_dim // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
            )
        found.append((f"{new}.weight", values.astype(np.float32 if values.ndim == 1 else np.float16)))
    return found
