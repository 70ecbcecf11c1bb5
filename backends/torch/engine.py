"""The engine for PyTorch, with heads and own layers as drafts."""

from edgespec.errors import named
from edgespec.loop.backend import Backend
from edgespec.loop.engines import LoadOptions
from edgespec.models.heads import is_head

from .backend import TorchBackend, TorchEngine
from .head import load_eagle
from .mtp import load_mtp
from .mtp_files import head_tensors
from .own_layers import TorchOwnLayers
from .spans import out_of_memory


class TorchHeadEngine(TorchEngine):
    """See `LoadsHeads`."""

    def has_head(self, path: str) -> bool:
        return is_head(path) or bool(head_tensors(path))

    def load_head(self, target: Backend, path: str, options: LoadOptions) -> TorchBackend:
        assert isinstance(target, TorchBackend)
        with named(path), out_of_memory("the draft"):
            if options.own_layers:
                return TorchOwnLayers(target, options.sessions)
            return (load_eagle if is_head(path) else load_mtp)(target, path, options)


engine = TorchHeadEngine()
