"""The models of a server: which of them are in memory, and how many requests use them.

A request holds a `Lease` of its model, which is loaded for the first one, and stays for as long as there are any.
Models are loaded one after the other; to make room the one that has been idle longest leaves. If all of them are in
use, one gets no further requests and leaves after its last: those that come meanwhile wait until it is loaded again.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Self

from starlette.requests import Request as HttpRequest

from edgespec.errors import Closed, EdgespecError, undone
from edgespec.machine.memory import give_back_now
from edgespec.model import Model
from edgespec.server.errors import Refused
from edgespec.server.service import MOST_WAITING, PING_SECONDS, BodyReaders, Found, Service
from edgespec.server.stored import StoredResponses
from edgespec.server.wire import read_body


@dataclass(eq=False)
class Served:
    """
    Attributes:
        names: by which requests choose it; the first is its own.
        size: bytes of memory that it takes.
        open: loads it in a thread, in so many bytes at most. From time to time it calls what it is given, which may
            raise Closed.
        limits: for clients, as soon as they are known.
        service: None: it is not loaded.
        users: leases.
        since: when the last of them ended.
        leaves: it gets no further users, and leaves after the last.
        waiting: leases that get it when `task` has ended.
        task: loads it.
    """

    names: Sequence[str]
    size: int = 0
    open: Callable[[int, Callable[[], None]], Model] | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    service: Service | None = None
    users: int = 0
    since: float = 0.0
    leaves: bool = False
    waiting: int = 0
    task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.names[0]


class Models:
    """Used only in the server's loop.

    Attributes:
        all: at least one; a request without a name gets the first.
        memory: most bytes of those in memory; this class alone counts them.
    """

    def __init__(self, all: Sequence[Served], memory: int = 0, ping_seconds: float = PING_SECONDS) -> None:
        self.all, self.memory, self.ping_seconds = all, memory, ping_seconds
        self.started, self.stopping = int(time.time()), False
        self.answered, self.stored, self.readers = Counter[tuple[str, int]](), StoredResponses(), BodyReaders()
        self._here = [one for one in all if one.service]  # and the one that is being loaded
        self._turn, self._unused = asyncio.Lock(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "edgespec models")

    @classmethod
    def of(cls, service: Service, names: Sequence[str] = ()) -> Self:
        """One model, which the caller has loaded and closes; `names` as of a `Served`."""
        served = Served(names or [service.name], limits=service.limits, service=service)
        models = cls([served], ping_seconds=service.ping_seconds)
        models.readers, models.stored, models.stopping = service.readers, service.stored, service.stopping
        return models

    @property
    def taken(self) -> int:
        return sum(served.size for served in self._here)

    @property
    def services(self) -> dict[str, Service]:
        """Of the loaded models, by name."""
        return {served.name: served.service for served in self.all if served.service}

    def named(self, name: str) -> Served:
        """Raises Refused."""
        given = name.removesuffix(":latest")  # which Ollama's clients add
        if found := next((one for one in self.all if given in one.names), None):
            return found
        names = ", ".join(name for one in self.all for name in one.names)
        raise Refused(404, f"the model {name!r} does not exist here; there are {names}", "model_not_found")

    def admitted(self) -> AbstractContextManager[None]:
        """As `Service.admitted`, before a body is read that names its model: refused if each has too many requests."""
        services = list(self.services.values())
        return min(services, key=Service.busy).admitted() if len(services) == len(self.all) else nullcontext()

    def wanted(self, name: str) -> Served:
        """The model for a request, by the name that it gives; the only model has any name. Raises Refused."""
        return self.named(name) if name and self.all[1:] else self.all[0]

    def lease(self, name: str) -> "Lease":
        """A lease for a request, which has to be closed.

        Args:
            name: as for `wanted`.

        Raises:
            Refused: there is no such model, too many wait for it, or the server stops.
        """
        served = self.wanted(name)
        if self.stopping:
            raise Refused(503, "the server is stopping")
        if served.service and not served.leaves:
            return Lease(served, None, self._unused)
        if served.waiting >= MOST_WAITING:
            raise Refused(429, f"{MOST_WAITING} requests wait for the model {served.name}: come again in a moment")
        if not served.task or served.task.done():
            served.task = asyncio.create_task(self._bring(served))
            served.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps all have left
        return Lease(served, served.task, self._unused)

    @asynccontextmanager
    async def service(self, name: str) -> AsyncIterator[Service]:
        """The model for a request, which waits for it; it stays for the `with`. Arguments and errors as for `lease`."""
        with closing(self.lease(name)) as lease:
            yield await lease.service()

    async def read(self, http: HttpRequest, parse: Callable[[bytearray], Found]) -> tuple[Found, int]:
        """A body, parsed in a thread, and its bytes. Raises Refused."""
        data = await read_body(http)
        with self.admitted():
            return await self.readers.read(len(data), partial(parse, data)), len(data)

    async def _bring(self, served: Served) -> None:
        async with self._turn:
            try:
                while served.waiting and not served.service and self.taken + served.size > self.memory and self._here:
                    await self._make_room()
                if served.waiting and not served.service:
                    await self._open(served)
            finally:
                for one in self._here:
                    one.leaves = False  # another has left instead
            if served.service:
                served.users, served.waiting = served.users + served.waiting, 0

    async def _make_room(self) -> None:
        """Send the model away that has been idle longest, or wait for one that is idle."""
        served = min(self._here, key=lambda one: (one.users > 0, one.since))
        served.leaves = True  # if it is in use: it gets no further requests, or others could wait for ever
        if served.users:
            self._unused.clear()
            await self._unused.wait()
        elif service := served.service:
            served.service, served.leaves = None, False
            await asyncio.get_running_loop().run_in_executor(self._thread, service.model.close)
            self._here.remove(served)

    async def _open(self, served: Served) -> None:
        room = self.memory - self.taken
        self._here.append(served)
        with undone(partial(self._here.remove, served)):
            served.service = await asyncio.get_running_loop().run_in_executor(self._thread, self._load, served, room)
            served.limits, served.since = served.service.limits, monotonic()

    def _load(self, served: Served, room: int) -> Service:
        assert served.open
        give_back_now()  # what the models that have left held
        try:
            model = served.open(room, self._check)
            with undone(model.close):
                service = Service(
                    model, served.name, ping_seconds=self.ping_seconds, readers=self.readers, stored=self.stored
                )
                service.begin()
                self._check()
                return service
        except Closed:
            raise
        except Exception as error:
            says = str(error) if isinstance(error, EdgespecError) else type(error).__name__
            raise Refused(503, f"the model {served.name} cannot be loaded: {says}") from error

    def _check(self) -> None:
        if self.stopping:
            raise Closed

    def stop(self) -> None:
        """Refuse new requests, and those that wait for a model."""
        self.stopping = True
        for served in self.all:
            if served.service:
                served.service.stopping = True
            if served.task:
                served.task.cancel()

    def end_texts(self) -> None:
        """Requests fail, and then connections end."""
        for service in self.services.values():
            service.model.scheduler.close()

    def close(self) -> None:
        """Free what was loaded here, after a load under way."""
        self.stopping = True
        self._thread.shutdown()
        for served in self.all:
            if served.open and served.service:
                served.service.model.close()


class Lease:
    """A request's use of a model, which does not leave before `close`."""

    def __init__(self, served: Served, task: asyncio.Task[None] | None, unused: asyncio.Event) -> None:
        """
        Args:
            served: the model.
            task: loads it; None: it is there.
            unused: is set at the end of its last lease.
        """
        self.name, self._served, self._task, self._unused, self._ended = served.name, served, task, unused, False
        if task:
            served.waiting += 1
        else:
            served.users += 1

    @property
    def is_loaded(self) -> bool:
        task = self._task
        return not task or (task.done() and not task.cancelled() and not task.exception())

    async def service(self) -> Service:
        """Waits for the model. Raises Refused: it cannot be loaded; Closed: the server stops."""
        if task := self._task:
            await asyncio.wait([task])
            if task.cancelled():
                raise Closed
            task.result()
        assert self._served.service
        return self._served.service

    def close(self) -> None:
        """Safe to call twice."""
        served, ended, self._ended = self._served, self._ended, True
        if ended:
            return
        if self.is_loaded:
            left = served.users = served.users - 1
            served.since = monotonic()
        else:
            left = served.waiting = served.waiting - 1
        if not left:
            self._unused.set()
