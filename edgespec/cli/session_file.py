"""`edgespec run --resume FILE`."""

from pathlib import Path
from typing import Any

from edgespec.errors import UsageError
from edgespec.model import Model


class SessionFile:
    """Where a run's session comes from and goes to."""

    def __init__(self, name: str) -> None:
        """Refuse before a model is loaded. Raises UsageError: there can be no such file."""
        self._path = Path(name)
        if not self._path.parent.is_dir():
            raise UsageError(f"--resume {name}: there is no folder {self._path.parent}")
        if self._path.is_dir():
            raise UsageError(f"--resume {name}: is a folder; give the name of a file")

    def load(self, model: Model) -> Any:
        """Have the model start from the file, if it exists; the chat's messages, if it was one.

        Raises:
            SessionFileError: it is not whole, or another model's. It stays as it is.
        """
        return model.scheduler.load(self._path) if self._path.exists() else None

    def save(self, model: Model, messages: Any = None) -> None:
        """Keep what the model's session holds, and a chat's messages. Raises SessionFileError."""
        model.scheduler.save(self._path, messages)
