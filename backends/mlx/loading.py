"""Check model folders, and make mlx-lm models of them, without a read of their weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from edgespec.errors import ModelError
from edgespec.loop.engines import Progress
from edgespec.machine.files import read_json_object

from ..common.model_folder import check_folder, refused
from .recurrent import is_recurrent, leaves_of
from .tree import wrap_ropes


@dataclass(frozen=True, slots=True)
class LazyModel:
    """
    Attributes:
        folder: of the model.
        config: the contents of config.json.
        model: mlx-lm's; MLX reads its weights when they are needed, as by `evaluate`.
        windows: as `find_windows` returns them.
    """

    folder: Path
    config: Mapping[str, Any]
    model: Any
    windows: Sequence[int | None]

    @property
    def text_config(self) -> Mapping[str, Any]:
        return self.config.get("text_config") or self.config


def open_model(path: str) -> LazyModel:
    """
    Raises:
        ModelError: files are missing or damaged, or the model cannot hold a tree.
    """
    folder = check_folder(path)
    config, model = check_files(folder), load_weights(folder)
    windows = find_windows(model, path)
    if not is_recurrent(model):
        wrap_ropes(model)
    return LazyModel(folder, config, model, windows)


def check_files(folder: Path) -> dict[str, Any]:
    """Read config.json, and check that all weight files are there."""
    config = read_json_object(folder / "config.json", ModelError)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{folder}: config.json does not name a model_type")
    index = folder / "model.safetensors.index.json"
    with refused(f"{folder}: {index.name} is damaged"):
        named = set(read_json_object(index, ModelError)["weight_map"].values()) if index.exists() else set()
        if not all(isinstance(name, str) for name in named):
            raise ValueError("the name of a weight file is not text")
    missing = sorted(name for name in named if not (folder / name).exists())
    if missing:
        raise ModelError(f"{folder}: {len(missing)} of {len(named)} weight files are missing, first {missing[0]}")
    if not any(folder.glob("model*.safetensors")):
        raise ModelError(f"{folder}: has no weights: there is no file model*.safetensors")
    return config


def load_weights(folder: Path) -> Any:
    with refused(f"{folder}: mlx-lm cannot load it"):
        return load_model(folder, lazy=True)[0]


def evaluate(model: Any, progress: Progress = lambda done, total: None) -> None:
    """Read a model's weights one by one: a GPU's commands that waited for slow files were ended.

    Raises:
        ModelError: they cannot be read.
    """
    arrays = [array for _, array in tree_flatten(model.parameters())]
    done, total = 0, sum(array.nbytes for array in arrays)
    with refused("its weights cannot be read"):
        for array in arrays:
            mx.eval(array)
            done += array.nbytes
            progress(done, total)
    mx.clear_cache()


def find_windows(model: Any, path: str) -> list[int | None]:
    """The window, in tokens, of each layer that has keys and values; None: all tokens."""
    windows = list[int | None]()
    caches = list(leaves_of(make_prompt_cache(model)))
    recurrent = any(type(cache) is ArraysCache for cache in caches)
    for cache in caches if recurrent else make_prompt_cache(model):
        if type(cache) is ArraysCache:
            continue
        if type(cache) is KVCache:
            windows.append(None)
        elif type(cache) is RotatingKVCache and cache.keep == 0:
            windows.append(cache.max_size)
        else:
            raise ModelError(
                f"{path}: has layers that keep their past in a {type(cache).__name__}, which cannot branch into a "
                f"tree here; use a GGUF of it, or an attention model"
            )
    return windows
