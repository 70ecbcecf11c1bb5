"""Which engines there are, and loading a model with one of them by name."""

import inspect
import platform
import sys
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from edgespec.errors import MissingPackage, UsageError
from edgespec.loop.backend import Backend, Vocab

# name -> module with `load(path, **options) -> Backend` and `load_vocab(path) -> Vocab`.
BUILT_IN = {
    "llamacpp": "edgespec.backends.llamacpp.backend",
    "mlx": "edgespec.backends.mlx.backend",
    "reference": "edgespec.backends.reference.backend",
    "torch": "edgespec.backends.torch.backend",
}


def load_backend(name: str, path: str, **options: Any) -> Backend:
    """Load the model at `path` with a built-in backend, or one from the entry-point group edgespec.backends.

    Raises:
        UsageError: there is no such backend.
        ModelError: the model cannot be loaded.
        MissingPackage: the backend's engine is not installed.
    """
    backend: Backend = _backend_module(name).load(path, **options)
    return backend


def load_options(name: str) -> frozenset[str]:
    """The options that a backend's `load` has; raises as `load_backend` does."""
    return frozenset(list(inspect.signature(_backend_module(name).load).parameters)[1:])


def load_specimen(name: str, path: str, **options: Any) -> AbstractContextManager[Backend] | None:
    """A small model that computes as the one at `path`, within a `with`; None: this backend makes none.

    Args:
        name: as for `load_backend`.
        path: of the whole model.
        options: `Backend.computing` of the whole model.

    Raises:
        ModelError: on entering the `with`, if it cannot be made.
    """
    module = _backend_module(name)
    if not hasattr(module, "specimen_of"):
        return None
    found: AbstractContextManager[Backend] = module.specimen_of(path, **options)
    return found


def choose_backend(folder: bool) -> str:
    """The built-in backend for a model file, or for a model folder on this machine.

    Raises:
        MissingPackage: no engine for folders is installed.
    """
    return installed_backends(folder)[0]


def installed_backends(folder: bool) -> list[str]:
    """The built-in backends for model files or folders that can be used on this machine, the one to prefer first.

    Raises:
        MissingPackage: no engine for folders is installed.
    """
    if not folder:
        return ["llamacpp"]
    engines = [("torch", "torch"), ("mlx", "mlx_lm")]
    if sys.platform == "darwin" and platform.machine() == "arm64":
        engines.reverse()
    installed = [name for name, package in engines if find_spec(package)]
    if not installed:
        name, package = engines[0]
        raise MissingPackage(package.replace("_", "-"), name, "running a model folder")
    return installed


def load_vocab(name: str, path: str) -> Vocab:
    """Only the tokenizer of the model at `path`; raises as `load_backend` does."""
    vocab: Vocab = _backend_module(name).load_vocab(path)
    return vocab


def _backend_module(name: str) -> Any:
    others = {point.name: point.value for point in entry_points(group="edgespec.backends")}
    known = others | BUILT_IN
    if name not in known:
        raise UsageError(f"there is no backend {name!r}; there are: {', '.join(sorted(known))}")
    return import_module(known[name])
