"""A fork has its parent's objects, but none of its threads: it must neither use them, nor free what they hold."""

import os
import weakref
from collections.abc import Callable
from typing import Any

from edgespec.errors import OtherProcess


def is_here(process: int) -> bool:
    """True in the process of this id."""
    return process == os.getpid()


def check_process(process: int, what: str = "model") -> None:
    """
    Args:
        process: id of the process that made an object.
        what: the object.

    Raises:
        OtherProcess: this process is another one.
    """
    if not is_here(process):
        raise OtherProcess(what, process, os.getpid())


def at_end(owner: Any, free: Callable[..., object], *arguments: Any) -> Callable[[], object]:
    """Free what `owner` holds once it is collected, at the latest when this process ends; a fork frees nothing.

    Returns:
        Frees it now; safe to call twice.
    """
    return weakref.finalize(owner, _free_here, os.getpid(), free, arguments)


def _free_here(process: int, free: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    if is_here(process):
        free(*arguments)
