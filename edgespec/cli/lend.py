"""`edgespec lend`: this machine's memory and processor or GPUs for `edgespec run --lender` elsewhere."""

import socket
from importlib import import_module

import click

from edgespec.errors import EdgespecError, UsageError
from edgespec.machine.files import cache_folder
from edgespec.machine.memory import format_size
from edgespec.machine.this_machine import this_machine
from edgespec.scheduler.targets.places import is_loopback


@click.command(
    epilog="""\b
Examples, all typed on the machine that borrows:
  ssh -L 50052:127.0.0.1:50052 studio edgespec lend
  edgespec run big.gguf --draft small.gguf --lender 127.0.0.1:50052"""
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=50052, show_default=True, help="0 = any that is free.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Compute threads. [default: one per core]")
@click.option("--cache", is_flag=True, help="Keep received weights on this disk, so that they are sent once.")
@click.option("--i-know-it-is-insecure", "insecure", is_flag=True, help="Listen where other machines can reach it.")
def lend(host: str, port: int, threads: int | None, cache: bool, insecure: bool) -> None:
    """Lend this machine's memory and processor, or GPUs, to `edgespec run --lender` on another machine.

    llama.cpp's protocol has no password: every program that reaches the port can read or crash this one, or worse. So
    by default it listens to this machine only, and ssh forwards the port. One borrower at a time; Ctrl-C ends it.
    """
    try:
        host = socket.gethostbyname(host)  # llama.cpp takes numbers, and IPv4 only
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host is {host!r}, but must be an IPv4 address of this machine, as 127.0.0.1") from error
    if not is_loopback(host) and not insecure:
        raise UsageError(
            f"--host {host} would let every machine that reaches it in, without a password; stay at 127.0.0.1 and let "
            f"ssh bring the other machine here: ssh -L {port}:127.0.0.1:{port} THIS edgespec lend "
            "(or say --i-know-it-is-insecure)"
        )
    lending = import_module("edgespec.backends.llamacpp.lending.rpc")
    lending.rpc()
    with socket.socket(socket.AF_INET) as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind((host, port))
        except OSError as error:
            raise EdgespecError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error
        port = free.getsockname()[1]
    folder = cache_folder() / "lent"
    try:
        if cache:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EdgespecError(f"{folder}: cannot be made: {error.strerror or error}") from error
    machine = this_machine()
    click.echo(f"lending at {host}:{port}; {format_size(machine.free - machine.used)} are free; Ctrl-C ends it")
    lending.lend(host, port, threads or machine.cores, str(folder) if cache else None)
