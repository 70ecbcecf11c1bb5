from pathlib import Path
from typing import Any

from edgespec.errors import UsageError
from edgespec.model import Model


class SessionFile:
    def __init__(self, name: str) -> None:
        """Check the name before a model is loaded. Raises UsageError: no file can have it."""
        self._path = Path(name)
        if not self._path.parent.is_dir():
            raise UsageError(f"--resume {name}: there is no folder {self._path.parent}")
        if self._path.is_dir():
            raise UsageError(f"--resume {name}: is a folder; give the name of a file")

    def load(self, model: Model) -> Any:
        """Restore the session, if the file exists, and return a chat's messages.

        Raises:
            SessionFileError: the file is damaged or of another model. It stays.
        """
        return model.scheduler.load(self._path) if self._path.exists() else None

    def save(self, model: Model, messages: Any = None) -> None:
        """Write the model's session and a chat's messages. Raises SessionFileError."""
        model.scheduler.save(self._path, messages)
