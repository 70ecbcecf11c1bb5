"""The beginning and the end of GGUFs that tests write, and a reader of GGUFs with long lists."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

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


class Reader(gguf.GGUFReader):
    """Reads a list at once; gguf takes seconds for those of a vocabulary."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        raw, parts = self.data.data, list[Any]()
        kind, count = struct.unpack_from("<IQ", raw, orig_offs)
        end = orig_offs + struct.calcsize("<IQ")
        if kind == gguf.GGUFValueType.STRING:
            for _ in range(count):
                start = end + 8
                end = start + struct.unpack_from("<Q", raw, end)[0]
                parts.append(raw[start:end])
        else:
            parts.append(np.frombuffer(raw, self.gguf_scalar_to_np[kind], count, end))
            end += parts[0].nbytes
        return end - orig_offs, parts, [*range(len(parts))], [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind)]
