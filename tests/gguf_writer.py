"""The end of every GGUF that tests write."""

from typing import Any


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: Any, **values: Any) -> None:
    """Values of a header, by the names of gguf's methods."""
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
