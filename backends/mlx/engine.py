"""The engine for MLX, with heads and own layers as drafts."""

import re
from pathlib import Path

from edgespec.errors import ModelError, named
from edgespec.loop.backend import Backend
from edgespec.loop.engines import LoadOptions
from edgespec.models.heads import is_head
from edgespec.models.safetensors_header import read_safetensors_header

from ..common.heads import NO_EAGLE
from ..common.model_folder import refused
from .backend import MlxBackend, MlxEngine
from .head import load_head
from .own_layers import MlxOwnLayers

# Names in what models' folders have for multi-token prediction, which mlx-lm leaves out when it loads them.
IN_FOLDER = re.compile(r"(^|\.)mtp[._]|\.(eh_proj|nextn)\.")


class MlxHeadEngine(MlxEngine):
    """See `LoadsHeads`."""

    def has_head(self, path: str) -> bool:
        stored = (one for file in Path(path).glob("*.safetensors") for one in read_safetensors_header(file))
        if any(IN_FOLDER.search(one.name) for one in stored):
            raise ModelError(f"{path}: MLX cannot draft with the head in this folder; the backend torch can")
        return is_head(path)

    def load_head(self, target: Backend, path: str, options: LoadOptions) -> Backend:
        assert isinstance(target, MlxBackend)
        with named(path):
            if options.own_layers:
                with refused("MLX cannot leave out layers of it"):
                    return MlxOwnLayers(target, options.sessions)
            with refused(NO_EAGLE):
                return load_head(target, path, options)


engine = MlxHeadEngine()
