"""The beginning and the end of GGUFs that tests write."""

from pathlib import Path
from typing import Any

import gguf

USUAL = {"file_type": 0, "context_length": 2048, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0}


def begin(path: Path, arch: str, split: int = 0, **values: Any) -> Any:
    """A writer of a file, or of parts of `split` tensors, with these values in its header, and `USUAL` ones."""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    add(writer, **USUAL | values)
    return writer


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: Any, **values: Any) -> None:
    """Values of a header, by the names of gguf's methods."""
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
