"""A model folder and its config.json, without its tokenizer (`hf_vocab.py`)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from edgespec.errors import EdgespecError, ModelError, first_line
from edgespec.machine.files import no_file, no_model_folder

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}  # of `from_pretrained`


def check_folder(path: str) -> Path:
    """
    Raises:
        ModelError: says what is missing.
    """
    folder = Path(path)
    if not folder.exists():
        raise no_file(path, "folder")
    if not folder.is_dir():
        raise ModelError(f"{path}: is a file; a model folder with config.json and safetensors files is needed")
    if not (folder / "config.json").is_file():
        raise no_model_folder(path)
    return folder


def content_files(path: str) -> list[str]:
    return [str(file) for file in (Path(path) / "config.json", *sorted(Path(path).glob("*.safetensors")))]


def read_config(folder: Path) -> Any:
    """
    Raises:
        ModelError: it is damaged, or of an architecture that the installed transformers does not know.
    """
    with refused(f"{folder}: config.json cannot be used"):
        return AutoConfig.from_pretrained(folder, **LOCAL)


def experts_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """
    Args:
        config: of config.json; architectures name the counts differently.

    Returns:
        Experts of a layer, and those that a token uses; None for a model without experts.
    """
    count = next(
        (config[name] for name in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(name)), 0
    )
    used = config.get("num_experts_per_tok") or 0
    return (count, used) if 0 < used < count else None


@contextmanager
def refused(what: str) -> Iterator[None]:
    """
    Raises:
        ModelError: `what`, with the first line of a library's error.
    """
    try:
        yield
    except EdgespecError:
        raise
    except Exception as error:  # libraries raise nearly every type there is
        raise ModelError(f"{what}: {first_line(error)}") from error
