"""Places where copies of the target run: each has one copy and one worker of a `concurrent.futures.Executor`."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from ipaddress import ip_address
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgespec.errors import EdgespecError, UsageError, installed
from edgespec.scheduler.targets.verifier import close_own, stop_up_to


class Place:
    """One that needs no more than what is here has nothing to replace or free."""

    executor: Executor

    def stop(self, owner: str, number: int) -> None:
        """Stop an owner's tasks up to this number, without waiting; this may fail."""

    def renew(self) -> None:
        """Replace a lost worker."""

    def close(self) -> None:
        """Free the copy, without waiting for a pass that can be left."""


class ThreadPlace(Place):
    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)

    def stop(self, owner: str, number: int) -> None:
        stop_up_to(owner, number)

    def close(self) -> None:
        """Wait for the pass under way: it computes in memory that is freed."""
        self.executor.submit(close_own)
        self.executor.shutdown()


class ProcessPlace(Place):
    """A process of this machine, which sees one of several GPUs and ends with this program."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self.renew()

    def renew(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share llama.cpp's threads, which it does not have
        theirs, self._tell = context.Pipe(duplex=False)
        self.executor = ProcessPoolExecutor(
            1, mp_context=context, initializer=_begin_process, initargs=(theirs, self._environment)
        )

    def stop(self, owner: str, number: int) -> None:
        with suppress(OSError):
            self._tell.send((owner, number))

    def close(self) -> None:
        """Close the pipe, which ends the process even within a pass."""
        self.executor.shutdown(wait=False, cancel_futures=True)
        self._tell.close()


def _begin_process(orders: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that asked

    def obey() -> None:
        with suppress(EOFError, OSError):
            while True:
                stop_up_to(*orders.recv())
        os._exit(0)

    threading.Thread(target=obey, daemon=True).start()


class ClusterPlace(Place):
    """Room for one task on any worker of a Dask cluster; bound to one it would be lost with it (distributed 2026.8)."""

    def __init__(self, client: Any, messenger: Executor) -> None:
        self._client, self._messenger = client, messenger
        self.executor = client.get_executor(pure=False)

    def stop(self, owner: str, number: int) -> None:
        """Stop tasks on all workers: Dask calls `stop_up_to` in their event loops, while tasks run."""

        def tell() -> None:
            self._client.run(stop_up_to, owner, number, on_error="ignore")

        self._messenger.submit(tell)


def threads(count: int) -> list[Place]:
    return [ThreadPlace() for _ in range(count)]


def processes(count: int) -> list[Place]:
    found = _gpus()
    shares = [{"CUDA_VISIBLE_DEVICES": found[i % len(found)]} if len(found) > 1 else {} for i in range(count)]
    return [ProcessPlace(share) for share in shares]


def _gpus() -> Sequence[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(i) for i in range(len(list(folder.iterdir())))] if folder.is_dir() else []


class Cluster:
    def __init__(self, address: str) -> None:
        """
        Args:
            address: tls://HOST:PORT, with certificates from Dask's own configuration, or tcp:// of this machine.

        Raises:
            UsageError: it is of another kind.
            MissingPackage: distributed is not installed.
            EdgespecError: there is no scheduler, or it has no workers.
        """
        check_address(address)
        distributed = installed("distributed", "cluster", "targets on other machines")
        try:
            self._client = distributed.Client(address, timeout=10)
        except (OSError, TimeoutError, TypeError, ValueError) as error:
            raise EdgespecError(f"{address}: no Dask scheduler answers: {error}") from error
        self._messenger = ThreadPoolExecutor(1)
        self.places: list[Place] = [ClusterPlace(self._client, self._messenger) for _ in self._client.nthreads()]
        if not self.places:
            self.close()
            raise EdgespecError(f"{address}: has no workers; start some with: dask worker {address} --nthreads 1")

    def close(self) -> None:
        self._messenger.shutdown()
        self._client.close()


def check_address(address: str) -> None:
    """Refuse an address from which the network could run code here: Dask exchanges pickles.

    Raises:
        UsageError: says what is safe.
    """
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("tls", "tcp") or not parts.hostname or not port:
        raise UsageError(f"--cluster is {address!r}, but must be tls://HOST:PORT, a Dask scheduler's address")
    if parts.scheme == "tcp" and not is_loopback(parts.hostname):
        raise UsageError(
            f"--cluster {address}: whoever reaches a Dask scheduler without certificates can run programs; "
            "use tls://, or tcp:// to 127.0.0.1 (through ssh -L)"
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
