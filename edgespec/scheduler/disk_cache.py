"""A folder of saved sessions, found by their leading tokens."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from edgespec.errors import ContextFull, DamagedSession, EdgespecError, SessionFileError, failing_as
from edgespec.loop.backend import Backend, Session
from edgespec.loop.passes import common_prefix
from edgespec.loop.session_files import check_replaceable, difference, draft_file, load_draft_session, look
from edgespec.machine.files import is_abandoned

WORTH_SAVING = 256  # new tokens that are worth a file
OWN = "[0-9a-f]" * 32 + ".kept"  # names of its files
PART = 8  # one in PART tokens must be new


class DiskCache:
    """Saved sessions of one model, loaded in one way; files of others stay, and failures of files are only reported."""

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
            folder: is made if it does not exist.
            backend: whose sessions are saved.
            most_bytes: of all files; beyond it the least recently used ones are deleted.
            least: tokens that saving or loading must spare.
            say: receives each failure, as a line.

        Raises:
            SessionFileError: the folder cannot be made or read.
        """
        self.least = least
        self._folder, self._backend, self._most_bytes, self._say = Path(folder), backend, most_bytes, say
        self._saved: dict[Path, tuple[str, list[int]]] = {}  # sender and tokens
        self._too_many = sys.maxsize  # tokens of the shortest session that was larger than `most_bytes`
        with failing_as(SessionFileError, f"{folder}: cannot be used"):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for left in self._folder.glob(f".{OWN}*-*.new"):
                with suppress(OSError):  # another program may complete it meanwhile
                    if is_abandoned(left):
                        left.unlink()
            for path in self._folder.glob(OWN):
                try:
                    saved = look(path)
                except SessionFileError as error:
                    say(f"{error}; it is left out")
                    continue
                fits = len(saved.token_ids) <= backend.capabilities.context_length
                if fits and not difference(saved, backend):
                    about = saved.note if isinstance(saved.note, dict) else {}
                    self._saved[path] = about.get("sender", ""), saved.token_ids

    def best(self, token_ids: Sequence[int], sender: str = "") -> tuple[Path | None, int]:
        """The file of a sender's that shares most of the first tokens, and their number."""
        saved = self._saved.items()
        shared = {path: common_prefix(tokens, token_ids) for path, (whose, tokens) in saved if whose == sender}
        path = max(shared, key=lambda path: shared[path], default=None)
        return path, shared[path] if path else 0

    def put(self, session: Session, draft: Session | None = None, sender: str = "") -> bool:
        """Save a session if that is worth it, and delete files that its tokens begin with.

        Args:
            session: of the target.
            draft: of the draft for the same sequence; it may have fewer tokens.
            sender: of the requests that its tokens come from.

        Returns:
            False if nothing was saved, as of a session that is larger than `most_bytes`.
        """
        tokens = list(session.token_ids)
        if len(tokens) >= self._too_many:
            return False
        try:
            if session.reusable_prefix(len(tokens)) - self.best(tokens, sender)[1] < max(
                self.least, len(tokens) // PART
            ):
                return False
            about = json.dumps([dict(self._backend.identity), tokens, *filter(None, [sender])], sort_keys=True)
            path = self._folder / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.kept"
            try:
                check_replaceable(path)
            except SessionFileError:
                self._drop(path)  # its end is missing
            session.save(path, {"sender": sender} if sender else None)
        except EdgespecError as error:
            self._say(str(error))
            return False
        if draft and common_prefix(draft.token_ids, tokens) >= self.least:
            try:
                draft.save(draft_file(path))
            except EdgespecError as error:
                self._say(str(error))
        if self._bytes_of(path) > self._most_bytes:  # all others would have to go, and then this one
            self._drop(path)
            if self._too_many == sys.maxsize:
                about = f"a session of {len(tokens)} tokens is larger than --keep-size"
                self._say(f"{self._folder}: {about}; it and longer ones are not saved")
            self._too_many = len(tokens)
            return False
        for other, (whose, saved) in list(self._saved.items()):
            if other != path and whose == sender and tokens[: len(saved)] == saved:
                self._drop(other)
        self._saved[path] = sender, tokens
        self._make_room()
        return True

    def load(self, path: Path, session: Session, draft: Session | None = None) -> bool:
        """Load a file into a session, which may be empty if that fails.

        Returns:
            False: there is no room now.
        """
        try:
            session.load(path)
            load_draft_session(path, draft)
            os.utime(path)
        except SessionFileError as error:
            self._say(f"{error}; it is left out")
            if isinstance(error, DamagedSession):
                self._drop(path)
            else:  # it may be right for another program, or later
                self._saved.pop(path, None)
        except ContextFull:
            return False
        except EdgespecError as error:
            self._say(str(error))
        except OSError:
            pass
        return True

    def _drop(self, path: Path) -> None:
        self._saved.pop(path, None)
        for file in (path, draft_file(path)):
            with suppress(OSError):
                file.unlink()

    def _bytes_of(self, path: Path) -> int:
        """Size of a file and of its draft's; 0: another program has deleted it."""
        sizes = list[int]()
        for file in (path, draft_file(path)):
            with suppress(OSError):
                sizes.append(file.stat().st_size)
        return sum(sizes)

    def _make_room(self) -> None:
        found = list[tuple[float, int, Path]]()
        for path in self._folder.glob(OWN):
            with suppress(OSError):
                found.append((path.stat().st_mtime, self._bytes_of(path), path))
        size = sum(one[1] for one in found)
        for _, bytes_of, path in sorted(found):
            if size <= self._most_bytes:
                break
            self._drop(path)
            size -= bytes_of
