"""llama.cpp's own server as a process."""

import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryFile

from benchmarks.serving import closing_connection
from edgespec.errors import EdgespecError, UsageError

LOADS = 300.0  # seconds that a server may take until it answers
# By return code.
ENDED = {-9: "out of memory", -11: "it crashed; on a processor with AMX give it the option --no-repack"}
BY_TEXT = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
DRAFTED = 16  # most draft tokens per pass


def modes(draft: str | None) -> dict[str, list[str]]:
    found = {"plain": list[str]()} | {name: ["--spec-type", name] for name in BY_TEXT}
    if draft:
        found["draft"] = ["--spec-type", "draft-simple", "-md", draft, "--spec-draft-n-max", str(DRAFTED)]
    return found


def options(model: str, *, parallel: int, context_length: int, threads: int) -> list[str]:
    size = str(parallel * context_length)
    about = ["-m", model, "-np", str(parallel), "-c", size, "-t", str(threads), "-tb", str(threads)]
    return [*about, "-ctxcp", "0", "--cache-ram", "0", "--no-webui"]  # no prompt is sent twice


@contextmanager
def started(command: Sequence[str], enter: Callable[[], None] | None = None) -> Iterator[int]:
    """Start a server as a process of its own, which ends with the context.

    Args:
        command: without host and port.
        enter: called in the new process before the program, to limit its memory.

    Yields:
        Its port.

    Raises:
        UsageError: there is no such program.
        EdgespecError: it ended, or did not answer in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    whole = [*command, "--host", "127.0.0.1", "--port", str(port)]
    with TemporaryFile() as log:
        try:
            process = subprocess.Popen(whole, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=enter)
        except OSError as error:
            raise UsageError(f"{command[0]}: cannot be started: {error.strerror or error}") from error
        try:
            until = time.monotonic() + LOADS
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    said = log.read().decode("utf-8", "replace").strip().splitlines() or ["nothing"]
                    why = ENDED.get(process.poll() or 0, said[-1])
                    raise EdgespecError(f"{Path(command[0]).name} does not answer: {why}")
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    try:
        with closing_connection(port) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200  # 503: it is still loading
    except (OSError, HTTPException):
        return False
