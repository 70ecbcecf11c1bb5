"""Defer the handlers of signals, such as Ctrl-C, until calls that belong together have ended."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# The last one's handler raises, so it comes after the others; Windows has no SIGHUP, which a closed terminal sends.
DEFERRED = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)]


class Signals:
    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            tell: called when a signal comes that is deferred.
        """
        self._tell = tell
        self._came: dict[int, Any] = {}
        self._handlers: dict[int, Any] = {}
        self._error: BaseException | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defer `DEFERRED` until `obey` or the end of the `with`.

        A handler's exception could come between calls that belong together, and in a callback of llama.cpp it is lost.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        found = {number: signal.getsignal(number) for number in DEFERRED}
        self._handlers = {number: handler for number, handler in found.items() if callable(handler)}
        try:
            for number in self._handlers:
                signal.signal(number, self._defer)
            yield
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self.obey()
            if error := self._error:
                self._error = None
                raise error

    def _defer(self, number: int, frame: Any) -> None:
        self._came[number] = frame
        self._tell()

    def obey(self) -> None:
        """Run the handlers of deferred signals.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
        """
        held = dict(self._came)
        self._came.clear()
        for number in DEFERRED:
            if number in held:
                self._handlers[number](number, held[number])

    def stop(self) -> bool:
        """As `obey`, in a callback: True if a handler has raised; the end of the `with` raises that error again."""
        try:
            self.obey()
        except BaseException as error:
            self._error = error
        return self._error is not None
