"""Pictures by matplotlib, which may be missing."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError, MissingPackage, UsageError


def check_picture(path: str | Path) -> None:
    """See that a picture can be drawn into a file; call it before minutes are spent on figures.

    Raises:
        MissingPackage: matplotlib is not installed.
        UsageError: there is no such folder.
    """
    if find_spec("matplotlib") is None:
        raise MissingPackage("matplotlib", "bench", "the picture")
    if not (folder := Path(path).absolute().parent).is_dir():
        raise UsageError(f"the picture cannot be written to {path}: there is no folder {folder}")


def save_picture(figure: Any, path: str | Path) -> None:
    """Write a figure. Raises EdgespecError."""
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise EdgespecError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
