"""The parts of `edgespec serve`: keys, the socket, answers while the model loads, and the server itself."""

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.terminal import LoadingBar
from edgespec.errors import MissingPackage, NoRoom, UsageError
from edgespec.loading.asked import Asked
from edgespec.loading.draft_or_memory import planned_bytes
from edgespec.machine.files import cache_folder, read_text
from edgespec.machine.memory import format_size, private_memory
from edgespec.model import Model, load_asked
from edgespec.scheduler.disk_cache import DiskCache
from edgespec.scheduler.targets.places import is_loopback
from edgespec.weights.plan import MARGIN

if TYPE_CHECKING:
    from edgespec.server.models import Models

Ready = Callable[[str, Model], None]  # called with a model's name, and the model
SLACK = 16 << 20  # bytes by which the program may grow while models are planned
KEY = "EDGESPEC_API_KEY"
SWITCH_SECONDS = 0.001  # after which a thread that reads a body gives way: an answer waits for Python's lock many times


def check_server() -> None:
    for package in ("starlette", "uvicorn"):
        try:
            __import__(package)
        except ImportError as error:
            raise MissingPackage(package, "server", "edgespec serve") from error


def read_keys(key: str | None, key_file: str | None) -> list[str]:
    """API keys, one a line, of `key` and `key_file`; without both those of the environment variable.

    Raises:
        UsageError: the file cannot be read, or one of these has no key.
    """
    texts = {"--api-key": key} if key is not None else {}
    if key_file is not None:
        texts[f"--api-key-file {key_file}"] = read_text(key_file, UsageError, once=True)
    if not texts and KEY in os.environ:
        texts[f"${KEY}"] = os.environ[KEY]
    found = {source: [line.strip() for line in text.splitlines() if line.strip()] for source, text in texts.items()}
    for source, keys in found.items():
        if not keys:
            raise UsageError(f"{source}: has no key; write one a line")
    return [key for keys in found.values() for key in keys]


