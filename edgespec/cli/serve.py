"""The parts of `edgespec serve`: keys, the socket, answers while the model loads, and the server itself."""

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

import click

from edgespec.errors import MissingPackage, UsageError
from edgespec.machine.files import cache_folder, read_text
from edgespec.model import Model
from edgespec.scheduler.disk_cache import DiskCache
from edgespec.scheduler.targets.places import is_loopback

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


def serve(model: Model, name: str, listening: socket.socket, *, grace: int, log: bool, **guard: Any) -> None:
    """Serve until SIGINT or SIGTERM; running requests then have `grace` seconds left.

    Args:
        model: loaded.
        name: of the model in answers and in `/v1/models`.
        listening: from `open_socket`.
        grace: seconds. A second signal ends all requests at once.
        log: log paths and statuses.
        guard: keys, hosts and origins for `make_app`.
    """
    from edgespec.server.app import make_app
    from edgespec.server.connections import LAST_SECONDS, WatchingServer
    from edgespec.server.service import Service

    service = Service(model, name)
    app = make_app(service, **guard)

    class Server(WatchingServer):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            loop, first = asyncio.get_running_loop(), not service.stopping
            service.stopping = self.should_exit = True
            if first:
                loop.call_soon_threadsafe(loop.call_later, grace, self.end_texts)
            else:
                loop.call_soon_threadsafe(self.end_texts)

        def end_texts(self) -> None:
            Thread(target=model.scheduler.close).start()  # requests fail, and then connections end
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
    click.echo(
        f"{name} answers at http://{where}:{port}/v1 (OpenAI) and http://{where}:{port} (Anthropic, Ollama); "
        "Ctrl-C ends"
    )
    gc.collect()
    gc.freeze()  # what is loaded is no garbage, and to search it stops all answers
    sys.setswitchinterval(SWITCH_SECONDS)
    Server(_config(app, log, grace + 2 * LAST_SECONDS)).run(sockets=[listening])
