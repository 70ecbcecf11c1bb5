"""Texts on disk: what idle sessions hold is saved in a folder, so that long prompts need not be read again.

A file is found by its tokens: a prompt that begins with the same ones starts from there. Files of other models, or of
the same model loaded otherwise, are left alone.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import time

from edgespec.errors import ContextFull, EdgespecError, SessionFileError
from edgespec.loop.backend import Backend, Session
from edgespec.loop.passes import common_prefix
from edgespec.loop.session_files import beside, difference, load_beside, look

WORTH_SAVING = 256  # tokens that no file has
ABANDONED = 3600.0  # seconds after which nobody is still writing a file
PART = 8  # … and of a long text this part, so that one that grows is not written again and again


class Shelf:
    """A folder of one model's sessions. Never raises once it is made: what fails is said, and done without."""

    def __init__(
        self,
        folder: str | Path,
        backend: Backend,
        most_bytes: int,
        *,
        least: int = WORTH_SAVING,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """
        Args:
            folder: made if it is not there.
            backend: whose sessions.
            most_bytes: of all sessions in the folder; beyond it those go that were of use least lately.
            least: tokens that saving or loading must spare.
            say: told, as a line, what does not work.

        Raises:
            SessionFileError: the folder cannot be made or read.
        """
        self.least = least
        self._folder, self._backend, self._most_bytes, self._say = Path(folder), backend, most_bytes, say
        self._texts: dict[Path, list[int]] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for left in self._folder.glob(".*.kept*-*.new"):  # by a program that was killed
                if time() - left.stat().st_mtime > ABANDONED:
                    left.unlink(missing_ok=True)
            for path in self._folder.glob("*.kept"):
                with suppress(SessionFileError):
                    saved = look(path)
                    if not difference(saved, backend):
                        self._texts[path] = saved.token_ids
        except OSError as error:
            raise SessionFileError(f"{folder}: cannot be used: {error.strerror or error}") from error

    def best(self, token_ids: Sequence[int]) -> tuple[Path | None, int]:
        """The file whose text shares most leading tokens, and how many."""
        shared = {path: common_prefix(text, token_ids) for path, text in self._texts.items()}
        path = max(shared, key=lambda path: shared[path], default=None)
        return path, shared[path] if path else 0

    def put(self, session: Session, draft: Session | None = None) -> bool:
        """Save what the session holds, if that is worth it; whether it was. Files that it begins with go.

        Args:
            session: of the target.
            draft: of the draft that guesses for it; it need not have read all.
        """
        text = list(session.token_ids)
        try:
            if session.reusable_prefix(len(text)) - self.best(text)[1] < max(self.least, len(text) // PART):
                return False
            about = json.dumps([dict(self._backend.identity), text], sort_keys=True)
            path = self._folder / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.kept"
            session.save(path)
        except EdgespecError as error:  # such as the model's process being gone
            self._say(str(error))
            return False
        if draft and common_prefix(draft.token_ids, text) >= self.least:
            try:
                draft.save(beside(path))
            except EdgespecError as error:
                self._say(str(error))
        for other, held in list(self._texts.items()):
            if other != path and text[: len(held)] == held:
                self._drop(other)
        self._texts[path] = text
        self._make_room()
        return True

    def load(self, path: Path, session: Session, draft: Session | None = None) -> bool:
        """Have the session start from a file; if that does not work it may be empty. False: there is no room now."""
        try:
            session.load(path)
            load_beside(path, draft)
            os.utime(path)  # it was of use
        except SessionFileError as error:
            self._say(f"{error}; it is left out")
            self._drop(path)
        except ContextFull:
            return False
        except EdgespecError as error:
            self._say(str(error))
        except OSError:  # its time could not be set
            pass
        return True

    def _drop(self, path: Path) -> None:
        self._texts.pop(path, None)
        for file in (path, beside(path)):
            with suppress(OSError):
                file.unlink()

    def _make_room(self) -> None:
        found = list[tuple[float, int, Path]]()
        for path in self._folder.glob("*.kept"):
            with suppress(OSError):
                drafts = beside(path).stat().st_size if beside(path).exists() else 0
                found.append((path.stat().st_mtime, path.stat().st_size + drafts, path))
        size = sum(one[1] for one in found)
        for _, bytes_of, path in sorted(found):
            if size <= self._most_bytes:
                break
            self._drop(path)
            size -= bytes_of
