"""Shared by programs that run llama.cpp in a child process: JSON in, JSON lines out, no unfinished files."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Say = Callable[[dict[str, Any]], None]


def serve(work: Callable[[dict[str, Any], Say], None]) -> None:
    """Do the job in the first argument; when standard input ends, remove its `out` and exit.

    Args:
        work: called with the job and a function that sends a line to the parent.
    """
    job: dict[str, Any] = json.loads(sys.argv[1])
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def give_up(*_: object) -> None:
        for file in filter(None, [job.get("out"), *job.get("remove", ())]):
            with suppress(OSError):
                os.unlink(file)
        os._exit(130)

    def watch() -> None:
        sys.stdin.buffer.read()
        give_up()

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=lines, flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        # C code ignores Python's handlers; the parent closes standard input as well.
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=watch, daemon=True).start()
    try:
        work(job, say)
    except Exception as error:
        say({"error": str(error).strip() or type(error).__name__})
        os._exit(1)
    os._exit(0)
