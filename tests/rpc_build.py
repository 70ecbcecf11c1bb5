"""A llama.cpp that was built with its RPC backend, if there is one: in the folder EDGESPEC_RPC_BUILD, or installed."""

import os
from importlib.util import find_spec
from pathlib import Path


def build() -> Path | None:
    """The folder with its llama_cpp."""
    spec = find_spec("llama_cpp")
    folders = [os.environ.get("EDGESPEC_RPC_BUILD"), *(spec.submodule_search_locations or [] if spec else [])]
    found = [Path(folder) for folder in folders if folder]
    found = [folder if folder.name == "llama_cpp" else folder / "llama_cpp" for folder in found]
    return next((folder.parent for folder in found if list(folder.glob("lib/*ggml-rpc*"))), None)


BUILD = build()
ENVIRONMENT = os.environ | {"PYTHONPATH": str(BUILD), "OMP_WAIT_POLICY": "passive"}  # of programs that use it
