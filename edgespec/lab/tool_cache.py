"""Runs read-only tools before a client of the server calls them, and keeps results (SpecCache, arXiv 2510.16276).

Calls are copied from the conversation: an argument of an earlier call stood behind some word, its label. Words of the
same shape behind the same label are arguments of the next calls.
"""

import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice, product
from threading import Lock
from time import monotonic
from typing import Any

from edgespec.errors import UsageError, check_number, check_texts, check_whole, must_be
from edgespec.loop.text import content_text
from edgespec.machine.process import check_process

AT_ONCE = 4  # calls of each function that one `foresee` starts
BACK = 9  # most words from a value back to its label; other values of a list may lie between
WORD = re.compile(r"[\w-]+")

Key = tuple[str, str]  # name, arguments as JSON in one form
Place = tuple[str, str]  # the label before a value, and the value's shape


class ToolCache:
    """
    Attributes:
        calls: number of calls.
        early: calls whose result was there, or under way.
        started: calls that were started before they were made.
    """

    def __init__(
        self,
        run: Callable[[str, dict[str, Any]], Any],
        safe: Collection[str],
        *,
        size: int = 256,
        seconds: float = 60.0,
    ) -> None:
        """
        Args:
            run: makes a call, given its name and arguments; in threads of its own for calls that are started early.
            safe: names of functions without side effects; only these are started early and kept.
            size: results that are kept, the last used ones.
            seconds: after which a result is too old.
        """
        if not callable(run):
            raise must_be("run", run, "a function")
        if isinstance(safe, str) or not isinstance(safe, Collection):
            raise must_be("safe", safe, "a collection of names of functions")
        self._run, self._safe = run, frozenset(check_texts("safe", list(safe)))
        self._size, self._seconds = (
            check_whole("size", size, 1),
            check_number("seconds", seconds, lambda value: value > 0, "above 0"),
        )
        self._results: OrderedDict[Key, tuple[float, Future[Any]]] = OrderedDict()
        self._places: dict[str, dict[str, set[Place]]] = {}  # function -> parameter -> where its values stood
        self._process = os.getpid()
        self._lock, self._threads = Lock(), ThreadPoolExecutor(8, "edgespec tools")
        self.calls = self.early = self.started = 0

    def call(self, name: str, arguments: str | Mapping[str, Any]) -> Any:
        """The result of a call, and what `run` raises; a call that is not safe drops all results.

        Raises:
            UsageError: the arguments are no JSON object.
        """
        check_process(self._process, "ToolCache")
        key, self.calls = _key(name, arguments), self.calls + 1
        if name not in self._safe:
            try:
                return self._run(name, json.loads(key[1]))
            finally:
                with self._lock:
                    self._results.clear()
        known = self._known(key)
        if known and not known.cancel() and not known.exception():  # one that has not begun is cancelled
            self.early += 1
            return known.result()
        found = Future[Any]()
        found.set_running_or_notify_cancel()
        with self._lock:
            self._keep(key, found)
        try:
            found.set_result(self._run(name, json.loads(key[1])))
        except BaseException as error:
            found.set_exception(error)
            raise
        return found.result()

    def propose(self, name: str, arguments: str | Mapping[str, Any]) -> None:
        """Start a call that may be made soon, if its function is safe."""
        check_process(self._process, "ToolCache")
        if name in self._safe and not self._known(key := _key(name, arguments)):
            # An unsafe call under way drops this result when it ends.
            with self._lock, suppress(RuntimeError):  # it was closed
                self._keep(key, self._threads.submit(self._run, name, json.loads(key[1])))
                self.started += 1

    def foresee(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Learn from the calls of a conversation in OpenAI's form, and start calls that may follow it.

        Raises:
            UsageError: the messages have another form.
        """
        if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
            raise must_be("messages", messages, "a list of messages like {'role': 'user', 'content': 'Hi'}")
        words, made = list[tuple[Place, str]](), set[Key]()
        for message in messages:
            for call in message.get("tool_calls") or ():
                try:
                    name, arguments = call["function"]["name"], call["function"]["arguments"]
                except (LookupError, TypeError) as error:
                    raise must_be("a tool call", call, "one with `function`, `name` and `arguments`") from error
                if name in self._safe:
                    with suppress(UsageError):  # arguments that a model wrote wrongly
                        made.add(key := _key(name, arguments))
                        self._learn(words, *key)
            with suppress(UsageError):  # an image, say
                words += _words(content_text(message.get("content")))
        newest = words[::-1]
        for name, parameters in self._places.items():
            values = [
                dict.fromkeys((parameter, word) for place, word in newest if place in places)
                for parameter, places in parameters.items()
            ]
            likely = (_key(name, dict(found)) for found in product(*values))
            for key in islice((one for one in likely if one not in made), AT_ONCE):
                self.propose(*key)

    def _learn(self, words: Sequence[tuple[Place, str]], name: str, arguments: str) -> None:
        values = json.loads(arguments)
        if values and all(isinstance(value, str) for value in values.values()):
            parameters = self._places.setdefault(name, {})
            for parameter, value in values.items():
                parameters.setdefault(parameter, set()).update(place for place, word in words if word == value)

    def _known(self, key: Key) -> Future[Any] | None:
        with self._lock:
            since, found = self._results.get(key, (0.0, None))
            if (
                found is None
                or monotonic() - since > self._seconds
                or found.cancelled()
                or (found.done() and found.exception())
            ):
                return None
            self._results.move_to_end(key)
            return found

    def _keep(self, key: Key, found: Future[Any]) -> None:
        """Called with the lock."""
        self._results[key] = monotonic(), found
        self._results.move_to_end(key)
        while len(self._results) > self._size:
            self._results.popitem(last=False)

    def close(self) -> None:
        """Start nothing more; calls under way end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _key(name: str, arguments: str | Mapping[str, Any]) -> Key:
    try:
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(values, Mapping):
            return name, json.dumps(dict(values), sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        pass
    raise must_be(f"what {name} is called with", arguments, "a JSON object")


def _words(text: str) -> Iterator[tuple[Place, str]]:
    before = list[tuple[str, str]]()  # words and their shapes
    for word in WORD.findall(text):
        shape = re.sub(r"[a-z]+", "a", re.sub(r"[A-Z0-9]", "A", word))
        label = next((other for other, its in reversed(before[-BACK:]) if its != shape), "")
        yield (label.lower(), shape), word
        before.append((word, shape))
