"""Whether a picture can be drawn: asked before what takes minutes to measure."""

from importlib.util import find_spec
from pathlib import Path

from edgespec.errors import MissingPackage, UsageError


def check_picture(path: str | Path) -> None:
    """See that a picture can be drawn into a file.

    Raises:
        MissingPackage: matplotlib is not installed.
        UsageError: there is no such folder.
    """
    if find_spec("matplotlib") is None:
        raise MissingPackage("matplotlib", "bench", "the picture")
    if not (folder := Path(path).absolute().parent).is_dir():
        raise UsageError(f"the picture cannot be written to {path}: there is no folder {folder}")