def open_socket(host: str, port: int, keys: Sequence[str], no_key: bool) -> socket.socket:
    """Open the socket before a model is loaded, so that a bad address is refused at once.

    Raises:
        UsageError: the address is not this machine's, is in use, or is public and has no key.
    """
    if not 0 <= port < 65536:
        raise UsageError(f"--port is {port}, but must be from 0 to 65535")
    if not keys and not no_key and not is_loopback(host):
        raise UsageError(
            f"--host {host} can be reached from other machines: give a key with --api-key-file or ${KEY}, or --no-key"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        if os.name == "posix":  # on Windows it would take the port from the program that has it
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()  # Linux lets several programs bind one port, and only one of them listen
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on {host} port {port}: {why}") from error
    return listening


@contextmanager
def refusing(listening: socket.socket, *, log: bool, **guard: Any) -> Iterator[None]:
    """Answer every request with 503, in a thread, while a model loads within the `with`; arguments as for `serve`."""
    from edgespec.server.app import make_loading_app
    from edgespec.server.connections import LAST_SECONDS, WatchingServer

    server = WatchingServer(_config(make_loading_app(**guard), log, LAST_SECONDS))

    def run() -> None:
        with listening.dup() as mine, asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            # On Windows the other kind of loop binds a socket for good, and `serve` could not use it.
            runner.run(server.serve([mine]))

    thread = Thread(target=run, name="edgespec loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def _config(app: Any, log: bool, most_seconds: int) -> Any:
    import uvicorn

    from edgespec.server.connections import OneProtocol

    return uvicorn.Config(
        app, http=OneProtocol, ws="none", lifespan="on", log_level="info" if log else "warning", access_log=log,
        proxy_headers=False, timeout_graceful_shutdown=most_seconds,
    )  # fmt: skip


def keep_on_disk(model: Model, folder: str, most_bytes: int) -> None:
    """Give the scheduler a disk cache in `folder`; "" is the user's cache folder.

    Raises:
        SessionFileError: as for `DiskCache`.
    """
    place = Path(folder) if folder else cache_folder() / "sessions"
    model.scheduler.pool.disk_cache = DiskCache(
        place, model.target, most_bytes, say=lambda text: click.echo(text, err=True)
    )


def names_of(models: Sequence[str], aliases: Sequence[str]) -> dict[str, list[str]]:
    """The names by which requests choose each model, its own first.

    Args:
        models: names, paths or sources.
        aliases: NAME=MODEL each, with the name of a model; of a single model NAME.

    Raises:
        UsageError: two have one name, or an alias is of none.
    """
    found = dict[str, list[str]]()
    known = {os.path.basename(os.path.abspath(model)).removesuffix(".gguf"): model for model in models}
    for model in models:
        found[model] = [name for name, path in known.items() if path == model]
        if not found[model] or models.count(model) > 1:
            raise UsageError(f"two of the models have the name of {model}: rename a file")
    for alias in aliases:
        name, _, of = alias.partition("=")
        of = of or ("" if models[1:] else next(iter(known)))
        if not name or of not in known:
            raise UsageError(f"--alias is {alias!r}, but must be NAME=MODEL; models here are {', '.join(known)}")
        if any(name in names for names in found.values()):
            raise UsageError(f"--alias {alias}: there is a model {name} already")
        found[known[of]].append(name)
    return found


def one(model: Model, names: Sequence[str]) -> "Models":
    """A model that the caller has loaded and closes, with its names."""
    from edgespec.server.models import Models
    from edgespec.server.service import Service

    return Models.of(Service(model, names[0]), names)


def several(asked: Mapping[str, Asked], names: Mapping[str, Sequence[str]], memory: int, ready: Ready) -> "Models":
    """Models that are loaded when they are wanted.

    Args:
        asked: each model, planned for all of the memory.
        names: as from `names_of`.
        memory: bytes that the program may take.
        ready: called with each model that was loaded.

    Raises:
        EdgespecError: a model is too large for the memory, or cannot be read.
    """
    from edgespec.server.models import Models, Served

    most, served = memory - private_memory() - MARGIN, list[Served]()
    for model, one in asked.items():
        try:
            size = planned_bytes(one.entry, one.draft, one.models_file, one.options, leave_out=one.leaves_out)
        except NoRoom as error:
            raise NoRoom(f"{model}: {error}") from error
        if size - SLACK > most:
            sizes = [format_size(size, up=True), format_size(memory), format_size(max(0, most))]
            raise NoRoom("{}: takes {}, but {} of memory leave {} for models".format(model, *sizes))
        served.append(Served(names[model], min(size, most), partial(open_model, names[model][0], one, ready)))
    return Models(served, most)


def open_model(name: str, asked: Asked, ready: Ready, room: int, check: Callable[[], None]) -> Model:
    """See `Served.open`; `asked` and `ready` as for `several`."""
    with LoadingBar(name) as bar:

        def say(text: str) -> None:
            check()
            bar.say(text)

        def progress(done: int, total: int) -> None:
            check()
            bar.update(done, total)

        asked = asked.within(room + MARGIN + private_memory())
        loaded = load_asked(replace(asked, say=say, progress=progress))
    try:
        ready(name, loaded)
        return loaded
    except BaseException:
        loaded.close()
        raise


def serve(models: "Models", listening: socket.socket, *, grace: int, log: bool, **guard: Any) -> None:
    """Serve until SIGINT or SIGTERM; running requests then have `grace` seconds left.

    Args:
        models: that are served.
        listening: from `open_socket`.
        grace: seconds. A second signal ends all requests at once.
        log: log paths and statuses.
        guard: keys, hosts and origins for `make_app`.
    """
    from edgespec.server.app import make_app
    from edgespec.server.connections import LAST_SECONDS, WatchingServer

    app = make_app(models, **guard)

    class Server(WatchingServer):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            loop, first = asyncio.get_running_loop(), not models.stopping
            models.stopping = self.should_exit = True
            loop.call_soon_threadsafe(models.stop)
            if first:
                loop.call_soon_threadsafe(loop.call_later, grace, self.end_texts)
            else:
                loop.call_soon_threadsafe(self.end_texts)

        def end_texts(self) -> None:
            Thread(target=models.end_texts).start()
            asyncio.get_running_loop().call_later(LAST_SECONDS, self.cut_off)

        def cut_off(self) -> None:
            """Clients that still send, or do not read."""
            for connection in self.server_state.connections:
                if connection.transport.get_write_buffer_size():
                    connection.transport.abort()  # to close it would wait for the client
            for task in self.server_state.tasks:
                task.cancel()

    host, port = listening.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    served = ", ".join(one.name for one in models.all)
    click.echo(
        f"{served} answers at http://{where}:{port}/v1 (OpenAI) and http://{where}:{port} (Anthropic, Ollama); "
        "Ctrl-C ends"
    )
    gc.collect()
    gc.freeze()  # what is loaded is no garbage, and to search it stops all answers
    sys.setswitchinterval(SWITCH_SECONDS)
    Server(_config(app, log, grace + 2 * LAST_SECONDS)).run(sockets=[listening])
